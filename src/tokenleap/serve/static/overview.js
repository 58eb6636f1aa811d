// What a trace comes to: its figures, other draft lengths, acceptance by position.

import { el, seconds } from "./dom.js";
import { word } from "./tokens.js";
import { whatIf } from "./what_if.js";

const GAMMAS = [2, 4, 8];

const whatIfNote =
  "An estimate: nothing ran again. It replays the recorded acceptances with the recorded times " +
  "of drafts and passes.";

/** The figures at the top. */
export function tilesView(trace, sums) {
  const tiles = [
    ["tokens", sums.tokens, `${sums.passes} passes of the target`],
    ["tokens per pass", (sums.tokens / sums.passes).toFixed(2), `${sums.drafts} with a draft`],
    [
      "acceptance rate",
      sums.rate === null ? "–" : `${(100 * sums.rate).toFixed(0)} %`,
      `${sums.kept} accepted, ${sums.refused} rejected`,
    ],
    [
      "tokens per second",
      sums.seconds ? (sums.tokens / sums.seconds).toFixed(1) : "–",
      `${seconds(sums.seconds)}, and ${seconds(trace.prefill)} for the prompt`,
    ],
    [
      "time in passes",
      sums.seconds ? `${((100 * sums.verify) / sums.seconds).toFixed(0)} %` : "–",
      `draft ${seconds(sums.draft)}, accept ${seconds(sums.accept)}`,
    ],
  ];
  return el(
    "dl",
    { class: "tiles" },
    ...tiles.map(([name, value, more]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, value), el("dd", { class: "more" }, more)),
    ),
  );
}

/** What other draft lengths would have cost. */
export function whatIfView(trace, sums) {
  const found = whatIf(trace, [0, ...GAMMAS]);
  const title = el("h2", { id: "what-if-title" }, "What if ", word("gamma"), " were …");
  if (!found)
    return el(
      "section",
      { class: "card", "aria-labelledby": "what-if-title" },
      title,
      el("p", { class: "dim" }, "This trace has no drafts to learn acceptances from."),
    );
  const recorded = {
    passes: sums.passes,
    seconds: sums.seconds,
    tokensPerPass: sums.tokens / sums.passes,
  };
  const plain = found.rows[0].seconds;
  const slowest = Math.max(recorded.seconds, ...found.rows.map((row) => row.seconds)) || 1;
  const row = (name, one, kind) => {
    const bar = el("span", { class: "bar" });
    bar.style.width = `${(100 * one.seconds) / slowest}%`;
    return el(
      "tr",
      { class: kind },
      el("th", { scope: "row" }, name),
      el("td", {}, one.passes.toFixed(Number.isInteger(one.passes) ? 0 : 1)),
      el("td", {}, one.tokensPerPass.toFixed(2)),
      el("td", { class: "with-bar" }, bar, seconds(one.seconds)),
      el("td", {}, one.seconds ? `${(plain / one.seconds).toFixed(2)}×` : "–"),
    );
  };
  const columns = ["gamma", "passes", "tokens per pass", "time", "against plain"];
  return el(
    "section",
    { class: "card", "aria-labelledby": "what-if-title" },
    title,
    el(
      "table",
      { class: "what-if" },
      el("thead", {}, el("tr", {}, ...columns.map((name) => el("th", { scope: "col" }, name)))),
      el(
        "tbody",
        {},
        row("as recorded", recorded, "recorded"),
        ...found.rows.map((one) => row(one.gamma ? String(one.gamma) : "plain", one, "")),
      ),
    ),
    el("p", { class: "dim" }, [whatIfNote, ...found.notes].join(" ")),
  );
}

/** How often the token at each position of a draft was accepted. */
export function positionsView(sums) {
  const rows = sums.positions.map(({ drafted, kept }, index) => {
    const bar = el("span", { class: "bar" });
    bar.style.width = `${(100 * kept) / drafted}%`;
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, index + 1),
      el("td", { class: "with-bar" }, bar, `${((100 * kept) / drafted).toFixed(0)} %`),
      el("td", {}, `${kept} / ${drafted}`),
    );
  });
  const columns = ["position", "accepted", "of drafts"];
  return el(
    "section",
    { class: "card", "aria-labelledby": "positions-title" },
    el("h2", { id: "positions-title" }, "Acceptance by position"),
    rows.length
      ? el(
          "div",
          { class: "scroll", tabindex: "0" },
          el(
            "table",
            { class: "positions" },
            el("thead", {}, el("tr", {}, ...columns.map((one) => el("th", { scope: "col" }, one)))),
            el("tbody", {}, ...rows),
          ),
        )
      : el("p", { class: "dim" }, "Nothing was drafted."),
  );
}
