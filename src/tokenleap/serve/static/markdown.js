// Markdown as elements, with each token of the output in the colour of its origin.
//
// marked 18.2.1 reads it: npm's `lib/marked.esm.js` and `LICENSE`, as they are. It only says where
// things are. They are built from elements and text nodes here, so no text becomes markup, nothing
// is loaded, and a link is followed by a click only.

import { copyButton, el } from "./dom.js";
import { Lexer } from "./marked.esm.js";
import { tokenSpan } from "./tokens.js";

const ENTITY = /(&(?:#\d{1,7}|#x[\da-f]{1,6}|[a-z\d]{2,32});)/i;
const ADDRESS = /^(?:https?:\/\/|mailto:)/i;

// A text that is longer, deeper or slower to read than answers are stays as it is.
const LONGEST = 50_000; // characters
const DEEPEST = 50; // elements in elements
const SLOWEST = 300; // milliseconds
const PIECE = 4000; // characters

/** A text that grows: `show` draws it, and keeps the blocks that are as they were. */
export class MarkdownView {
  #blocks = []; // {raw, nodes}
  #slow = false;
  #read = 0; // characters that took no longer

  constructor() {
    this.root = el("div", { class: "text markdown" });
  }

  /**
   * @param {Array<{text: string, origin: string, source: string?}>} tokens the text.
   * @param {boolean} [anew] whether to draw all blocks again, as origins have changed.
   */
  show(tokens, anew = false) {
    const pieces = tokens.map(({ text }) => text.replace(/\r\n?/g, "\n"));
    const source = pieces.join("");
    const starts = [0];
    for (const piece of pieces) starts.push(starts.at(-1) + piece.length);
    let start = 0;
    const found = this.#blocksOf(source).map((token) => {
      const block = { raw: token.raw, start, token };
      start += token.raw.length;
      return block;
    });
    let same = 0;
    while (!anew && same < found.length && this.#blocks[same]?.raw === found[same].raw) same += 1;
    for (const { nodes } of this.#blocks.splice(same)) nodes.forEach((node) => node.remove());
    for (const { raw, start, token } of found.slice(same)) {
      const nodes = new Builder(raw, start, tokens, starts).element(token);
      this.root.append(...nodes);
      this.#blocks.push({ raw, nodes });
    }
  }

  /** marked's blocks: their `raw` texts are the whole text. */
  #blocksOf(source) {
    const whole = [{ type: "plain", raw: source }];
    if (source.length > LONGEST || this.#slow) return whole;
    const began = performance.now();
    try {
      // The time may grow with the square of the length. A text that comes at once, as after a
      // reload, shows that in pieces first.
      for (; source.length - this.#read > PIECE; this.#read += PIECE) {
        new Lexer().lex(source.slice(this.#read, this.#read + PIECE));
        if (performance.now() - began > SLOWEST) return whole;
      }
      const found = new Lexer().lex(source);
      this.#read = source.length;
      return found.map(({ raw }) => raw).join("") === source ? found : whole;
    } catch {
      return whole; // quotes in quotes in quotes ...
    } finally {
      this.#slow = performance.now() - began > SLOWEST;
    }
  }
}

/** Makes the elements of a block. Its texts are found in `source` one after the other. */
class Builder {
  constructor(source, start, tokens, starts) {
    Object.assign(this, { source, start, tokens, starts, at: 0, depth: 0 });
  }

  /** The nodes of one of marked's tokens. */
  element(token) {
    if (this.depth > DEEPEST) return this.place(token.raw);
    this.depth += 1;
    const nodes = this.made(token);
    this.depth -= 1;
    return nodes;
  }

  made(token) {
    const within = () => this.inside(token);
    switch (token.type) {
      case "space":
      case "def": // where a link leads; the link itself shows it
        return [];
      case "heading":
        return [el(`h${Math.min(6, token.depth + 2)}`, {}, ...within())];
      case "plain":
        return [el("p", {}, ...this.place(token.raw))];
      case "paragraph":
        return [el("p", {}, ...within())];
      case "blockquote":
        return [el("blockquote", {}, ...within())];
      case "strong":
      case "em":
      case "del":
        return [el(token.type, {}, ...within())];
      case "text":
        return token.tokens ? within() : this.words(token.text);
      case "escape":
        return this.place(token.text);
      case "codespan":
        return [el("code", {}, ...this.place(token.text))];
      case "code":
        return [this.code(token)];
      case "list":
        return [this.list(token)];
      case "table":
        return [this.table(token)];
      case "checkbox":
        return [el("input", { type: "checkbox", disabled: true, checked: token.checked }), " "];
      case "hr":
        return [el("hr")];
      case "br":
        return [el("br")];
      case "link":
      case "image":
        return this.link(token);
      case "html":
        if (/^<br ?\/?>$/i.test(token.raw)) return [el("br")]; // usual in cells of tables
        return token.block ? [el("p", {}, ...this.place(token.raw))] : this.place(token.raw);
      default:
        return this.place(token.raw);
    }
  }

  inside({ tokens }) {
    return tokens.flatMap((token) => this.element(token));
  }

  list({ ordered, start, items }) {
    const made = items.map((item) => el("li", {}, ...this.inside(item)));
    return ordered ? el("ol", { start }, ...made) : el("ul", {}, ...made);
  }

  table({ header, rows }) {
    const row = (cells) =>
      el("tr", {}, ...cells.map((cell) =>
        el(cell.header ? "th" : "td", { class: cell.align }, ...this.inside(cell)),
      ));
    const head = el("thead", {}, row(header));
    this.skip("\n");
    this.skip("\n"); // the line of dashes
    const table = el("table", {}, head, el("tbody", {}, ...rows.map(row)));
    return el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, table);
  }

  code({ raw, text, lang }) {
    const [fence] = raw.match(/^ {0,3}(`{3,}|~{3,})/) ?? [];
    if (fence) {
      this.skip(fence.trim());
      this.skip("\n");
    }
    return el(
      "div",
      { class: "code" },
      el("div", { class: "code-bar" }, el("span", {}, lang || "code"), copyButton(() => text)),
      el("pre", { tabindex: "0" }, el("code", {}, ...this.place(text))),
    );
  }

  /** Images are not loaded: they are links, too. */
  link(token) {
    const { href, type } = token;
    if (!ADDRESS.test(href)) return this.place(token.raw);
    const image = type === "image" ? [el("span", { class: "dim" }, "image: ")] : [];
    const content = token.tokens?.length ? this.inside(token) : this.place(href);
    return [
      el(
        "a",
        { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" },
        ...image,
        ...content,
      ),
    ];
  }

  skip(text) {
    const found = this.source.indexOf(text, this.at);
    if (found >= 0) this.at = found + text.length;
  }

  /** A text whose entities are decoded. */
  words(text) {
    return text
      .split(ENTITY)
      .flatMap((part, index) => this.place(part, index % 2 ? decoded(part) : part));
  }

  /** A text of the source, by lines where indents or marks of quotes are left out of it. */
  place(text, shown = text) {
    if (shown !== text || this.source.includes(text, this.at)) return this.spans(text, shown);
    return text.split(/(?<=\n)/).flatMap((line) => this.spans(line, line));
  }

  spans(text, shown) {
    if (!text) return [];
    const found = this.source.indexOf(text, this.at);
    const from = this.start + (found < 0 ? this.at : found);
    if (found >= 0) this.at = found + text.length;
    let index = this.tokenAt(from);
    if (found < 0 || shown !== text) return [this.span(shown, index)];
    const nodes = [];
    for (let at = from; at < from + text.length; index += 1) {
      const end = Math.min(from + text.length, this.starts[index + 1] ?? Infinity);
      if (end > at) nodes.push(this.span(text.slice(at - from, end - from), index));
      at = Math.max(at, end);
    }
    return nodes;
  }

  span(text, index) {
    const token = this.tokens[index];
    return token ? tokenSpan(text, token) : document.createTextNode(text);
  }

  /** The index of the token at a place of the whole text. */
  tokenAt(place) {
    let [low, high] = [0, this.tokens.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.starts[middle + 1] <= place) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

/** The character of an entity: a text area holds text only, whatever is set as its markup. */
function decoded(entity) {
  const area = document.createElement("textarea");
  area.innerHTML = entity;
  return area.value;
}
