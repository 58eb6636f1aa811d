// The trace viewer: the output, its steps, one step as a tree, and what other draft lengths would do.

import { el, hasModifier, isTyping, probability, seconds, svg, visible } from "./dom.js";
import { positionsView, tilesView, whatIfView } from "./overview.js";
import { legend, tokenSpan, word } from "./tokens.js";
import { fate, summary, textOf, written } from "./trace_model.js";
import { heightOf, rowsOf, treeView, why } from "./tree_view.js";

export const VIEWER_KEYS = [
  ["← →", "the step before, the next one"],
  ["Home End", "the first step, the last one"],
  ["↑ ↓", "through the tokens of a step"],
  ["t", "theme"],
  ["?", "these keys"],
];

const TALLEST = 5; // rows of a tree before it scrolls
const BAR = 64; // height of the strip

/** What is shown of a trace below `root`. `show` replaces it; `keys` handles a key. */
export class Viewer {
  constructor(root) {
    this.root = root;
    this.trace = null;
    this.at = 0;
  }

  /** Show a trace from its first step with a draft on. */
  show(trace) {
    this.trace = trace;
    this.sums = summary(trace);
    if (!trace.steps.length) {
      this.root.replaceChildren(el("p", { class: "empty" }, "This trace has no steps."));
      return;
    }
    this.tokens = trace.steps.map(written);
    this.build();
    const first = trace.steps.findIndex((step) => step.drafted.length);
    this.select(Math.max(0, first));
  }

  /** Whether a key was for the viewer. */
  keys(event) {
    if (!this.trace?.steps.length || hasModifier(event) || isTyping(event.target)) return false;
    const last = this.trace.steps.length - 1;
    const to = { ArrowLeft: this.at - 1, ArrowRight: this.at + 1, Home: 0, End: last }[event.key];
    if (to === undefined || document.querySelector("dialog[open]")) return false;
    event.preventDefault();
    this.select(Math.min(Math.max(to, 0), last), true);
    return true;
  }

  build() {
    this.output = this.outputView();
    this.strip = this.stripView();
    this.count = el("output", { class: "count", "aria-live": "polite" });
    this.range = el("input", {
      type: "range",
      min: 1,
      max: this.trace.steps.length,
      "aria-label": "Step",
      oninput: (event) => this.select(event.target.valueAsNumber - 1, true),
    });
    const go = (by) => () =>
      this.select(Math.min(Math.max(this.at + by, 0), this.trace.steps.length - 1), true);
    this.times = el("dl", { class: "times" });
    this.why = el("p", { class: "why" });
    this.canvas = el("div", { class: "canvas" });
    const rows = Math.max(...this.trace.steps.map(rowsOf));
    this.canvas.style.height = `${heightOf(Math.min(rows, TALLEST)) + 16}px`;
    this.side = el("div", { class: "side" });
    this.root.replaceChildren(
      tilesView(this.trace, this.sums),
      el(
        "section",
        { class: "card", "aria-labelledby": "output-title" },
        el("div", { class: "row" }, el("h2", { id: "output-title" }, "Output"), legend()),
        this.output,
      ),
      el(
        "section",
        { class: "card", "aria-labelledby": "steps-title" },
        el(
          "div",
          { class: "row" },
          el("h2", { id: "steps-title" }, "Steps"),
          timeLegend(),
          el(
            "div",
            { class: "pager" },
            el("button", { type: "button", "aria-label": "Step before", onclick: go(-1) }, "←"),
            this.count,
            el("button", { type: "button", "aria-label": "Next step", onclick: go(1) }, "→"),
          ),
        ),
        el("div", { class: "strip-frame" }, this.strip),
        this.range,
      ),
      el(
        "section",
        { class: "card step", "aria-label": "The step" },
        el("div", { class: "main" }, this.times, this.why, this.canvas),
        this.side,
      ),
      el(
        "div",
        { class: "pair" },
        whatIfView(this.trace, this.sums),
        positionsView(this.sums),
      ),
    );
  }

  // The output and the strip

  outputView() {
    this.segments = this.trace.steps.map((step, index) =>
      el(
        "span",
        {
          class: "segment",
          role: "button",
          tabindex: "-1",
          "aria-label": `Step ${step.number}: ${this.tokens[index].map((t) => textOf(this.trace, t.token)).join("")}`,
          onclick: () => this.select(index),
          onkeydown: (event) => {
            if (event.key === "Enter" || event.key === " ") {
              event.preventDefault();
              this.select(index);
            }
          },
        },
        ...this.tokens[index].map((token) => tokenSpan(textOf(this.trace, token.token), token)),
      ),
    );
    return el("div", { class: "text output", role: "group" }, ...this.segments);
  }

