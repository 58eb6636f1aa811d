// Opening a trace from disk: drag and drop anywhere, or a file dialog.

import { el } from "./dom.js";
import { parseTrace } from "./trace_model.js";

const LARGEST = 256 * 1024 * 1024; // bytes

/**
 * @param {(trace: Object, name: string) => void} show gets a trace that was read.
 * @param {(message: string) => void} tell gets an error, or "" when there is none any more.
 * @returns {HTMLElement} a button that opens the file dialog.
 */
export function opener(show, tell) {
  const open = async (file) => {
    tell("");
    try {
      if (file.size > LARGEST) throw new Error("The file is larger than 256 MiB.");
      show(parseTrace(await file.text()), file.name.replace(/\.json$/, ""));
    } catch (error) {
      tell(`${file.name}: ${error.message}`);
    }
  };
  const input = el("input", {
    type: "file",
    accept: ".json,application/json",
    class: "unseen",
    tabindex: "-1",
    "aria-label": "Trace file",
    onchange: (event) => {
      if (event.target.files.length) open(event.target.files[0]);
      event.target.value = "";
    },
  });
  const cover = el("div", { class: "drop", hidden: true }, el("p", {}, "Drop a trace to open it"));
  document.body.append(cover);
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    cover.hidden = false;
  });
  document.addEventListener("dragleave", (event) => {
    if (event.relatedTarget === null) cover.hidden = true;
  });
  document.addEventListener("drop", (event) => {
    cover.hidden = true;
    if (!hasFiles(event)) return;
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    if (file) open(file);
  });
  const button = el("button", { type: "button", onclick: () => input.click() }, "Open a trace…");
  return el("span", {}, button, input);
}
