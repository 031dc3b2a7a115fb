// Starts the page.

import * as api from "./api.js";
import { draft, setRunning, startComposer, takeImages } from "./composer.js";
import { changes, load, open, state } from "./conversations.js";
import { byId, h, number } from "./dom.js";
import { progress, runningIn } from "./generation.js";
import { closeDrawers, openPanel, startPanel } from "./panel.js";
import { onSettings, read, settings, update, write } from "./settings.js";
import { idOf, startSettings } from "./settings_form.js";
import { startServerPanel } from "./server_panel.js";
import { startSidebar } from "./sidebar.js";
import { halt, send, showTranscript } from "./transcript.js";

const LAST = "tgi.conversation"; // the id of the one that was shown
const RETRY_MS = 3000;
const SUGGESTIONS = [
  "Explain how a KV cache speeds up text generation.",
  "Write a short poem about the sea in autumn.",
  "Write a Python function that checks whether a text is a palindrome.",
  "What is a good plan for a rainy day?",
];
const BUNDLED = "tgi-demo"; // knows little else
const BUNDLED_SUGGESTIONS = [
  "How do I open a file?",
  "Write a function that reads a JSON file.",
  "What is itertools.chain?",
  "Who are you?",
];

let models = [];

/** Lead the user to what an error needs. */
function fix(kind) {
  if (kind === "context") open(null);
  else openPanel("settings", null, kind === "key" ? idOf("apiKey") : null);
}

async function loadModels() {
  try {
    models = await api.models();
    showModels();
    showBanner(null);
  } catch (error) {
    showBanner(error);
    if (error.kind !== "key") setTimeout(loadModels, RETRY_MS);
  }
}

function showModels() {
  const known = models.some(({ id }) => id === settings.model);
  if (settings.model && !known) update({ model: "" }); // of another server
  const model = models.find(({ id }) => id === settings.model) ?? models[0];
  const name = byId("model-name");
  const select = byId("model-select");
  name.textContent = model.id;
  document.title = `${model.id} – tgi`;
  name.hidden = models.length > 1;
  select.hidden = models.length < 2;
  select.replaceChildren(
    ...models.map(({ id }) => h("option", { value: id, selected: id === model.id }, id)),
  );
  const sees = model.architecture.input_modalities.includes("image");
  takeImages(sees);
  byId("model-facts").textContent =
    `${model.id} reads ${sees ? "text and images" : "text"}, ` +
    `up to ${number(model.context_length)} tokens of prompt and answer together.`;
  showSuggestions(model.id === BUNDLED ? BUNDLED_SUGGESTIONS : SUGGESTIONS);
  showContext();
}

/** How much of the context the conversation has taken. */
function showContext() {
  const [model] = models;
  const stats = state.current.messages
    .map((message) => message.versions?.[message.current]?.stats)
    .findLast(Boolean);
  byId("context-usage").textContent =
    model && stats
      ? `${number(stats.prompt + stats.completion)} of ${number(model.context_length)} tokens`
      : "";
}

function showBanner(error) {
  const banner = byId("banner");
  banner.hidden = error === null;
  if (error === null) return;
  const needsKey = error.kind === "key";
  banner.replaceChildren(
    needsKey
      ? "This server needs an API key."
      : "The server does not answer. Trying again every few seconds.",
    ...(needsKey
      ? [h("button", { class: "button", type: "button", onclick: () => fix("key") }, "Enter a key")]
      : []),
  );
}

function showRunning() {
  setRunning(runningIn(state.current) !== null);
}

function showChips() {
  byId("schema-chip").hidden = !(settings.useSchema && settings.schema.trim());
  byId("system-chip").hidden = !settings.system.trim();
}

function startChips() {
  byId("schema-chip").addEventListener("click", () => openPanel("settings", null, idOf("schema")));
  byId("system-chip").addEventListener("click", () => openPanel("settings", null, idOf("system")));
  onSettings(showChips);
  showChips();
}

function showSuggestions(texts) {
  byId("suggestions").replaceChildren(
    ...texts.map((text) =>
      h("button", { type: "button", class: "suggestion", onclick: () => draft(text) }, text),
    ),
  );
}

function startShortcuts() {
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.defaultPrevented) halt();
    const writing = event.target.closest("input, textarea, select, [contenteditable]");
    if (event.key === "/" && !writing) {
      event.preventDefault();
      byId("prompt").focus();
    }
  });
}

changes.addEventListener("open", () => {
  write(LAST, state.current.id);
  showTranscript(fix);
  showRunning();
  showContext();
});
progress.addEventListener("progress", () => {
  showRunning();
  showContext();
});

startSidebar(closeDrawers);
startPanel();
startSettings(loadModels);
startServerPanel();
startChips();
startShortcuts();
byId("model-select").addEventListener("change", ({ target }) => {
  update({ model: target.value });
  showModels();
});
await load();
open(state.list.find(({ id }) => id === read(LAST)) ?? null);
startComposer({ onsend: (message) => send(message, fix), onstop: halt });
loadModels();
if (matchMedia("(pointer: fine)").matches) byId("prompt").focus();
