// The page of a server: a chat, and the trace viewer for its answers and for traces from disk.

import { AnswerView, PLAIN } from "./answer_view.js";
import { ServerError, Stopper, servedModels } from "./api.js";
import { copyButton, el, hasModifier, helpButton, isCovered, isTyping, themeButton } from "./dom.js";
import { opener } from "./opening.js";
import { Settings } from "./settings.js";
import { legend } from "./tokens.js";
import { summary } from "./trace_model.js";
import { VIEWER_KEYS, Viewer } from "./viewer.js";

const byId = (id) => document.getElementById(id);
const [chat, tracePage, alert] = ["chat", "trace", "alert"].map(byId);
const viewer = new Viewer(byId("viewer"));
const traces = new Map(); // "#trace-1" -> {trace, title}
let running = null; // Stopper of the answer that is generated
let turns = []; // the conversation: what is shown is what is sent

const KEYS = [
  ["Enter", "send"],
  ["Shift Enter", "a new line"],
  ["Esc", "from a trace, back to the chat; else stop, or end editing"],
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
const system = el("div", { class: "system card", role: "group", "aria-label": "System prompt" });
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
const origins = el("input", { type: "checkbox", onchange: () => showOrigins(origins.checked) });
const composer = el(
  "form",
  { class: "composer card" },
  prompt,
  el(
    "div",
    { class: "actions" },
    fresh,
    el("label", { class: "switch", title: "Colour each token by its origin" }, origins, "Origins"),
    el("span", { class: "gap" }),
    stop,
    send,
  ),
);
const settings = new Settings(showChosen, startAgain);
chat.append(settings.details, system, log, announced, composer);
byId("tools").append(opener(showFile, tell), themeButton(), helpButton(KEYS));

function tell(message) {
  alert.textContent = message;
  alert.hidden = !message;
}

/** The model, and the system prompt, which is the first message of what is sent. */
function showChosen() {
  byId("model").textContent = settings.card?.id ?? "";
  const text = settings.system;
  system.hidden = !text;
  const edit = () => settings.focus("system");
  system.replaceChildren(
    el("h2", {}, "System prompt"),
    el("p", { class: "text" }, text),
    el("button", { type: "button", onclick: edit }, "Edit"),
  );
}

const ORIGINS_KEPT = "tokenleap-origins";

function showOrigins(shown) {
  origins.checked = shown;
  chat.classList.toggle("no-origins", !shown);
  try {
    localStorage.setItem(ORIGINS_KEPT, shown ? "on" : "off");
  } catch {} // a browser may keep nothing
}

// The conversation

/** A question and its answer; what can be done with them. */
class Turn {
  constructor(question) {
    this.question = question;
    this.answer = null; // an AnswerView
    this.asked = el("div", { class: "question", role: "group", "aria-label": "Your message" });
    this.answers = el("div", { class: "answers" });
    this.root = el("article", { class: "turn" }, this.asked, this.answers);
    this.showQuestion();
  }

  showQuestion() {
    this.asked.replaceChildren(
      el("p", { class: "text" }, this.question),
      el("p", { class: "links" }, idle("Edit", () => this.edit()), copyButton(() => this.question)),
    );
  }

  /** Another question in its place; what follows goes when it is sent. */
  edit() {
    const text = el("textarea", { class: "prompt", "aria-label": "Edited message" });
    text.value = this.question;
    const cancel = () => {
      this.showQuestion();
      prompt.focus({ preventScroll: true });
    };
    const form = el(
      "form",
      { class: "edit card" },
      text,
      el(
        "div",
        { class: "actions" },
        el("span", { class: "dim" }, "Its answer and what follows will be replaced."),
        el("span", { class: "gap" }),
        el("button", { type: "button", onclick: cancel }, "Cancel"),
        idle("Send", () => form.requestSubmit(), "primary"),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const edited = text.value.trim();
      if (!edited || running || !areSettingsValid()) return;
      turns.splice(turns.indexOf(this) + 1).forEach((turn) => turn.root.remove());
      this.question = edited;
      this.showQuestion();
      this.ask();
    });
    sendsOnEnter(text, form);
    text.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || running) return;
      event.stopPropagation();
      cancel();
    });
    this.asked.replaceChildren(form);
    text.focus();
  }

  /** Generate the answer, in the place of one that is there. It is the last turn. */
  async ask() {
    if (running || !areSettingsValid()) return;
    tell("");
    const title = settings.values.method === "none" ? PLAIN : "Speculative";
    const view = new AnswerView(title, null, keepTrace);
    this.answers.classList.remove("two");
    this.show(view);
    keepChat();
    toBottom();
    const done = await generate(view);
    this.offer();
    if (done && view.trace && title !== PLAIN && view.finish !== "stopped")
      view.links.append(compareButton(view, this.answers));
    keepChat();
  }

  show(view) {
    this.answer = view;
    this.answers.replaceChildren(view.root);
  }

  /** What can be done with the last answer. */
  offer() {
    const again = this.answer.finish === "failed" ? "Try again" : "Regenerate";
    this.answer.links.append(idle(again, () => this.ask(), "again"));
    if (!this.answer.counted)
      this.answer.links.append(el("span", { class: "dim" }, "The next message will replace this one."));
  }
}

