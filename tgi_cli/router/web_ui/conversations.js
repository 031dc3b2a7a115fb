// The conversations and which one is shown.
//
// A conversation is { id, title, updated, messages }. A message of the user is { role: "user",
// text, images }, with images as data: URLs; one of the model is { role: "assistant", versions,
// current }, with a version for each time that it was generated. See generation.js for versions.

import * as store from "./store.js";

const SAVE_MS = 800;
const TITLE_CHARACTERS = 60;

/** Dispatches "list" when the list has changed, and "open" when another one is shown. */
export const changes = new EventTarget();

export const state = { list: [], current: null };

/** Read what this browser has kept. */
export async function load() {
  state.list = await store.all();
  changes.dispatchEvent(new Event("list"));
}

/** Show a conversation, or with null an empty one that is not kept until its first message. */
export function open(conversation) {
  state.current = conversation ?? {
    id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, // insecure origins have none
    title: "New chat",
    updated: Date.now(),
    messages: [],
  };
  changes.dispatchEvent(new Event("open"));
  changes.dispatchEvent(new Event("list"));
}

/** Keep a conversation that has changed; its first message names it. */
export function touch(conversation) {
  if (!state.list.includes(conversation)) state.list.push(conversation);
  const first = conversation.messages.find((message) => message.role === "user");
  if (first) conversation.title = titled(first);
  conversation.updated = Date.now();
  state.list.sort((a, b) => b.updated - a.updated);
  changes.dispatchEvent(new Event("list"));
  saveSoon(conversation);
}

function titled(message) {
  const line = message.text.trim().split("\n")[0];
  if (!line) return message.images.length ? "Image" : "New chat";
  return line.length > TITLE_CHARACTERS ? `${line.slice(0, TITLE_CHARACTERS - 1)}…` : line;
}

const timers = new Map();

/** Write a conversation at most once in SAVE_MS. */
export function saveSoon(conversation) {
  if (timers.has(conversation)) return;
  timers.set(conversation, setTimeout(() => save(conversation), SAVE_MS));
}

/** Write a conversation now. */
export async function save(conversation) {
  clearTimeout(timers.get(conversation));
  timers.delete(conversation);
  if (state.list.includes(conversation)) await store.put(conversation);
}

addEventListener("pagehide", () => [...timers.keys()].forEach(save));

/** Forget a conversation. */
export async function remove(conversation) {
  clearTimeout(timers.get(conversation));
  timers.delete(conversation);
  state.list = state.list.filter((each) => each !== conversation);
  await store.remove(conversation.id);
  if (state.current === conversation) open(null);
  else changes.dispatchEvent(new Event("list"));
}

/** Forget all conversations. */
export async function removeAll() {
  for (const timer of timers.values()) clearTimeout(timer);
  timers.clear();
  state.list = [];
  await store.clear();
  open(null);
}
