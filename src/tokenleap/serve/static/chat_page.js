// The page of a server: a chat, and the trace viewer for its answers and for traces from disk.

import { AnswerView } from "./answer_view.js";
import { ServerError, Stopper, modelName } from "./api.js";
import { el, hasModifier, helpButton, isTyping, themeButton } from "./dom.js";
import { opener } from "./opening.js";
import { Settings } from "./settings.js";
import { legend } from "./tokens.js";
import { summary } from "./trace_model.js";
import { VIEWER_KEYS, Viewer } from "./viewer.js";

const byId = (id) => document.getElementById(id);
const [chat, tracePage, alert] = ["chat", "trace", "alert"].map(byId);
const viewer = new Viewer(byId("viewer"));
const settings = new Settings();
const traces = new Map(); // "#trace-1" -> {trace, title}
let model = null;
let running = null; // Stopper of the answer that is generated
let messages = [];

const KEYS = [
  ["Enter", "send"],
  ["Shift Enter", "a new line"],
  ["Esc", "from a trace, back to the chat; else stop"],
  ["/", "write"],
  ...VIEWER_KEYS,
];

// Parts

const log = el("div", { class: "log", role: "log", "aria-live": "off", "aria-label": "Chat" });
const welcome = el(
  "div",
  { class: "welcome" },
  el("h2", {}, "Ask something"),
  el("p", { class: "dim" }, "Every token of an answer has the colour of its origin."),
  legend(),
);
const announced = el("p", { class: "unseen", role: "status" });
const prompt = el("textarea", {
  class: "prompt",
  rows: 2,
  placeholder: "Message",
  "aria-label": "Message",
});
const send = el("button", { type: "submit", class: "primary" }, "Send");
const stop = el("button", { type: "button", hidden: true, onclick: () => running?.stop() }, "Stop");
const fresh = el("button", { type: "button", onclick: startAgain }, "New chat");
const composer = el(
  "form",
  { class: "composer card" },
  prompt,
  el("div", { class: "actions" }, fresh, el("span", { class: "gap" }), stop, send),
);
chat.append(settings.details, log, announced, composer);
log.append(welcome);
byId("tools").append(opener(showFile, tell), themeButton(), helpButton(KEYS));

function tell(message) {
  alert.textContent = message;
  alert.hidden = !message;
}

// Asking

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || running) return;
  let fields;
  try {
    fields = settings.fields();
  } catch (error) {
    settings.details.open = true;
    tell(error.message);
    return;
  }
  tell("");
  prompt.value = "";
  welcome.remove();
  log.append(el("div", { class: "question" }, el("p", { class: "text" }, text)));
  ask([...messages, { role: "user", content: text }], fields);
});

/** Generate the next message, below everything else. */
async function ask(conversation, fields) {
  if (running) return;
  log.querySelectorAll(".retry").forEach((button) => button.remove()); // it would lose this turn
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const pair = el("div", { class: "answers" });
  const body = { messages: [...system, ...conversation], ...fields };
  const view = new AnswerView("Speculative", body, keepTrace);
  pair.append(view.root);
  log.append(pair);
  toBottom();
  const done = await generate(view);
  if (done) {
    messages = [...conversation, { role: "assistant", content: view.text }];
    if (view.trace && view.finish !== "stopped") view.links.append(compareButton(view, pair));
  } else {
    const retry = () => {
      if (running) return;
      pair.remove();
      ask(conversation, fields);
    };
    view.links.append(el("button", { type: "button", class: "retry", onclick: retry }, "Try again"));
  }
}

/** Whether the answer came, be it only in part because the user stopped it. */
async function generate(view) {
  running = new Stopper();
  [send.disabled, stop.hidden, fresh.disabled] = [true, false, true];
  try {
    model ??= await modelName(settings.key);
    byId("model").textContent = model;
    view.body = { model, ...view.body };
    await view.run(settings.key, running);
    announced.textContent = `The answer has ended: ${view.counts.tokens} tokens.`;
    prompt.focus({ preventScroll: true });
    return true;
  } catch (error) {
    if (!view.finish) view.tell(error);
    if (error instanceof ServerError && error.status === 401) settings.askForKey();
    else prompt.focus({ preventScroll: true });
    return false;
  } finally {
    running = null;
    [send.disabled, stop.hidden, fresh.disabled] = [false, true, false];
  }
}

// A reader at the bottom stays there while the answer grows.
let follows = true;

function toBottom() {
  window.scrollTo(0, document.documentElement.scrollHeight);
}

window.addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = document.documentElement;
  if (!chat.hidden) follows = scrollHeight - scrollTop - clientHeight < 80;
});
new ResizeObserver(() => {
  if (follows && !chat.hidden && log.contains(document.querySelector(".answer"))) toBottom();
}).observe(log);

/** Decode the same request without drafts, beside it and after it, so that neither slows the other. */
function compareButton(view, pair) {
  const button = el("button", { type: "button" }, "Compare with plain");
  button.addEventListener("click", async () => {
    if (running) return;
    button.remove();
    const body = { ...view.body, speculative_config: { method: "none" } };
    const plain = new AnswerView("Plain", body, keepTrace);
    pair.classList.add("two");
    pair.append(plain.root);
    if (!(await generate(plain)) || !plain.trace) {
      plain.links.append(compareButton(view, pair));
      return;
    }
    const [fast, slow] = [view, plain].map((one) => perToken(summary(one.trace)));
    const same = view.text === plain.text ? "Same text" : "Another text";
    const factor = (slow / fast).toFixed(2);
    const repeated = view.repeated.hidden ? "" : ", as it repeats earlier answers";
    plain.links.append(
      el("span", { class: "verdict" }, `${same}; speculative: ${factor} times the speed${repeated}`),
    );
  });
  return button;
}

/** Seconds of a token: texts may differ in length. */
function perToken({ seconds, tokens }) {
  return seconds / Math.max(1, tokens);
}

function startAgain() {
  messages = [];
  log.replaceChildren(welcome);
  tell("");
  prompt.focus();
}

// Traces

function keepTrace(trace) {
  const name = `#trace-${traces.size + 1}`;
  traces.set(name, { trace, title: `Answer ${traces.size + 1}` });
  return name;
}

function showFile(trace, title) {
  const name = keepTrace(trace);
  traces.set(name, { trace, title });
  location.hash = name;
}

let scrolled = 0; // where the chat was when a trace was opened

function route() {
  const found = traces.get(location.hash);
  if (found && tracePage.hidden) scrolled = window.scrollY;
  const back = !found && !tracePage.hidden;
  chat.hidden = Boolean(found);
  tracePage.hidden = !found;
  if (found) {
    byId("trace-title").textContent = found.title;
    tell("");
    try {
      viewer.show(found.trace);
    } catch (error) {
      viewer.root.replaceChildren();
      tell(`${found.title}: this trace cannot be shown: ${error.message}`);
    }
    window.scrollTo(0, 0);
  }
  if (back) window.scrollTo(0, scrolled);
  document.title = found ? `${found.title} · Tokenleap` : "Tokenleap";
}

// Keys

prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    composer.requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if (!tracePage.hidden) location.hash = "";
    else running?.stop();
  } else if (!tracePage.hidden) viewer.keys(event);
  else if (event.key === "/" && !hasModifier(event) && !isTyping(event.target)) {
    event.preventDefault();
    prompt.focus();
  }
});
window.addEventListener("hashchange", route);
route();
prompt.focus();
modelName("").then(
  (name) => {
    model = name;
    byId("model").textContent = name;
  },
  (error) => (error.status === 401 ? settings.askForKey() : tell(error.message)),
);
