// "What if gamma were 2, 4, 8": an estimate from what a trace has recorded. Nothing runs again.
//
// At a position whose drafted token was accepted or rejected, the same is taken to happen again. A
// step without a draft is taken to stay one. At all others (bonus tokens) a drafted token is
// accepted with the measured rate. The expected time follows from the end of the output backwards.

const NO_DRAFT = -1;

/**
 * @param {Object} trace a trace of `readTrace`.
 * @param {number[]} lengths draft lengths, in levels; 0 is plain decoding.
 * @returns {{rows: Object[], notes: string[]} | null} per length the expected passes, seconds and
 *   tokens per pass; null if the trace has no draft to learn from.
 */
export function whatIf(trace, lengths) {
  const outcomes = trace.steps.flatMap(outcomesOf);
  const known = outcomes.filter((outcome) => outcome === 0 || outcome === 1);
  if (!known.length) return null;
  const rate = known.reduce((sum, outcome) => sum + outcome, 0) / known.length;
  const chances = outcomes.map((outcome) => outcome ?? rate);
  const costs = costsOf(trace);
  const rows = lengths.map((gamma) => {
    const { passes, seconds } = expected(chances, gamma, costs);
    return { gamma, passes, seconds, tokensPerPass: chances.length / passes };
  });
  const counts = {
    size: outcomes.length,
    unknown: outcomes.filter((outcome) => outcome === null).length,
    undrafted: outcomes.filter((outcome) => outcome === NO_DRAFT).length,
  };
  return { rows, notes: notesOf(counts, rate, costs) };
}

/** Seconds that plain decoding would have taken after the prompt, by the recorded passes. */
export function plainSeconds(trace) {
  const { verify, accept } = costsOf(trace);
  const tokens = trace.steps.reduce((sum, step) => sum + step.committed, 0);
  return tokens * (verify.at(1) + accept);
}

/** Per written token: 1 if its draft was kept, 0 if it was rejected, null if it is not known. */
function outcomesOf(step) {
  const kept = Array(step.kept.size).fill(1);
  if (step.cut) return kept;
  if (!step.drafted.length) return [NO_DRAFT];
  return [...kept, step.origin === "correction" ? 0 : null];
}

/**
 * The costs of a step, from the recorded ones.
 *
 * The server's own measurements say how passes grow with the draft; without them, and for drafts,
 * medians do, because single steps may be slow by chance. All are scaled to the recorded times, so
 * that estimates can be compared with them.
 */
function costsOf(trace) {
  // In the first step, a drafter with a model reads the prompt.
  const steps = trace.steps.length > 1 ? trace.steps.slice(1) : trace.steps;
  const [first] = trace.steps;
  const drafts = trace.steps.filter((step) => step.drafted.length);
  const levels = sum(drafts.map((step) => step.levels));
  const nodes = sum(drafts.map((step) => step.drafted.length));
  const draft = scaled(steps.map((step) => [step.levels, step.draft]));
  return {
    width: levels ? nodes / levels : 1, // drafted tokens per level: 1 for a chain
    verify: scaled(steps.map((step) => [1 + step.drafted.length, step.verify]), trace.passes),
    draft,
    prompt: Math.max(0, first.draft - draft.at(first.levels)),
    accept: sum(steps.map((step) => step.accept)) / steps.length,
  };
}

/** Expected passes and seconds of all steps. */
function expected(chances, gamma, { verify, draft, prompt, accept, width }) {
  const plain = verify.at(1) + accept + (gamma ? draft.at(0) : 0);
  const drafting = verify.at(1 + gamma * width) + draft.at(gamma) + accept;
  const size = chances.length;
  const passes = Array(size + gamma + 2).fill(0); // from each position on
  const time = Array(size + gamma + 2).fill(0);
  for (let start = size - 1; start >= 0; start--) {
    const levels = chances[start] === NO_DRAFT ? 0 : gamma;
    passes[start] = 1;
    time[start] = levels ? drafting : plain;
    let reach = 1; // the chance that all drafted tokens before this one were accepted
    for (let kept = 0; kept <= levels; kept++) {
      const chance = kept < levels ? Math.max(0, chances[start + kept] ?? 0) : 0;
      passes[start] += reach * (1 - chance) * passes[start + kept + 1];
      time[start] += reach * (1 - chance) * time[start + kept + 1];
      reach *= chance;
    }
  }
  return { passes: passes[0], seconds: time[0] + (gamma ? prompt : 0) };
}

/**
 * A line through the medians of the values at each x, weighted by their number. It does not fall,
 * and does not begin below 0.
 */
function line(points) {
  const groups = new Map();
  for (const [x, y] of points) groups.set(x, [...(groups.get(x) ?? []), y]);
  const found = [...groups].map(([x, values]) => ({ x, y: median(values), w: values.length }));
  const total = found.reduce((sum, { w }) => sum + w, 0);
  const meanX = found.reduce((sum, { x, w }) => sum + w * x, 0) / total;
  const meanY = found.reduce((sum, { y, w }) => sum + w * y, 0) / total;
  const spread = found.reduce((sum, { x, w }) => sum + w * (x - meanX) ** 2, 0);
  const together = found.reduce((sum, { x, y, w }) => sum + w * (x - meanX) * (y - meanY), 0);
  let slope = spread ? Math.max(0, together / spread) : 0;
  if (meanY - slope * meanX < 0) slope = meanX ? meanY / meanX : 0;
  return { sizes: found.length, at: (x) => Math.max(0, meanY + slope * (x - meanX)) };
}

/**
 * The expected value at each x, times what makes its sum that of the values.
 *
 * @param {number[][]} points x and value.
 * @param {number[][]} curve x and expected value, ascending; without it, a line through the points.
 */
function scaled(points, curve = []) {
  const { sizes, at } = curve.length ? polygon(curve) : line(points);
  const expected = sum(points.map(([x]) => at(x)));
  const scale = expected ? sum(points.map(([, y]) => y)) / expected : 1;
  return { sizes, at: (x) => scale * at(x) };
}

/** Straight lines from point to point; after the last one, in proportion. */
function polygon(points) {
  const at = (x) => {
    const right = points.findIndex(([size]) => size >= x);
    const [lastX, lastY] = points.at(-1);
    if (right < 0) return (lastY * x) / lastX;
    const [x2, y2] = points[right];
    if (right === 0) return y2;
    const [x1, y1] = points[right - 1];
    return y1 + ((y2 - y1) * (x - x1)) / (x2 - x1);
  };
  return { sizes: points.length, at };
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function notesOf({ size, unknown, undrafted }, rate, { verify, width }) {
  const notes = [];
  if (undrafted)
    notes.push(`${undrafted} of ${size} tokens came from steps without a draft, which stay so.`);
  if (unknown)
    notes.push(
      `${unknown} of ${size} tokens were a bonus, which no draft had: there, a draft is taken to ` +
        `be accepted as often as elsewhere, ${(100 * rate).toFixed(0)} %.`,
    );
  if (verify.sizes === 1)
    notes.push("All recorded passes have one size, so longer ones are taken to cost no more.");
  if (width > 1)
    notes.push(`Gamma counts the levels of a tree, with ${width.toFixed(1)} tokens per level.`);
  return notes;
}
