// Sampling settings: a form whose values go into every request. Empty fields are left out.

import { el } from "./dom.js";

const KEPT = "tokenleap-settings";

const NUMBERS = [
  ["max_tokens", "Most tokens", { min: 1, step: 1, placeholder: "512" }],
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05, placeholder: "default" }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01, placeholder: "1" }],
  ["top_k", "Top k", { min: 0, step: 1, placeholder: "off" }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01, placeholder: "0" }],
  ["seed", "Seed", { min: 0, step: 1, placeholder: "random" }],
];

const DEFAULT_MAX_TOKENS = 512;

/** The form, and what it says. */
export class Settings {
  constructor() {
    const number = ([name, label, limits]) =>
      field(label, el("input", { name, type: "number", inputmode: "decimal", ...limits }));
    this.form = el(
      "form",
      { class: "settings", onsubmit: (event) => event.preventDefault() },
      ...NUMBERS.map(number),
      field("System prompt", el("textarea", { name: "system", rows: 2 }), "wide"),
      field(
        "Speculation (JSON)",
        el("input", {
          name: "speculative_config",
          placeholder: 'default, or {"method": "ngram"}',
          spellcheck: "false",
        }),
        "wide",
      ),
      field("API key", el("input", { name: "key", type: "password", autocomplete: "off" }), "wide"),
    );
    this.note = el("p", { class: "dim", role: "status" });
    this.details = el(
      "details",
      { class: "card" },
      el("summary", {}, "Settings"),
      this.form,
      this.note,
    );
    this.restore();
    this.form.addEventListener("input", () => this.changed());
    this.changed();
  }

  get values() {
    return Object.fromEntries([...new FormData(this.form)].map(([n, v]) => [n, v.trim()]));
  }

  get key() {
    return this.values.key;
  }

  get system() {
    return this.values.system;
  }

  /** Let the user type an API key. */
  askForKey() {
    this.details.open = true;
    this.form.elements.key.focus();
  }

  /** The fields of a request; throws an Error that names what is wrong. */
  fields() {
    const { values } = this;
    const fields = { max_tokens: DEFAULT_MAX_TOKENS };
    for (const [name, label] of NUMBERS) {
      if (!this.form.elements[name].validity.valid)
        throw new Error(`${label}: ${this.form.elements[name].validationMessage}`);
      if (values[name] !== "") fields[name] = Number(values[name]);
    }
    if (values.speculative_config) {
      try {
        fields.speculative_config = JSON.parse(values.speculative_config);
      } catch {
        throw new Error('Speculation: this is not JSON, such as {"method": "ngram"}.');
      }
    }
    // The same seed lets plain decoding be compared.
    fields.seed ??= Math.floor(Math.random() * 2 ** 31);
    return fields;
  }

  changed() {
    try {
      this.fields();
      this.note.textContent = "Empty fields take the server's defaults.";
    } catch (error) {
      this.note.textContent = error.message;
    }
    const { key, ...kept } = this.values; // keys are not written to disk
    try {
      localStorage.setItem(KEPT, JSON.stringify(kept));
    } catch {}
  }

  restore() {
    try {
      for (const [name, value] of Object.entries(JSON.parse(localStorage.getItem(KEPT)) ?? {}))
        if (this.form.elements[name]) this.form.elements[name].value = value;
    } catch {} // nothing was kept
  }
}

function field(label, input, kind = "") {
  return el("label", { class: `field ${kind}` }, el("span", {}, label), input);
}