/** A button that does nothing while an answer is generated. */
function idle(name, act, kind = "") {
  const onclick = () => running || act();
  return el("button", { type: "button", class: `idle ${kind}`, onclick, disabled: running }, name);
}

/** The messages before the answer to the last turn. */
function conversation() {
  const first = settings.system ? [{ role: "system", content: settings.system }] : [];
  const said = turns.flatMap(({ question, answer }, index) => [
    { role: "user", content: question },
    ...(index < turns.length - 1 ? [{ role: "assistant", content: answer.text }] : []),
  ]);
  return [...first, ...said];
}

function add(question) {
  welcome.remove();
  const turn = new Turn(question);
  turns.push(turn);
  log.append(turn.root);
  return turn;
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || running || !areSettingsValid()) return;
  prompt.value = "";
  if (turns.length && !turns.at(-1).answer.counted) turns.pop().root.remove();
  add(text).ask();
});

function areSettingsValid() {
  try {
    settings.fields();
    return true;
  } catch (error) {
    settings.details.open = true;
    tell(error.message);
    return false;
  }
}

/** Learn of the models; of one that was not loaded, again. */
async function connect() {
  if (!settings.card?.default_sampling_params) settings.know(await servedModels(settings.key));
}

/** Whether the answer came, be it only in part because the user stopped it. */
async function generate(view) {
  running = new Stopper();
  showRunning();
  try {
    await connect();
    view.body ??= { model: settings.card.id, messages: conversation(), ...settings.fields() };
    await view.run(settings.card, settings.key, running);
    announced.textContent = `The answer has ended: ${view.tokens.length} tokens.`;
    prompt.focus({ preventScroll: true });
    return true;
  } catch (error) {
    if (!view.failure) view.tell(error);
    if (error instanceof ServerError && error.status === 401) settings.focus("key");
    else prompt.focus({ preventScroll: true });
    return false;
  } finally {
    running = null;
    showRunning();
  }
}

function showRunning() {
  const busy = running !== null;
  [send.disabled, stop.hidden, fresh.disabled] = [busy, !busy, busy];
  for (const button of chat.querySelectorAll(".idle")) button.disabled = busy;
}

function startAgain() {
  running?.stop();
  turns = [];
  log.replaceChildren(welcome);
  keepChat();
  tell("");
  prompt.focus();
}

// Over a reload, this tab keeps the chat: no server does.

const CHAT_KEPT = "tokenleap-chat";
const LARGEST_KEPT = 2_000_000; // characters

function keepChat() {
  const said = (origins) =>
    JSON.stringify(turns.map(({ question, answer }) => [question, answer.saved(origins)]));
  try {
    let kept = said(true);
    if (kept.length > LARGEST_KEPT) kept = said(false);
    sessionStorage.removeItem(CHAT_KEPT);
    if (kept.length > LARGEST_KEPT) tell("This chat is too long to be kept: a reload will lose it.");
    else if (turns.length) sessionStorage.setItem(CHAT_KEPT, kept);
  } catch {} // a browser may keep nothing
}

function restoreChat() {
  log.append(welcome);
  try {
    showOrigins(localStorage.getItem(ORIGINS_KEPT) !== "off");
    for (const [question, saved] of JSON.parse(sessionStorage.getItem(CHAT_KEPT)) ?? []) {
      const turn = add(question);
      turn.show(AnswerView.restored(saved));
      turn.offer();
    }
  } catch {
    showOrigins(true);
    startAgain();
  }
}

window.addEventListener("pagehide", keepChat);

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
  const button = idle("Compare with plain", async () => {
    button.remove();
    const body = { ...view.body, speculative_config: { method: "none" } };
    const plain = new AnswerView(PLAIN, body, keepTrace);
    pair.classList.add("two");
    pair.append(plain.root);
    if (!(await generate(plain)) || !plain.trace) {
      plain.links.append(compareButton(view, pair));
      return;
    }
    const [fast, slow] = [view, plain].map((one) => perToken(summary(one.trace)));
    const same = view.text === plain.text ? "Same text" : "Another text";
    const factor = (slow / fast).toFixed(2);
    const repeated = view.repeated.hidden ? "" : ", as the prompt was repeated";
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

function sendsOnEnter(area, form) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
}

sendsOnEnter(prompt, composer);
document.addEventListener("keydown", (event) => {
  if (isCovered()) return;
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
showChosen();
restoreChat();
route();
toBottom();
prompt.focus();
connect().catch((error) => (error.status === 401 ? settings.focus("key") : tell(error.message)));
