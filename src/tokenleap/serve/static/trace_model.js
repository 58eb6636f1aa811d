// A trace as `tokenleap generate --trace FILE` writes it: reading it, and what follows from it.

const FORMAT = "tokenleap-trace-1";
const ORIGINS = ["draft", "correction", "bonus", "plain"];

/** The text is no trace; the message says why. */
export class TraceError extends Error {}

/** Read a trace from text. Throws a `TraceError`. */
export function parseTrace(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new TraceError("This file is not JSON.");
  }
  // What `tokenleap generate --json --trace` prints has the trace beside the answer.
  return readTrace(value?.format === undefined && value?.trace ? value.trace : value);
}

/** The same from a parsed object. */
export function readTrace(value) {
  if (value === null || typeof value !== "object" || value.format !== FORMAT)
    throw new TraceError(
      "This is not a trace. Make one with: tokenleap generate PROMPT --trace FILE",
    );
  if (!Array.isArray(value.steps) || value.pieces === null || typeof value.pieces !== "object")
    throw new TraceError("This trace is damaged: its steps or pieces are missing.");
  let position = 0;
  const steps = value.steps.map((step, index) => {
    const read = readStep(step, index, position);
    position += read.committed;
    return read;
  });
  return {
    steps,
    pieces: new Map(Object.entries(value.pieces).map(([id, text]) => [Number(id), String(text)])),
    prefill: Number(value.prefill_seconds) || 0,
    encode: Number(value.encode_seconds) || 0,
    passes: Object.entries(value.pass_seconds ?? {})
      .map(([size, time]) => [Number(size), Number(time)])
      .filter(([size, time]) => size > 0 && time > 0)
      .sort(([a], [b]) => a - b),
  };
}

function readStep(step, index, position) {
  const check = (holds, what) => {
    if (!holds) throw new TraceError(`This trace is damaged: step ${index + 1} has ${what}.`);
  };
  check(step !== null && typeof step === "object", "no content");
  const lists = ["parents", "drafted", "q", "p", "accepted", "rejected"];
  check(
    lists.every((name) => Array.isArray(step[name])),
    "no lists of tokens",
  );
  const size = step.drafted.length;
  const within = (node) => Number.isInteger(node) && node >= 0 && node < size;
  check(
    ["parents", "q", "p"].every((name) => step[name].length === size),
    "lists of different lengths",
  );
  check(
    step.parents.every((parent, node) => Number.isInteger(parent) && parent >= -1 && parent < node),
    "a parent after its child",
  );
  check([...step.accepted, ...step.rejected].every(within), "accepted tokens that are not drafted");
  check(Number.isInteger(step.committed) && ORIGINS.includes(step.origin), "no result");
  const { candidates = [], sources = [] } = step;
  check(
    Array.isArray(candidates) && [0, size + 1].includes(candidates.length),
    "other candidates than tokens",
  );
  check(
    candidates.every((place) => Array.isArray(place) && place.every(Array.isArray)),
    "candidates that are no lists",
  );
  const number = (value) => value === null || Number.isFinite(value); // null is not known
  check([step.token, ...step.drafted].every(Number.isInteger), "tokens that are no ids");
  check([...step.q, ...step.p].every(number), "probabilities that are no numbers");
  check(
    candidates.flat().every(([token, ...values]) => Number.isInteger(token) && values.every(number)),
    "candidates that are no numbers",
  );
  const depths = [];
  step.parents.forEach((parent) => depths.push(parent < 0 ? 1 : depths[parent] + 1));
  const cut = step.committed <= step.accepted.length;
  return {
    number: index + 1,
    position, // tokens of the output before this step
    parents: step.parents,
    drafted: step.drafted,
    q: step.q,
    p: step.p,
    depths,
    levels: Math.max(0, ...depths),
    accepted: step.accepted,
    kept: new Set(step.accepted.slice(0, step.committed)),
    refused: new Set(step.rejected.filter((node) => !cut || depths[node] <= step.committed)),
    reason: String(step.reason ?? ""),
    token: step.token,
    origin: step.origin,
    committed: step.committed,
    cut, // a stop ended the output before the step's last token
    draft: Number(step.draft_seconds) || 0,
    verify: Number(step.verify_seconds) || 0,
    accept: Number(step.accept_seconds) || 0,
    sources: Array.isArray(sources) ? sources : [],
    candidates: candidates.map((place) =>
      place.map(([token, model, p, q]) => ({ token, model, p, q })),
    ),
  };
}

/** A token's text, or "#" and its id if that is not known. */
export function textOf(trace, token) {
  return trace.pieces.get(token) ?? `#${token}`;
}

/** What became of a drafted token: "accepted", "rejected" or "unreached". */
export function fate(step, node) {
  if (step.kept.has(node)) return "accepted";
  return step.refused.has(node) ? "rejected" : "unreached";
}

/** The tokens of a step that are part of the output: {token, origin, source}. */
export function written(step) {
  const tokens = [...step.kept].map((node) => ({
    token: step.drafted[node],
    origin: "draft",
    source: step.sources[node],
  }));
  return step.cut ? tokens : [...tokens, { token: step.token, origin: step.origin }];
}

/** Counts and times over all steps, as `tokenleap trace --json` has them. */
export function summary(trace) {
  const sum = (of) => trace.steps.reduce((total, step) => total + of(step), 0);
  const drafts = trace.steps.filter((step) => step.drafted.length);
  const kept = sum((step) => step.kept.size);
  const refused = sum((step) => step.refused.size);
  const [draft, verify, accept] = ["draft", "verify", "accept"].map((part) => sum((s) => s[part]));
  const positions = [];
  for (const step of drafts)
    for (let depth = 1; depth <= step.levels; depth++) {
      positions[depth - 1] ??= { drafted: 0, kept: 0 };
      positions[depth - 1].drafted += 1;
      positions[depth - 1].kept += depth <= step.kept.size ? 1 : 0;
    }
  return {
    tokens: sum((step) => step.committed),
    passes: trace.steps.length,
    drafts: drafts.length,
    drafted: sum((step) => step.drafted.length),
    kept,
    refused,
    meanLength: drafts.length ? 1 + kept / drafts.length : 1,
    rate: kept + refused ? kept / (kept + refused) : null,
    draft,
    verify,
    accept,
    seconds: draft + verify + accept,
    positions,
  };
}
