// "What if gamma were 2, 4, 8": an estimate from what a trace has recorded. Nothing runs again.
//
// At a position whose drafted token was accepted or rejected, the same is taken to happen again. At
// all others (bonus tokens, steps without a draft) a drafted token is accepted with the measured
// acceptance rate. The expected time follows by dynamic programming from the end of the output.

/**
 * @param {Object} trace a trace of `readTrace`.
 * @param {number[]} lengths draft lengths, in levels; 0 is plain decoding.
 * @returns {{rows: Object[], notes: string[]} | null} per length the expected passes, seconds and
 *   tokens per pass; null if the trace has no draft to learn from.
 */
export function whatIf(trace, lengths) {
  const outcomes = trace.steps.flatMap(outcomesOf);
  const known = outcomes.filter((outcome) => outcome !== null);
  if (!known.length) return null;
  const rate = known.reduce((sum, outcome) => sum + outcome, 0) / known.length;
  const chances = outcomes.map((outcome) => outcome ?? rate);
  const costs = costsOf(trace);
  const rows = lengths.map((gamma) => {
    const { passes, seconds } = expected(chances, gamma, costs);
    return { gamma, passes, seconds, tokensPerPass: chances.length / passes };
  });
  return { rows, notes: notesOf(outcomes.length - known.length, outcomes.length, rate, costs) };
}

/** Seconds that plain decoding would have taken after the prompt, by the recorded passes. */
export function plainSeconds(trace) {
  const { verify, accept } = costsOf(trace);
  const tokens = trace.steps.reduce((sum, step) => sum + step.committed, 0);
  return tokens * (verify.at(1) + accept);
}

/** Per written token: 1 if it was drafted and kept, 0 if the drafted one was rejected, else null. */
function outcomesOf(step) {
  const kept = Array(step.kept.size).fill(1);
  return step.cut ? kept : [...kept, step.origin === "correction" ? 0 : null];
}

/** The costs of a step, from the recorded ones. */
function costsOf(trace) {
  // The first step reads the prompt where the drafter has a model.
  const steps = trace.steps.length > 1 ? trace.steps.slice(1) : trace.steps;
  const drafts = trace.steps.filter((step) => step.drafted.length);
  const levels = drafts.reduce((sum, step) => sum + step.levels, 0);
  const nodes = drafts.reduce((sum, step) => sum + step.drafted.length, 0);
  const verify = line(steps.map((step) => [1 + step.drafted.length, step.verify]));
  const draft = line(steps.map((step) => [step.levels, step.draft]));
  return {
    width: levels ? nodes / levels : 1, // drafted tokens per level: 1 for a chain
    verify,
    draft,
    accept: median(steps.map((step) => step.accept)),
  };
}

/** Expected passes and seconds from the first position on. */
function expected(chances, gamma, { verify, draft, accept, width }) {
  const cost = verify.at(1 + gamma * width) + (gamma ? draft.at(gamma) : 0) + accept;
  const size = chances.length;
  const passes = Array(size + gamma + 2).fill(0);
  for (let start = size - 1; start >= 0; start--) {
    let reach = 1; // the chance that all drafted tokens before this one were accepted
    let rest = 0;
    for (let kept = 0; kept <= gamma; kept++) {
      const chance = kept < gamma ? (chances[start + kept] ?? 0) : 0;
      rest += reach * (1 - chance) * passes[start + kept + 1];
      reach *= chance;
    }
    passes[start] = 1 + rest;
  }
  return { passes: passes[0], seconds: passes[0] * cost };
}

/**
 * A line through the medians of the values at each x, weighted by their number. It does not fall,
 * and does not begin below 0.
 */
export function line(points) {
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

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function notesOf(unknown, size, rate, { verify, width }) {
  const notes = [];
  if (unknown)
    notes.push(
      `Nothing was drafted for ${unknown} of ${size} tokens: there, a draft is taken to be ` +
        `accepted as often as elsewhere, ${(100 * rate).toFixed(0)} %.`,
    );
  if (verify.sizes === 1)
    notes.push("All recorded passes have one size, so longer ones are taken to cost no more.");
  if (width > 1)
    notes.push(`Gamma counts the levels of a tree, with ${width.toFixed(1)} tokens per level.`);
  return notes;
}
