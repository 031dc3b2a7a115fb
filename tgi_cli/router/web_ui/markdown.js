// Markdown of the model as a part of the document that cannot run anything or load anything.
//
// HTML in the text is shown as text, images as links, and DOMPurify removes what is not listed
// here, whatever the parser has made of it.

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";

const purify = globalThis.DOMPurify;
const escaped = (text) =>
  text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li",
    "ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};

purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName === "A") {
    if (!node.hasAttribute("href")) return;
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
  // Only the language of a code block: classes of the page would let text pass for its controls.
  const name = node.getAttribute("class");
  if (name !== null && !(node.nodeName === "CODE" && /^language-[\w+#.-]+$/.test(name))) {
    node.removeAttribute("class");
  }
});

/** Renders a growing text into an element, and only what has changed since the last time. */
export class MarkdownView {
  constructor(element, decorate = () => {}) {
    this.element = element;
    this.decorate = decorate;
    this.blocks = []; // of { raw, nodes }
    this.text = "";
  }

  show(text) {
    if (text === this.text) return;
    this.text = text;
    const tokens = marked.lexer(text).filter((token) => token.type !== "space");
    let same = 0;
    while (same < this.blocks.length && this.blocks[same].raw === tokens[same]?.raw) same += 1;
    for (const block of this.blocks.splice(same)) block.nodes.forEach((node) => node.remove());
    for (const token of tokens.slice(same)) {
      const fragment = purify.sanitize(marked.parser([token]), ALLOWED);
      this.decorate(fragment);
      const nodes = [...fragment.childNodes];
      this.element.append(fragment);
      this.blocks.push({ raw: token.raw, nodes });
    }
  }
}
