// One answer: its text as Markdown in the colours of its origin, and a tally of what it took.

import { ServerError, answer } from "./api.js";
import { copyButton, el, seconds, term } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { legend, word } from "./tokens.js";
import { readTrace, summary, written } from "./trace_model.js";
import { plainSeconds } from "./what_if.js";

let plainCost = null; // seconds of a pass without a draft, measured in the last answer

const SAVED =
  "An estimate: decoding without speculation at the measured time of a pass, less the time this took.";

/** An answer that is generated, or was. */
export class AnswerView {
  /**
   * @param {string} title what decodes it.
   * @param {Object?} body of the request; null if it is not known yet.
   * @param {(trace: Object) => string} keep takes a trace and returns the link to it.
   */
  constructor(title, body, keep) {
    Object.assign(this, { title, body, keep });
    this.tokens = []; // {text, origin, source}
    this.trace = null;
    this.facts = null;
    this.method = el("span", { class: "dim" });
    this.state = el("span", { class: "state" });
    this.markdown = new MarkdownView();
    this.failure = "";
    const figures = [word("tokens/s"), word("tokens per pass")];
    if (title !== PLAIN) figures.push(term("against plain", SAVED));
    this.tally = el(
      "dl",
      { class: "tally" },
      ...figures.map((name) => el("div", {}, el("dt", {}, name), el("dd"))),
    );
    this.repeated = el("p", { class: "repeated", hidden: true });
    this.origins = el("div", { class: "origins" });
    this.links = el("p", { class: "links" });
    this.root = el(
      "section",
      { class: "card answer", "aria-label": title },
      el("div", { class: "row" }, el("h2", {}, title), this.method, this.state),
      this.markdown.root,
      this.origins,
      this.repeated,
      el("div", { class: "foot" }, this.tally, this.links),
    );
    this.counts = { passes: 0, began: 0 };
    this.show(null);
  }

  get text() {
    return this.tokens.map(({ text }) => text).join("");
  }

  /** Whether it is part of the conversation: what did not come is not. */
  get counted() {
    return this.tokens.length > 0 || !["failed", "stopped"].includes(this.finish);
  }

  /**
   * Generate it. Errors are shown in the answer, and thrown.
   *
   * @param {Object} server what the server says of its model.
   */
  async run(server, key, stopper) {
    this.server = server;
    const { method } = this.body.speculative_config ?? server.speculation ?? {};
    if (method && method !== "none") this.method.textContent = method;
    this.root.setAttribute("aria-busy", "true");
    this.state.textContent = "waiting …";
    try {
      for await (const part of answer(this.body, key, stopper, server.traces)) this.take(part);
    } catch (error) {
      if (error.name === "AbortError") this.finish ??= "stopped";
      else this.tell(error);
      if (error.name !== "AbortError") throw error;
    } finally {
      if (stopper.stopped && this.finish === "abort") this.finish = "stopped";
      this.root.removeAttribute("aria-busy");
      this.ended();
    }
  }

  take({ tokens, finish, metrics, trace }) {
    if (tokens.length && !this.counts.began) {
      this.counts.began = performance.now();
      this.state.textContent = "generating …";
    }
    for (const { text, origin } of tokens) {
      this.tokens.push({ text, origin });
      this.counts.passes += origin === "draft" ? 0 : 1; // every step ends with a token of the target
    }
    if (finish) this.finish = finish;
    if (metrics) this.measured(metrics);
    if (trace) this.traced(readTrace(trace));
    else this.show(this.live());
    this.draw();
  }

  /** Draw it soon: the longer that takes, the more seldom. */
  draw() {
    this.timer ??= setTimeout(() => {
      const began = performance.now();
      this.markdown.show(this.tokens);
      this.cost = performance.now() - began;
      this.timer = null;
    }, 4 * (this.cost ?? 4));
  }