  stripView() {
    const { steps } = this.trace;
    const width = Math.max(3, Math.min(16, Math.floor(1100 / steps.length)));
    const times = steps.map((step) => step.draft + step.verify + step.accept);
    // The first step may read the prompt. It must not flatten all others.
    const sorted = [...times].sort((a, b) => a - b);
    const top = sorted[Math.floor(0.98 * (sorted.length - 1))] || 1;
    const scale = (time) => (BAR * Math.min(time, 1.05 * top)) / (1.05 * top);
    this.marker = svg("rect", { class: "marker", y: 0, width, height: BAR + 8, rx: 2 });
    const bars = steps.flatMap((step, index) => {
      const whole = scale(times[index]);
      let y = BAR;
      return ["verify", "draft", "accept"].map((part) => {
        const height = times[index] ? (whole * step[part]) / times[index] : 0;
        y -= height;
        return svg("rect", { class: part, x: index * width + 1, y, width: width - 1, height });
      });
    });
    const dots = steps.map((step, index) =>
      svg("rect", {
        class: step.kept.size ? "gain" : step.drafted.length ? "loss" : "none",
        x: index * width + 1,
        y: BAR + 3,
        width: width - 1,
        height: 4,
      }),
    );
    this.barWidth = width;
    const pick = (event) => {
      const left = event.currentTarget.getBoundingClientRect().left;
      const index = Math.floor((event.clientX - left) / width);
      if (index >= 0 && index < steps.length) this.select(index);
    };
    return svg(
      "svg",
      {
        class: "strip",
        width: steps.length * width + 1,
        height: BAR + 8,
        "aria-hidden": "true",
        onclick: pick,
      },
      this.marker,
      ...bars,
      ...dots,
    );
  }

  // One step

  /** Show a step; `reveal` scrolls the output and the strip to it. */
  select(index, reveal = false) {
    const step = this.trace.steps[index];
    const old = this.segments[this.at];
    old.classList.remove("chosen");
    old.removeAttribute("aria-current");
    old.tabIndex = -1;
    this.at = index;
    const segment = this.segments[index];
    segment.classList.add("chosen");
    segment.setAttribute("aria-current", "step");
    segment.tabIndex = 0;
    this.marker.setAttribute("x", index * this.barWidth);
    if (reveal) {
      within(this.output, segment.offsetTop - this.output.offsetTop, "scrollTop", "clientHeight");
      within(this.strip.parentElement, index * this.barWidth, "scrollLeft", "clientWidth");
    }
    this.range.value = index + 1;
    this.count.textContent = `${index + 1} / ${this.trace.steps.length}`;
    this.times.replaceChildren(
      ...[
        ["draft", step.draft],
        ["verify", step.verify],
        ["accept", step.accept],
      ].map(([name, value]) =>
        el("div", { class: name }, el("dt", {}, name), el("dd", {}, seconds(value))),
      ),
    );
    const tree = treeView(this.trace, step, this.tokenBefore(index), (place) =>
      this.showPlace(step, place),
    );
    this.canvas.replaceChildren(tree);
    this.why.textContent = why(this.trace, step);
    const last = step.cut ? [...step.kept].at(-1) : "added";
    const parent = step.cut ? step.parents[last] : (step.accepted.at(-1) ?? -1);
    this.showPlace(step, { node: last, parent });
  }

  tokenBefore(index) {
    for (let step = index - 1; step >= 0; step--) {
      const tokens = this.tokens[step];
      if (tokens.length) return tokens.at(-1).token;
    }
    return null;
  }

  /** The alternatives at the position of a token: what the target and the drafter held likely. */
  showPlace(step, place) {
    const parent = place.node === -1 ? null : place.parent;
    const token = place.node === "added" ? step.token : step.drafted[place.node];
    const heading =
      parent === null
        ? "The last token before this step"
        : `Alternatives to “${visible(textOf(this.trace, token))}”`;
    const candidates = parent === null ? [] : (step.candidates[parent + 1] ?? []);
    this.side.replaceChildren(
      el("h3", {}, heading),
      candidates.length
        ? this.candidatesView(step, parent, candidates, token)
        : el("p", { class: "dim" }, parent === null ? rootNote : missing(step)),
    );
  }

  candidatesView(step, parent, candidates, token) {
    const siblings = new Map();
    step.parents.forEach((of, node) => of === parent && siblings.set(step.drafted[node], node));
    const rows = candidates.map((one) => {
      const node = siblings.get(one.token);
      const bar = el("span", { class: "bar" });
      bar.style.width = `${Math.max(0, Math.min(100, 100 * one.model))}%`;
      return el(
        "tr",
        { class: one.token === token ? "own" : "" },
        el(
          "th",
          { scope: "row" },
          el("bdi", {}, visible(textOf(this.trace, one.token))),
          node === undefined ? null : el("span", { class: `badge ${fate(step, node)}` }, "drafted"),
        ),
        el("td", { class: "with-bar" }, bar, probability(one.model)),
        el("td", {}, probability(one.p)),
        el("td", {}, probability(one.q)),
      );
    });
    return el(
      "table",
      { class: "candidates" },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col" }, "token"),
          ...["model", "p", "q"].map((name) => el("th", { scope: "col" }, word(name))),
        ),
      ),
      el("tbody", {}, ...rows),
    );
  }

}

const missing = (step) =>
  step.candidates.length
    ? "The server withholds these alternatives: they may tell of other requests."
    : "This trace has no alternatives. generate --trace records them.";
const rootNote = "The tree continues the text after this token.";
function timeLegend() {
  const one = (name) => el("span", { class: `time ${name}` }, name);
  return el("p", { class: "legend" }, one("verify"), one("draft"), one("accept"));
}

/** Scroll a box so that an offset in it can be seen. */
function within(box, offset, scroll, size) {
  const margin = box[size] / 4;
  if (offset < box[scroll] + margin / 2 || offset > box[scroll] + box[size] - margin)
    box[scroll] = offset - box[size] / 2;
}
