// The list of conversations, their export and import, and the theme.

import { changes, load, open, remove, removeAll, state } from "./conversations.js";
import { announce, byId, download, h, iconButton, setIcon } from "./dom.js";
import * as store from "./store.js";

const DAY_MS = 86_400_000;
const THEMES = ["system", "light", "dark"];

/** Fill the sidebar; `onchoose` is called when the user has chosen a conversation. */
export function startSidebar(onchoose) {
  changes.addEventListener("list", () => show(onchoose));
  byId("new-chat").addEventListener("click", () => {
    open(null);
    onchoose();
    byId("prompt").focus();
  });
  byId("export").addEventListener("click", async () => {
    const day = new Date().toISOString().slice(0, 10);
    download(`conversations-${day}.json`, await store.exported());
  });
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", importFile);
  byId("delete-all").addEventListener("click", async () => {
    if (state.list.length && confirm("Delete all conversations of this browser?")) await removeAll();
  });
  startTheme();
}

async function importFile({ target }) {
  const [file] = target.files;
  target.value = "";
  try {
    const count = await store.imported(await file.text());
    await load();
    announce(`${count} conversations imported`);
  } catch (error) {
    alert(error.message);
  }
}

function show(onchoose) {
  const groups = new Map();
  for (const conversation of state.list) {
    const name = age(conversation.updated);
    groups.set(name, [...(groups.get(name) ?? []), conversation]);
  }
  byId("conversations").replaceChildren(
    ...[...groups].flatMap(([name, conversations]) => [
      h("h2", {}, name),
      h("ul", {}, ...conversations.map((conversation) => entry(conversation, onchoose))),
    ]),
  );
}

function entry(conversation, onchoose) {
  const shown = conversation === state.current;
  const choose = () => {
    open(conversation);
    onchoose();
  };
  return h(
    "li",
    { class: shown ? "entry shown" : "entry" },
    h(
      "button",
      { type: "button", "aria-current": shown ? "page" : null, title: conversation.title, onclick: choose },
      conversation.title,
    ),
    iconButton("trash", `Delete ${conversation.title}`, () => {
      if (confirm(`Delete “${conversation.title}”?`)) remove(conversation);
    }),
  );
}

function age(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY_MS) return "Yesterday";
  return time >= midnight - 7 * DAY_MS ? "This week" : "Earlier";
}

function startTheme() {
  const button = byId("theme");
  const root = document.documentElement;
  const label = () => {
    const theme = root.dataset.theme ?? "system";
    setIcon(button, theme, `Theme: ${theme}`);
  };
  button.addEventListener("click", () => {
    const theme = THEMES[(THEMES.indexOf(root.dataset.theme ?? "system") + 1) % THEMES.length];
    if (theme === "system") delete root.dataset.theme;
    else root.dataset.theme = theme;
    try {
      localStorage.setItem("tgi.theme", theme); // read by theme.js, before modules are loaded
    } catch {
      // The theme holds until the page is closed.
    }
    label();
    announce(`Theme: ${theme}`);
  });
  label();
}
