// A page with a trace viewer alone: the file that `tokenleap trace FILE --html OUT` writes.

import { el, helpButton, themeButton } from "./dom.js";
import { opener } from "./opening.js";
import { readTrace } from "./trace_model.js";
import { VIEWER_KEYS, Viewer } from "./viewer.js";

const heading = document.getElementById("title");
const alert = document.getElementById("alert");
const viewer = new Viewer(document.getElementById("viewer"));

function tell(message) {
  alert.textContent = message;
  alert.hidden = !message;
}

function show(trace, name) {
  document.title = `${name} · trace`;
  heading.textContent = name;
  viewer.show(trace);
}

document.getElementById("tools").append(opener(show, tell), themeButton(), helpButton(VIEWER_KEYS));
document.addEventListener("keydown", (event) => viewer.keys(event));

try {
  show(readTrace(JSON.parse(document.getElementById("trace").textContent)), heading.textContent);
} catch (error) {
  viewer.root.replaceChildren(el("p", { class: "empty" }, "Drop a trace here, or open one."));
  tell(error.message);
}
