// The token view: an answer's tokens, colored by probability, with alternatives on hover and focus.

import { byId, h, number } from "./dom.js";

const card = byId("token-card");
const GAP = 8; // pixels between a token and its card

/** Shows tokens in an element; more may be added while they are generated. */
export class TokenView {
  constructor() {
    this.summary = h("p", { class: "fine token-summary" });
    this.list = h("div", {
      class: "tokens",
      role: "group",
      "aria-label": "Tokens; arrow keys move between them",
      onmouseover: (event) => this.#show(event.target.closest(".token")),
      onmouseleave: hideCard,
      onfocusin: (event) => this.#show(event.target),
      onfocusout: hideCard,
      onkeydown: (event) => this.#move(event),
    });
    this.element = h("div", { class: "token-view" }, this.list, this.summary);
    this.tokens = [];
  }

  update(tokens) {
    if (tokens.length < this.tokens.length || tokens[0] !== this.tokens[0]) {
      this.list.replaceChildren();
      this.tokens = [];
    }
    for (const token of tokens.slice(this.tokens.length)) this.list.append(...this.#spans(token));
    this.tokens = tokens.slice();
    this.summary.replaceChildren(...summary(tokens));
  }

  #spans(token) {
    const probability = Math.exp(token.logprob);
    const span = h("span", {
      class: "token",
      tabIndex: this.list.childElementCount ? -1 : 0,
      textContent: token.text.replace(/\n/g, "⏎"),
    });
    span.style.setProperty("--s", (1 - probability).toFixed(3));
    span.token = token;
    const lines = token.text.split("\n").length - 1;
    return [span, ...Array.from({ length: lines }, () => h("br"))];
  }

  #show(span) {
    if (!span?.token) return;
    card.replaceChildren(...details(span.token));
    card.hidden = false;
    span.setAttribute("aria-describedby", card.id);
    place(span.getClientRects()[0] ?? span.getBoundingClientRect());
  }

  #move(event) {
    const spans = [...this.list.querySelectorAll(".token")];
    const at = spans.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (event.key === "Escape") hideCard();
    if (to === undefined || !spans[to]) return;
    event.preventDefault();
    spans[at].tabIndex = -1;
    spans[to].tabIndex = 0;
    spans[to].focus();
  }
}

export function hideCard() {
  card.hidden = true;
}

addEventListener("scroll", hideCard, { capture: true, passive: true });

/** What a card says of a token. */
function details({ text, logprob, top }) {
  const rows = top.some(([other, at]) => other === text && at === logprob)
    ? top
    : [...top, [text, logprob]];
  return [
    h(
      "div",
      { class: "token-head" },
      h("code", {}, visible(text)),
      h("strong", {}, percent(logprob)),
    ),
    h("div", { class: "fine" }, `log-probability ${number(logprob, 3)}`),
    h(
      "ol",
      { class: "alternatives" },
      ...rows.map(([other, at]) => {
        const bar = h("span", { class: "bar", "aria-hidden": "true" });
        bar.style.width = `${(100 * Math.exp(at)).toFixed(1)}%`;
        const chosen = other === text && at === logprob;
        return h(
          "li",
          { class: chosen ? "chosen" : null, "aria-current": chosen ? "true" : null },
          bar,
          h("code", {}, visible(other)),
          h("span", {}, percent(at)),
        );
      }),
    ),
  ];
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  if (share < 0.01) return "< 0.01 %";
  return `${number(share, share < 1 ? 2 : 1)} %`;
}

/** A token's text with its white space. */
function visible(text) {
  return text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "(empty)";
}

function summary(tokens) {
  if (!tokens.length) return [];
  const mean = tokens.reduce((sum, { logprob }) => sum + logprob, 0) / tokens.length;
  const least = tokens.reduce((worst, each) => (each.logprob < worst.logprob ? each : worst));
  return [
    h("span", { class: "scale" }, "likely", h("span", { class: "gradient", "aria-hidden": "true" }), "unlikely"),
    h("span", {}, `Perplexity ${number(Math.exp(-mean), 2)}`),
    h("span", {}, "Least likely: ", h("code", {}, visible(least.text)), ` ${percent(least.logprob)}`),
  ];
}

/** Put the card above a token, or below it where there is no room. */
function place(rect) {
  const { offsetWidth: width, offsetHeight: height } = card;
  const left = Math.min(Math.max(rect.left, GAP), innerWidth - width - GAP);
  const above = rect.top - height - GAP;
  card.style.left = `${left}px`;
  card.style.top = `${above > GAP ? above : rect.bottom + GAP}px`;
}
