// Tokens in the colours of their origins.

import { el } from "./dom.js";

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

/** What the colours of tokens mean. */
export function legend() {
  const one = (name, kind) => el("span", { class: `token ${kind}` }, name);
  return el(
    "p",
    { class: "legend" },
    one("drafted", "draft by-model"),
    one("looked up", "draft by-lookup"),
    one("correction", "correction"),
    one("bonus", "bonus"),
    one("target alone", "plain"),
  );
}
