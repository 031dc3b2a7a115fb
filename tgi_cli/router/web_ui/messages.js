// How messages look: the user's, and the model's answers.

import { announce, duration, h, iconButton, number, setIcon } from "./dom.js";
import { errorBox } from "./errors.js";
import { isRunning } from "./generation.js";
import { MarkdownView } from "./markdown.js";
import { hideCard, TokenView } from "./tokens.js";

const SHORTEST_S = 0.1; // of an answer whose speed is shown: shorter ones may arrive at once

/** A message of the user; `actions` are { edit(text) }. */
export class UserView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.element = h("li", { class: "message user" });
    this.#show();
  }

  update() {}

  #show() {
    const { text, images } = this.message;
    this.element.replaceChildren(
      h("h3", { class: "visually-hidden" }, "You"),
      ...images.map((src, i) => h("img", { class: "picture", src, alt: `Image ${i + 1}` })),
      h(
        "div",
        { class: "said" },
        ...(text ? [h("div", { class: "bubble" }, text)] : []),
        h(
          "div",
          { class: "toolbar" },
          iconButton("edit", "Edit", () => this.#edit()),
          copyButton(() => text),
        ),
      ),
    );
  }

  #edit() {
    const area = h("textarea", {
      value: this.message.text,
      "aria-label": "Edit the message",
      rows: Math.min(this.message.text.split("\n").length + 1, 12),
    });
    const cancel = () => {
      this.#show();
      this.element.querySelector('[aria-label="Edit"]').focus();
    };
    const form = h(
      "form",
      {
        class: "edit",
        onsubmit: (event) => {
          event.preventDefault();
          if (area.value.trim() || this.message.images.length) this.actions.edit(area.value);
        },
        onkeydown: (event) => {
          if (event.key === "Escape") {
            event.stopPropagation();
            cancel();
          } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            form.requestSubmit();
          }
        },
      },
      area,
      h("p", { class: "fine" }, "What follows this message is replaced by a new answer."),
      h(
        "div",
        { class: "row end" },
        h("button", { class: "button", type: "button", onclick: cancel }, "Cancel"),
        h("button", { class: "button primary", type: "submit" }, "Send"),
      ),
    );
    this.element.replaceChildren(form);
    area.focus();
  }
}