  /** Draw all of it, with what is known of its origins now. */
  ended() {
    clearTimeout(this.timer);
    this.timer = null;
    this.state.textContent = FINISHES[this.finish] ?? "";
    this.markdown.show(this.tokens, true);
    this.origins.replaceChildren(...(this.tokens.length ? [legend(this.tokens)] : []));
    this.tally.hidden = !this.tokens.length;
    if (this.tokens.length) this.links.prepend(copyButton(() => this.text));
  }

  /** The speed of an answer that repeats earlier ones says nothing about others. */
  measured(metrics) {
    const { accepted_earlier_tokens: earlier, generated_tokens: all } = metrics;
    this.metrics = { accepted_earlier_tokens: earlier, generated_tokens: all };
    this.repeated.hidden = !earlier;
    this.repeated.textContent =
      (2 * earlier >= all ? "Repeated prompt: " : "") +
      `${earlier} of ${all} tokens were drafted from the answers to earlier requests. ` +
      "That explains the speed; a new prompt is slower.";
  }

  /** What is known while it runs. */
  live() {
    const { passes, began } = this.counts;
    const tokens = this.tokens.length;
    const elapsed = (performance.now() - began) / 1e3;
    const known = this.metrics || !this.server.shares_drafts; // else it may repeat earlier answers
    return {
      speed: elapsed > 0.2 ? tokens / elapsed : null,
      perPass: known && passes ? tokens / passes : null,
      saved: known && plainCost && passes < tokens ? tokens * plainCost - elapsed : null,
    };
  }

  /** The whole output has come: exact counts, and which drafter each token is from. */
  traced(trace) {
    this.trace = trace;
    const sums = summary(trace);
    const plain = plainSeconds(trace);
    if (plain) plainCost = plain / sums.tokens;
    const sources = trace.steps.flatMap(written);
    this.tokens.forEach((token, index) => {
      ({ origin: token.origin, source: token.source } = sources[index] ?? token);
    });
    this.show({
      speed: sums.seconds ? sums.tokens / sums.seconds : null,
      perPass: sums.passes ? sums.tokens / sums.passes : null,
      saved: sums.drafts && plain ? plain - sums.seconds : null,
    });
    this.links.append(el("a", { class: "button", href: this.keep(trace) }, "Trace"));
  }

  show(facts) {
    this.facts = facts;
    const saved = facts?.saved ?? null;
    const values = [
      facts?.speed?.toFixed(1) ?? "–",
      facts?.perPass?.toFixed(2) ?? "–",
      saved === null ? "–" : `≈ ${seconds(Math.abs(saved))} ${saved < 0 ? "lost" : "saved"}`,
    ];
    [...this.tally.querySelectorAll("dd")].forEach((dd, index) => (dd.textContent = values[index]));
  }

  tell(error) {
    this.finish = "failed";
    this.state.textContent = FINISHES.failed;
    this.tally.hidden = !this.tokens.length;
    const when = error.retry ? ` Try again in ${error.retry} s.` : "";
    const known = error instanceof ServerError;
    this.fail(known ? `${error.message}${when}` : `This failed: ${error.message}`);
  }

  fail(message) {
    this.failure = message;
    this.markdown.root.after(el("p", { class: "failure", role: "alert" }, message));
  }

  // Over a reload

  /** What `restored` needs; without `origins`, only the text is kept. */
  saved(origins) {
    const { title, text, finish, facts, metrics, failure } = this;
    const tokens = origins
      ? this.tokens.map((token) => [token.text, token.origin, token.source])
      : [[text, "", null]];
    const method = this.method.textContent;
    return { title, method, tokens, finish: finish ?? "stopped", facts, metrics, failure };
  }

  static restored({ title, method, tokens, finish, facts, metrics, failure }) {
    const view = new AnswerView(title, null, null);
    view.method.textContent = method;
    view.tokens = tokens.map(([text, origin, source]) => ({ text, origin, source }));
    view.finish = finish;
    if (metrics) view.measured(metrics);
    if (failure) view.fail(failure);
    view.show(facts);
    view.ended();
    return view;
  }
}

export const PLAIN = "Plain";

const FINISHES = {
  stop: "finished",
  length: "most tokens reached",
  stopped: "stopped",
  failed: "failed",
  abort: "ended by the server",
};
