// Settings: a form whose values go into every request. Empty fields are left out.

import { el } from "./dom.js";

const KEPT = "tokenleap-settings";

const NUMBERS = [
  ["max_tokens", "Most tokens", { min: 1, step: 1 }, "512"],
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }, "0"],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }, "1"],
  ["top_k", "Top k", { min: 0, step: 1 }, "off"],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }, "0"],
  ["seed", "Seed", { min: 0, step: 1 }, "random"],
  ["num_speculative_tokens", "Draft length (gamma)", { min: 1, max: 256, step: 1 }, "the method's"],
];

/** As in the shell, where the model's generation config says nothing. */
const OTHERWISE = { max_tokens: 512, temperature: 0 };

const NOTE =
  "Empty fields take the values that they show. This chat and these settings, without the key, " +
  "are kept in this browser only: the chat until its tab is closed.";

/** The form, and what it says. */
export class Settings {
  /**
   * @param {() => void} changed called after each change.
   * @param {() => void} forget called when the user deletes all that is kept.
   */
  constructor(changed, forget) {
    this.models = [];
    const number = ([name, label, limits, placeholder]) =>
      field(label, el("input", { name, type: "number", inputmode: "decimal", placeholder, ...limits }));
    const numbers = NUMBERS.map(number);
    numbers.at(-1).append(el("span", {}, "Most tokens drafted before a pass."));
    this.model = el("select", { name: "model" });
    this.modelField = field("Model", this.model, "wide");
    this.modelField.hidden = true;
    this.method = el("select", { name: "method" });
    this.form = el(
      "form",
      { class: "settings", onsubmit: (event) => event.preventDefault() },
      this.modelField,
      ...numbers.slice(0, -1),
      field("Method of speculation", this.method, "wide"),
      numbers.at(-1),
      field("API key", el("input", { name: "key", type: "password", autocomplete: "off" }), "wide"),
      field("System prompt", el("textarea", { name: "system", rows: 2 }), "whole"),
    );
    this.note = el("p", { class: "dim", role: "status" });
    const all = () => {
      this.form.reset();
      this.kept = {};
      this.changed();
      forget();
      try {
        localStorage.removeItem(KEPT);
      } catch {} // a browser may keep nothing
    };
    this.details = el(
      "details",
      { class: "card" },
      el("summary", {}, "Settings"),
      this.form,
      el(
        "div",
        { class: "foot" },
        this.note,
        el("button", { type: "button", onclick: all }, "Delete chat and settings"),
      ),
    );
    this.restore();
    this.form.addEventListener("input", () => this.changed());
    this.changed();
    this.told = changed;
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

  /** What the server says of the model that is chosen; undefined until it has said so. */
  get card() {
    return this.models.find(({ id }) => id === this.model.value) ?? this.models[0];
  }

  /** Show the models, the defaults of the chosen one, and the methods that a request may choose. */
  know(models) {
    this.models = models;
    const own = models.filter(({ id, root }) => id === root || !models.some((one) => one.id === root));
    choose(this.model, own.map(({ id }) => [id, id]), this.kept.model);
    this.modelField.hidden = own.length < 2;
    this.changed();
  }

  showCard() {
    this.shown = this.card;
    const { default_sampling_params: defaults = {}, speculation } = this.card;
    for (const [name, , , otherwise] of NUMBERS)
      this.form.elements[name].placeholder =
        name in defaults ? `${defaults[name]} (the model's)` : otherwise;
    const own = speculation ? `the server's: ${speculation.method}` : "the server's";
    const methods = Object.entries(speculation?.methods ?? {});
    choose(
      this.method,
      [["", own], ...methods.map(([name, what]) => [name, `${name}: ${what}`])],
      this.kept.method,
    );
  }

  /** Let the user see a field, and type in it. */
  focus(name) {
    this.details.open = true;
    this.form.elements[name].focus();
  }

  /** The fields of a request; throws an Error that names what is wrong. */
  fields() {
    const { values } = this;
    const fields = {};
    for (const [name, label] of NUMBERS) {
      const input = this.form.elements[name];
      if (!input.validity.valid) throw new Error(`${label}: ${input.validationMessage}`);
      if (values[name]) fields[name] = Number(values[name]);
    }
    const unknown = { temperature: null }; // the model is not loaded, and may have its own
    const defaults = this.card?.default_sampling_params ?? unknown;
    for (const [name, value] of Object.entries(OTHERWISE))
      if (!(name in defaults)) fields[name] ??= value;
    const { num_speculative_tokens, ...others } = fields;
    if (values.method) others.speculative_config = { method: values.method, num_speculative_tokens };
    // The same seed lets plain decoding be compared.
    others.seed ??= Math.floor(Math.random() * 2 ** 31);
    return others;
  }

  changed() {
    const { key, ...kept } = this.values; // keys are not written to disk
    this.kept = { ...this.kept, ...kept };
    if (this.card !== this.shown) this.showCard();
    // The server's own method has its own length, and "none" has no drafts.
    this.form.elements.num_speculative_tokens.disabled = ["", "none"].includes(this.method.value);
    try {
      this.fields();
      this.note.textContent = NOTE;
    } catch (error) {
      this.note.textContent = error.message;
    }
    try {
      localStorage.setItem(KEPT, JSON.stringify(this.kept));
    } catch {} // a browser may keep nothing
    this.told?.();
  }

  restore() {
    try {
      this.kept = JSON.parse(localStorage.getItem(KEPT)) ?? {};
    } catch {
      this.kept = {};
    }
    // Until the server tells its models and methods, what was chosen is the only choice.
    choose(this.model, [[this.kept.model ?? ""]]);
    choose(this.method, [["", "the server's"], [this.kept.method || "none"]], this.kept.method);
    for (const [name, value] of Object.entries(this.kept))
      if (this.form.elements[name]) this.form.elements[name].value = value;
  }
}

/** Fill a select with values and texts, and choose one; the first if there is no such. */
function choose(select, options, value) {
  select.replaceChildren(
    ...options.map(([value, text]) => el("option", { value }, text ?? value)),
  );
  select.value = value ?? "";
  if (select.selectedIndex < 0) select.selectedIndex = 0;
}

function field(label, input, kind = "") {
  return el("label", { class: `field ${kind}` }, el("span", {}, label), input);
}