/** An answer; `actions` are { regenerate(), choose(index), fix(kind) }. */
export class AnswerView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.thinking = h("div", { class: "markdown" });
    this.thinkingTitle = h("span");
    this.thinkingBox = h(
      "details",
      { class: "thinking" },
      h("summary", {}, this.thinkingTitle),
      this.thinking,
    );
    this.body = h("div", { class: "markdown" });
    this.waiting = h("div", { class: "waiting", "aria-hidden": "true" }, h("i"), h("i"), h("i"));
    this.rest = h("div");
    this.toolbar = h("div", { class: "toolbar" });
    this.element = h(
      "li",
      { class: "message answer" },
      h("h3", { class: "visually-hidden" }, "Model"),
      this.thinkingBox,
      this.body,
      this.waiting,
      this.rest,
      this.toolbar,
    );
    this.views = null; // of the version that is shown
    this.tokenView = null;
  }

  get version() {
    return this.message.versions[this.message.current];
  }

  update() {
    const { version } = this;
    if (this.views?.version !== version) this.#begin(version);
    const running = isRunning(version);
    this.thinkingBox.hidden = !version.reasoning;
    if (version.reasoning) {
      const open = running && !version.text;
      this.thinkingTitle.textContent = open
        ? "Thinking…"
        : `Thought for ${duration(version.thought)}`;
      this.thinkingBox.classList.toggle("active", open);
      this.views.thinking.show(version.reasoning);
    }
    if (this.tokenView) this.tokenView.update(version.tokens);
    else this.views.text.show(version.text);
    this.waiting.hidden = !running || Boolean(version.text);
    this.element.classList.toggle("running", running);
    this.element.setAttribute("aria-busy", String(running));
    this.rest.replaceChildren(...this.#rest(version));
    this.toolbar.hidden = running;
    if (!running) this.toolbar.replaceChildren(...this.#tools(version));
  }

  #begin(version) {
    this.thinking.replaceChildren();
    this.body.replaceChildren();
    this.views = {
      version,
      thinking: new MarkdownView(this.thinking),
      text: new MarkdownView(this.body, decorate),
    };
    if (this.tokenView) this.#openTokens();
  }

  #rest(version) {
    if (version.error) return [errorBox(version.error, this.actions)];
    if (version.finish === "length") {
      return [h("p", { class: "fine" }, "The answer was cut off at the limit of tokens.")];
    }
    return [];
  }

  #tools(version) {
    const { versions, current } = this.message;
    const tools = [];
    if (versions.length > 1) {
      const step = (by) => () => this.actions.choose(current + by);
      const back = iconButton("left", "Previous answer", step(-1));
      const forth = iconButton("right", "Next answer", step(1));
      back.disabled = current === 0;
      forth.disabled = current === versions.length - 1;
      tools.push(h("span", { class: "versions" }, back, `${current + 1} / ${versions.length}`, forth));
    }
    if (version.text) tools.push(copyButton(() => version.text));
    if (!version.error) {
      tools.push(iconButton("retry", "Regenerate", () => this.actions.regenerate()));
    }
    if (version.tokens.length) {
      const button = iconButton("tokens", "Tokens", () => this.#toggleTokens());
      button.setAttribute("aria-pressed", String(Boolean(this.tokenView)));
      tools.push(button);
    }
    tools.push(h("span", { class: "fine stats" }, stats(version)));
    return tools;
  }

  #toggleTokens() {
    hideCard();
    if (this.tokenView) this.#closeTokens();
    else this.#openTokens();
    this.update();
    this.toolbar.querySelector('[aria-label="Tokens"]')?.focus();
  }

  #openTokens() {
    this.tokenView = new TokenView();
    this.body.classList.remove("markdown");
    this.body.replaceChildren(this.tokenView.element);
  }

  #closeTokens() {
    this.tokenView = null;
    this.body.classList.add("markdown");
    this.body.replaceChildren();
    this.views.text = new MarkdownView(this.body, decorate);
  }
}

/** Tokens, speed and what was cached, in one line. */
function stats({ finish, stats: found, tokens }) {
  const parts = [];
  if (finish === "stopped") parts.push("stopped");
  if (found) {
    parts.push(`${number(found.completion)} tokens`);
    if (found.seconds > SHORTEST_S && found.completion > 1) {
      parts.push(`${number((found.completion - 1) / found.seconds, 1)} per second`);
    }
    parts.push(`first after ${duration(found.first)}`);
    parts.push(`${number(found.cached)} of ${number(found.prompt)} prompt tokens cached`);
  } else if (tokens.length) {
    parts.push(`${number(tokens.length)} tokens`);
  }
  return parts.join(" · ");
}

function copyButton(text) {
  const button = iconButton("copy", "Copy", async () => {
    const done = await copy(text());
    setIcon(button, done ? "check" : "warning", done ? "Copied" : "Not copied");
    announce(done ? "Copied" : "The browser does not allow copying");
    setTimeout(() => setIcon(button, "copy", "Copy"), 1500);
  });
  return button;
}

/** Copy a text; pages without HTTPS have no clipboard API, but the older command. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { value: text, class: "visually-hidden" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** Give code blocks a head with the language and a copy button; let tables scroll. */
function decorate(fragment) {
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code");
    const language = /language-(\S+)/.exec(code?.className ?? "")?.[1] ?? "";
    const head = h(
      "div",
      { class: "code-head" },
      h("span", {}, language),
      copyButton(() => pre.textContent),
    );
    const box = h("div", { class: "code" });
    pre.replaceWith(box);
    pre.tabIndex = 0; // scrolls by the keyboard
    box.append(head, pre);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = h("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(box);
    box.append(table);
  }
}
