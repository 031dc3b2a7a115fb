// Errors of an answer, beside it: what has happened, what to do, and a retry.

import { h, icon } from "./dom.js";

const WORDS = {
  network: ["The server can't be reached", "Check that it is running and that you are online."],
  key: ["The server needs an API key", "Enter a valid one in the settings."],
  busy: ["The server has too many requests", "Try again shortly."],
  unavailable: [
    "The server isn't ready",
    "It is loading the model, restarting or shutting down. Try again shortly.",
  ],
  context: [
    "The conversation no longer fits the model's context",
    "Start a new chat, or edit an earlier message to shorten this one.",
  ],
  request: ["The server refused the request", ""],
};

/** A box for an error of { kind, message, retryAfter }; see AnswerView for `actions`. */
export function errorBox({ kind, message, retryAfter }, actions) {
  const [title, advice] = WORDS[kind] ?? WORDS.request;
  const wait = retryAfter ? `It asks to wait ${retryAfter} s.` : "";
  return h(
    "div",
    { class: "error", role: "alert" },
    icon("warning"),
    h(
      "div",
      {},
      h("strong", {}, `${title}.`),
      " ",
      [advice, wait].filter(Boolean).join(" "),
      h("p", { class: "fine" }, message),
      h(
        "div",
        { class: "row" },
        h("button", { class: "button", type: "button", onclick: actions.regenerate }, "Retry"),
        kind === "key" ? fixButton("Enter a key", "key", actions) : null,
        kind === "context" ? fixButton("New chat", "context", actions) : null,
        kind === "request" ? fixButton("Settings", "request", actions) : null,
      ),
    ),
  );
}

function fixButton(label, kind, actions) {
  return h("button", { class: "button", type: "button", onclick: () => actions.fix(kind) }, label);
}
