// Small helpers over the DOM. Text reaches the page through text nodes only, never as markup.

/**
 * Make an element.
 *
 * @param {string} tag its name.
 * @param {Object} [attributes] `class`, `role`, `aria-...`: set as attributes; functions are
 *   listeners (`onclick`); false, null and undefined are left out.
 * @param {...(Node|string|number|null)} children nodes, or text.
 */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child != null && child !== false));
  return element;
}

/** A token's text with its white space shown. */
export function visible(text) {
  const shown = { " ": "·", "\n": "↵", "\t": "⇥", "\r": "␍" };
  return text.replace(/[ \n\t\r]/g, (space) => shown[space]) || "∅";
}

/** Seconds as "1.23 s", "45.6 ms" or "78 µs". */
export function seconds(value) {
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 0.001) return `${(1e3 * value).toFixed(value >= 0.1 ? 0 : 1)} ms`;
  return value > 0 ? `${(1e6 * value).toFixed(0)} µs` : "0 ms";
}

/** A probability with three digits, "–" if it is not known. */
export function probability(value) {
  if (value == null) return "–";
  if (value > 0 && value < 0.0005) return "<.001";
  return value === 1 ? "1" : value === 0 ? "0" : value.toFixed(3).replace(/^0/, "");
}

/** Whether the user is typing, so that single keys are text. */
export function isTyping(target) {
  return Boolean(target.closest?.("textarea, select, input:not([type=range], [type=checkbox])"));
}

let meaningShown = null; // the only one, for all words

/**
 * A word that tells its meaning when it is pressed: not everyone can point at it.
 *
 * @param {string} word the word.
 * @param {string} meaning a sentence or two.
 * @param {string} [kind] further classes of the word.
 */
export function term(word, meaning, kind = "") {
  const onclick = (event) => {
    if (!meaningShown) {
      meaningShown = el("p", { class: "meaning", popover: "auto" });
      document.body.append(meaningShown);
    }
    meaningShown.hidePopover();
    meaningShown.textContent = meaning;
    meaningShown.showPopover({ source: event.currentTarget });
  };
  return el("button", { type: "button", class: `term ${kind}`, title: meaning, onclick }, word);
}

/** A button that copies what `text` returns. */
export function copyButton(text, name = "Copy") {
  const button = el("button", { type: "button", class: "copy" }, name);
  button.addEventListener("click", async () => {
    const done = await copied(text());
    button.textContent = done ? "Copied" : "Select it to copy";
    setTimeout(() => (button.textContent = name), 1500);
  });
  return button;
}

/** Whether it could be copied. Without TLS, browsers have only the old way. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
    const focused = document.activeElement;
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return done;
  }
}

/** Whether something is open that Escape closes. */
export function isCovered() {
  return document.querySelector("dialog[open], :popover-open") !== null;
}

const THEMES = ["auto", "light", "dark"];

/** A button that goes through the themes: that of the system, light, dark. */
export function themeButton() {
  const button = el("button", { class: "quiet", type: "button" });
  const root = document.documentElement;
  const use = (theme) => {
    root.dataset.theme = theme;
    button.textContent = { auto: "◐", light: "☀", dark: "☾" }[theme];
    button.title = `Theme: ${theme} (t)`;
    button.setAttribute("aria-label", `Theme: ${theme}. Change it.`);
  };
  const next = () => {
    const theme = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
    use(theme);
    try {
      localStorage.setItem("tokenleap-theme", theme);
    } catch {} // a page from disk may have no storage
  };
  let kept = null;
  try {
    kept = localStorage.getItem("tokenleap-theme");
  } catch {}
  use(THEMES.includes(kept) ? kept : "auto");
  button.addEventListener("click", next);
  document.addEventListener("keydown", (event) => {
    if (event.key === "t" && !hasModifier(event) && !isTyping(event.target)) next();
  });
  return button;
}

/** Whether a key is part of a shortcut of the browser. */
export function hasModifier(event) {
  return event.ctrlKey || event.metaKey || event.altKey;
}

/**
 * A button that opens a list of keys; so does "?".
 *
 * @param {Array<[string, string]>} keys what to press, and what it does.
 */
export function helpButton(keys) {
  const rows = keys.flatMap(([key, does]) => [
    el("dt", {}, ...key.split(" ").map((one) => el("kbd", {}, one))),
    el("dd", {}, does),
  ]);
  const close = el("button", { type: "button", onclick: () => dialog.close() }, "Close");
  const dialog = el(
    "dialog",
    { class: "help", "aria-labelledby": "help-title" },
    el("h2", { id: "help-title" }, "Keys"),
    el("dl", {}, ...rows),
    close,
  );
  document.body.append(dialog);
  const open = () => dialog.open || dialog.showModal();
  document.addEventListener("keydown", (event) => {
    if (event.key === "?" && !hasModifier(event) && !isTyping(event.target)) open();
  });
  return el(
    "button",
    { class: "quiet", type: "button", title: "Keys (?)", "aria-label": "Keys", onclick: open },
    "?",
  );
}
