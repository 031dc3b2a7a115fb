// The panel beside the chat with its tabs, and both drawers of narrow screens.

import { byId } from "./dom.js";
import { read, settings, update, write } from "./settings.js";

const SHOWN = "tgi.shown"; // which of both are open on a wide screen
const app = byId("app");
const wide = matchMedia("(min-width: 1100px)");
const TABS = ["server", "settings"];
const shown = { sidebar: true, panel: true, ...read(SHOWN) };
let returnTo = null; // the button that has opened a drawer

const listeners = new Set();

/** Call `listener` when the server's tab may have been shown or hidden. */
export function onPanel(listener) {
  listeners.add(listener);
}

/** Whether the user sees this tab. */
export function isShown(tab) {
  return shown.panel && settings.panel === tab && !document.hidden;
}

export function startPanel() {
  byId("open-sidebar").addEventListener("click", (event) => toggle("sidebar", event.currentTarget));
  byId("close-sidebar").addEventListener("click", () => toggle("sidebar", null, false));
  byId("close-panel").addEventListener("click", () => toggle("panel", null, false));
  byId("scrim").addEventListener("click", closeDrawers);
  for (const tab of TABS) {
    byId(`open-${tab}`).addEventListener("click", ({ currentTarget }) => {
      if (shown.panel && settings.panel === tab) toggle("panel", null, false);
      else openPanel(tab, currentTarget);
    });
    byId(`tab-${tab}`).addEventListener("click", () => openPanel(tab));
    byId(`tab-${tab}`).addEventListener("keydown", ({ key }) => {
      if (key !== "ArrowLeft" && key !== "ArrowRight") return;
      const other = TABS.find((each) => each !== tab);
      openPanel(other);
      byId(`tab-${other}`).focus();
    });
  }
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && closeDrawers()) event.preventDefault();
  });
  wide.addEventListener("change", () => {
    if (!wide.matches) shown.sidebar = shown.panel = false;
    show();
  });
  if (!wide.matches) shown.sidebar = shown.panel = false;
  show();
}

/** Show a tab of the panel, and one of its fields if `field` names it. */
export function openPanel(tab, opener = null, field = null) {
  update({ panel: tab });
  toggle("panel", opener, true);
  if (field) byId(field).focus();
}

/** Close what covers the chat on a narrow screen; returns whether anything did. */
export function closeDrawers() {
  if (wide.matches || !(shown.sidebar || shown.panel)) return false;
  shown.sidebar = shown.panel = false;
  show();
  returnTo?.focus();
  returnTo = null;
  return true;
}

function toggle(name, opener, value = !shown[name]) {
  if (value && !wide.matches) {
    shown.sidebar = shown.panel = false;
    returnTo = opener ?? returnTo;
  }
  shown[name] = value;
  show();
  if (wide.matches) {
    write(SHOWN, shown);
    return;
  }
  if (value) byId(name === "sidebar" ? "close-sidebar" : "close-panel").focus();
  else if (returnTo) {
    returnTo.focus();
    returnTo = null;
  }
}

function show() {
  for (const name of ["sidebar", "panel"]) {
    app.classList.toggle(`no-${name}`, !shown[name]);
    byId(name).inert = !shown[name];
  }
  const covered = !wide.matches && (shown.sidebar || shown.panel);
  byId("scrim").hidden = !covered;
  byId("chat").inert = covered;
  byId("open-sidebar").setAttribute("aria-expanded", String(shown.sidebar));
  for (const tab of TABS) {
    const active = settings.panel === tab;
    byId(tab).hidden = !active;
    byId(`tab-${tab}`).setAttribute("aria-selected", String(active));
    byId(`tab-${tab}`).tabIndex = active ? 0 : -1;
    byId(`open-${tab}`).setAttribute("aria-expanded", String(shown.panel && active));
  }
  for (const listener of listeners) listener();
}
