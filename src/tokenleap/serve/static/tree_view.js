// One step as a tree: the last token before it at the left, drafted tokens level by level, and the
// token that the target added after the accepted path.

import { el, probability, svg, visible } from "./dom.js";
import { fate, textOf } from "./trace_model.js";

const COLUMN = 150;
const ROW = 54;
const WIDTH = 122;
const HEIGHT = 42;

const MARKS = { accepted: "✓", rejected: "✗", unreached: "", correction: "→", bonus: "+" };
const WORDS = {
  accepted: "accepted",
  rejected: "rejected",
  unreached: "not reached",
  correction: "correction by the target",
  bonus: "bonus token of the target",
  plain: "token of the target",
};

/** How many rows a step's tree takes. */
export function rowsOf(step) {
  return Math.max(...places(step).map((place) => place.row)) + 1;
}

/** Height in pixels of a tree with this many rows. */
export function heightOf(rows) {
  return rows * ROW + 8;
}

/**
 * Where every node lies. Node -1 is the root; the last entry is the added token, if there is one.
 *
 * What became output is the first row; all other tokens follow in the order of their drafting.
 */
export function places(step) {
  const end = step.accepted.at(-1) ?? -1;
  const below = new Map();
  const put = (parent, node) => below.set(parent, [...(below.get(parent) ?? []), node]);
  for (const node of step.kept) put(step.parents[node], node);
  if (!step.cut) put(end, "added");
  step.parents.forEach((parent, node) => step.kept.has(node) || put(parent, node));
  const rows = new Map();
  let row = 0;
  const waiting = [-1];
  while (waiting.length) {
    const node = waiting.pop();
    rows.set(node, row);
    const children = below.get(node) ?? [];
    if (children.length) waiting.push(...[...children].reverse());
    else row += 1;
  }
  const nodes = [{ node: -1, parent: null, depth: 0, row: rows.get(-1) }];
  step.parents.forEach((parent, node) =>
    nodes.push({ node, parent, depth: step.depths[node], row: rows.get(node) }),
  );
  if (!step.cut) {
    const depth = end < 0 ? 1 : step.depths[end] + 1;
    nodes.push({ node: "added", parent: end, depth, row: rows.get("added") });
  }
  return nodes;
}

/**
 * The tree of a step.
 *
 * @param {Object} trace the trace.
 * @param {Object} step one of its steps.
 * @param {number | null} before the token before the step; null at the beginning.
 * @param {(place: Object) => void} show called with the place under the pointer or the focus.
 */
export function treeView(trace, step, before, show) {
  const nodes = places(step);
  const byNode = new Map(nodes.map((place) => [place.node, place]));
  const x = (place) => place.depth * COLUMN;
  const y = (place) => place.row * ROW + 4;
  const size = [
    Math.max(...nodes.map(x)) + WIDTH + 4,
    heightOf(Math.max(...nodes.map((place) => place.row)) + 1),
  ];
  const edges = nodes
    .filter((place) => place.parent !== null)
    .map((place) => {
      const from = byNode.get(place.parent);
      const [x1, y1] = [x(from) + WIDTH, y(from) + HEIGHT / 2];
      const [x2, y2] = [x(place), y(place) + HEIGHT / 2];
      const middle = (x1 + x2) / 2;
      const kind = kindOf(step, place.node);
      return svg("path", {
        class: `edge ${kind}`,
        d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`,
      });
    });
  const lines = svg("svg", { width: size[0], height: size[1], "aria-hidden": "true" }, ...edges);
  const boxes = nodes.map((place) => box(trace, step, before, place, show));
  nodes.forEach((place, index) => {
    boxes[index].style.left = `${x(place)}px`;
    boxes[index].style.top = `${y(place)}px`;
  });
  const tree = el("div", { class: "tree", role: "tree", "aria-label": "Drafted tokens" });
  tree.style.width = `${size[0]}px`;
  tree.style.height = `${size[1]}px`;
  tree.append(lines, ...boxes);
  tree.addEventListener("keydown", (event) => walk(event, nodes, boxes));
  return tree;
}

/** Up and down arrows go through the tokens; left and right belong to the steps. */
function walk(event, nodes, boxes) {
  const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  const at = boxes.indexOf(document.activeElement);
  if (!by || at < 0) return;
  event.preventDefault();
  const next = boxes[at + by];
  if (next) next.focus();
}

function kindOf(step, node) {
  if (node === -1) return "root";
  return node === "added" ? step.origin : fate(step, node);
}

function box(trace, step, before, place, show) {
  const { node } = place;
  const kind = kindOf(step, node);
  const token = node === -1 ? before : node === "added" ? step.token : step.drafted[node];
  const text = token === null ? "start" : textOf(trace, token);
  const drafted = typeof node === "number" && node >= 0;
  const numbers = drafted
    ? [`p ${probability(step.p[node])}`, `q ${probability(step.q[node])}`]
    : [node === -1 ? "last token" : kind === "plain" ? "target" : kind];
  const source = drafted && step.sources[node] ? `, found by a ${step.sources[node]}` : "";
  const said = node === -1 ? "last token of the text" : `${WORDS[kind]}${source}`;
  return el(
    "div",
    {
      class: `node ${kind}${source ? ` by-${step.sources[node]}` : ""}`,
      role: "treeitem",
      tabindex: node === -1 ? "0" : "-1",
      "aria-level": place.depth + 1,
      title: `${JSON.stringify(text)}: ${said}`,
      onpointerenter: () => show(place),
      onfocus: () => show(place),
      onclick: (event) => event.currentTarget.focus(),
    },
    el(
      "span",
      { class: "text" },
      MARKS[kind] ? el("b", { class: "mark", "aria-hidden": "true" }, MARKS[kind]) : null,
      el("bdi", {}, token === null ? "⟨start⟩" : visible(text)),
    ),
    el("span", { class: "unseen" }, `: ${said}`),
    el("span", { class: "numbers" }, ...numbers.map((one) => el("span", {}, one))),
  );
}

/** Why the step ended where it did, in one or two sentences. */
export function why(trace, step) {
  const quote = (token) => `“${visible(textOf(trace, token))}”`;
  if (!step.drafted.length) return "Nothing was drafted: the target's own token.";
  const share = `${step.kept.size} of ${step.levels} levels accepted.`;
  if (step.cut) return `${share} The output ended within this step.`;
  if (step.origin !== "correction")
    return `${share} Every token of the path passed, so the pass gives ${quote(step.token)} as well.`;
  const end = step.accepted.at(-1) ?? -1;
  const [first, ...others] = [...step.refused].filter((node) => step.parents[node] === end);
  const what =
    first === undefined
      ? "The tokens after the path were rejected"
      : `${quote(step.drafted[first])} was rejected at p ${probability(step.p[first])} ` +
        `and q ${probability(step.q[first])}`;
  const also = others.length
    ? `, then ${others.map((node) => quote(step.drafted[node])).join(", ")}`
    : "";
  const reason = step.reason ? ` (${others.length ? "last: " : ""}${step.reason})` : "";
  return `${share} ${what}${also}${reason}. The target continues with ${quote(step.token)}.`;
}
