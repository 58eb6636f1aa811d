// Tokens in the colours of their origins, and the words of speculative decoding.

import { el, term } from "./dom.js";

/** What the words mean, for readers who meet them for the first time. */
export const MEANINGS = {
  drafted: "Drafted: guessed by a draft model or a trained head, and accepted by the target.",
  "looked up": "Looked up: found in earlier text, without a model, and accepted by the target.",
  correction:
    "Correction: the target's own token in place of a drafted one that it rejected.",
  bonus:
    "Bonus: the target accepted a whole draft. The same pass gave this token as well, for free.",
  "target alone": "By the target alone: nothing had been drafted for this pass.",
  model: "The target's probability of a token, before temperature, masks and truncation.",
  p: "p: the probability of a token under the target, the accelerated model, as it is sampled from.",
  q: "q: the probability that the drafter gave to the token which it drafted.",
  gamma: "Gamma: the draft length, the most tokens that are drafted before a pass of the target.",
  "tokens per pass":
    "Tokens for each pass of the target. Without speculation it is 1; a pass costs most of the time.",
  "tokens/s": "Tokens per second, without the time for reading the prompt.",
};

/** A word that tells its meaning. */
export function word(name, kind = "") {
  return term(name, MEANINGS[name], kind);
}

/** A token of the output in the colour of its origin. */
export function tokenSpan(text, { origin, source }) {
  const by = source ? ` by-${source}` : "";
  return el("span", { class: `token ${origin}${by}`, title: originTitle(origin, source) }, text);
}

function originTitle(origin, source) {
  const by = { model: " by the drafter", lookup: " by a lookup" }[source] ?? "";
  return {
    draft: `drafted${by} and accepted`,
    correction: "correction: the target's token after a rejection",
    bonus: "bonus: the target's token after everything was accepted",
    plain: "by the target alone",
  }[origin];
}

const KINDS = [
  ["drafted", "draft by-model", (token) => token.origin === "draft" && token.source !== "lookup"],
  ["looked up", "draft by-lookup", (token) => token.source === "lookup"],
  ["correction", "correction", (token) => token.origin === "correction"],
  ["bonus", "bonus", (token) => token.origin === "bonus"],
  ["target alone", "plain", (token) => token.origin === "plain"],
];

/** What the colours of tokens mean; of these tokens, those that occur with their numbers. */
export function legend(tokens = null) {
  const items = KINDS.map(([name, kind, is]) => [name, kind, tokens?.filter(is).length]);
  return el(
    "p",
    { class: "legend" },
    ...items
      .filter(([, , count]) => count !== 0)
      .map(([name, kind, count]) =>
        el("span", {}, word(name, `token ${kind}`), count === undefined ? null : ` ${count}`),
      ),
  );
}
