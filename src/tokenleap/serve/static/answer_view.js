// One answer: its text in the colours of its origin, and a tally of what it took.

import { ServerError, answer, server } from "./api.js";
import { el, seconds } from "./dom.js";
import { tokenSpan } from "./tokens.js";
import { readTrace, summary, written } from "./trace_model.js";
import { plainSeconds } from "./what_if.js";

let plainCost = null; // seconds of a pass without a draft, measured in the last answer

/** An answer that is generated, or was. */
export class AnswerView {
  /**
   * @param {string} title what decodes it.
   * @param {Object} body of the request.
   * @param {(trace: Object) => string} keep takes a trace and returns the link to it.
   */
  constructor(title, body, keep) {
    this.body = body;
    this.keep = keep;
    this.text = "";
    this.trace = null;
    this.state = el("span", { class: "state" });
    this.content = el("div", { class: "text" });
    this.tally = el("dl", { class: "tally" });
    this.repeated = el("p", { class: "dim", hidden: true });
    this.links = el("p", { class: "links" });
    this.root = el(
      "section",
      { class: "card answer", "aria-label": title },
      el("div", { class: "row" }, el("h2", {}, title), this.state),
      this.content,
      el("div", { class: "foot" }, this.tally, this.repeated, this.links),
    );
    this.counts = { tokens: 0, passes: 0, began: 0 };
    this.show(null);
  }

  /** Generate it. Errors are shown in the answer, and thrown. */
  async run(key, stopper) {
    this.root.setAttribute("aria-busy", "true");
    this.state.textContent = "waiting …";
    this.sent = performance.now();
    try {
      for await (const part of answer(this.body, key, stopper)) this.take(part);
    } catch (error) {
      if (error.name === "AbortError") this.finish ??= "stopped";
      else this.tell(error);
      if (error.name !== "AbortError") throw error;
    } finally {
      if (stopper.stopped && this.finish === "abort") this.finish = "stopped";
      this.root.removeAttribute("aria-busy");
      this.state.textContent = FINISHES[this.finish] ?? "";
    }
  }

  take({ tokens, finish, metrics, trace }) {
    if (tokens.length && !this.counts.began) {
      this.counts.began = performance.now();
      this.state.textContent = "generating …";
    }
    for (const { text, origin } of tokens) {
      this.text += text;
      this.counts.tokens += 1;
      this.counts.passes += origin === "draft" ? 0 : 1; // every step ends with a token of the target
      this.content.append(tokenSpan(text, { origin }));
    }
    if (finish) this.finish = finish;
    if (metrics) this.measured(metrics);
    if (trace) this.traced(readTrace(trace));
    else this.show(this.live());
  }

  /** The speed of an answer that repeats earlier ones says nothing about others. */
  measured(metrics) {
    this.metrics = metrics;
    const { accepted_earlier_tokens: earlier, generated_tokens: all } = metrics;
    this.repeated.hidden = !earlier;
    this.repeated.textContent =
      `${earlier} of ${all} tokens are repeated: they were drafted from the answers to earlier ` +
      "requests. A new prompt is slower.";
  }

  /** What is known while it runs. */
  live() {
    const { tokens, passes, began } = this.counts;
    const elapsed = (performance.now() - began) / 1e3;
    const known = this.metrics || !server.sharesDrafts; // else it may repeat earlier answers
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
    [...this.content.children].forEach((span, index) => {
      if (sources[index]) span.replaceWith(tokenSpan(span.textContent, sources[index]));
    });
    this.show({
      speed: sums.seconds ? sums.tokens / sums.seconds : null,
      perPass: sums.passes ? sums.tokens / sums.passes : null,
      saved: sums.drafts && plain ? plain - sums.seconds : null,
    });
    this.links.append(el("a", { href: this.keep(trace) }, "Trace"));
  }

  show(facts) {
    const saved = facts?.saved ?? null;
    const items = [
      ["tokens/s", facts?.speed?.toFixed(1) ?? "–", "Without the prompt."],
      ["tokens per pass", facts?.perPass?.toFixed(2) ?? "–", "Plain decoding has 1."],
    ];
    if (this.body.speculative_config?.method !== "none")
      items.push([
        saved !== null && saved < 0 ? "lost to plain" : "saved to plain",
        saved === null ? "–" : `≈ ${seconds(Math.abs(saved))}`,
        "An estimate: plain decoding at the measured time of a pass, less the time this took.",
      ]);
    this.tally.replaceChildren(
      ...items.map(([name, value, title]) =>
        el("div", { title }, el("dt", {}, name), el("dd", {}, value)),
      ),
    );
  }

  tell(error) {
    this.finish = "failed";
    const when = error.retry ? ` Try again in ${error.retry} s.` : "";
    const known = error instanceof ServerError;
    const message = known ? `${error.message}${when}` : `This failed: ${error.message}`;
    this.content.append(el("p", { class: "failure", role: "alert" }, message));
  }
}

const FINISHES = {
  stop: "finished",
  length: "most tokens reached",
  stopped: "stopped",
  failed: "failed",
  abort: "ended by the server",
};
