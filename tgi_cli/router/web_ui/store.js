// Conversations, in this browser's IndexedDB; in memory if that is disabled.

const NAME = "tgi";
const TABLE = "conversations";
const FORMAT = "tgi-conversations";

const memory = new Map();

let database = null;

function open() {
  database ??= new Promise((resolve) => {
    let opening;
    try {
      opening = indexedDB.open(NAME, 1);
    } catch {
      return resolve(null);
    }
    opening.onupgradeneeded = () => opening.result.createObjectStore(TABLE, { keyPath: "id" });
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => resolve(null);
  });
  return database;
}

/** Run one request in a transaction of its own. */
async function run(mode, action) {
  const opened = await open();
  return new Promise((resolve, reject) => {
    const asked = action(opened.transaction(TABLE, mode).objectStore(TABLE));
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

/** All conversations, the latest first. */
export async function all() {
  const found = (await open()) ? await run("readonly", (table) => table.getAll()) : [...memory.values()];
  return found.sort((a, b) => b.updated - a.updated);
}

export async function put(conversation) {
  if (await open()) await run("readwrite", (table) => table.put(conversation));
  else memory.set(conversation.id, conversation);
}

export async function remove(id) {
  if (await open()) await run("readwrite", (table) => table.delete(id));
  else memory.delete(id);
}

export async function clear() {
  if (await open()) await run("readwrite", (table) => table.clear());
  else memory.clear();
}

/** All conversations as the text of a file. */
export async function exported() {
  return JSON.stringify({ format: FORMAT, version: 1, conversations: await all() }, null, 1);
}

/** Add the conversations of such a file; returns how many. Raises Error. */
export async function imported(text) {
  const problem = new Error("This file has no conversations that were exported here.");
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw problem;
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) throw problem;
  const conversations = file.conversations.map(checked);
  if (conversations.includes(null)) throw problem;
  for (const conversation of conversations) await put(conversation);
  return conversations.length;
}

const isText = (value) => typeof value === "string";
const isImage = (value) => isText(value) && /^data:image\/[a-z]+;base64,/.test(value);

/** A conversation with the known fields of the right types, or null. */
function checked(value) {
  if (!isText(value?.id) || !isText(value.title) || !Array.isArray(value.messages)) return null;
  const messages = value.messages.map(checkedMessage);
  if (messages.includes(null)) return null;
  return { id: value.id, title: value.title, updated: Number(value.updated) || 0, messages };
}

function checkedMessage(message) {
  if (message?.role === "user" && isText(message.text)) {
    const images = Array.isArray(message.images) ? message.images.filter(isImage) : [];
    return { role: "user", text: message.text, images };
  }
  if (message?.role !== "assistant" || !Array.isArray(message.versions)) return null;
  const versions = message.versions.map(checkedVersion);
  if (!versions.length || versions.includes(null)) return null;
  const current = Math.min(Math.max(Number(message.current) || 0, 0), versions.length - 1);
  return { role: "assistant", versions, current };
}

function checkedVersion(version) {
  if (!isText(version?.text)) return null;
  const tokens = Array.isArray(version.tokens) ? version.tokens.filter(isToken) : [];
  const { finish, stats, error } = version;
  return {
    text: version.text,
    reasoning: isText(version.reasoning) ? version.reasoning : "",
    tokens,
    finish: isText(finish) ? finish : "",
    stats: stats && typeof stats === "object" ? stats : null,
    error: isText(error?.message) && isText(error.kind) ? error : null,
    thought: Number(version.thought) || 0,
  };
}

function isToken(token) {
  return (
    isText(token?.text) &&
    Number.isFinite(token.logprob) &&
    Array.isArray(token.top) &&
    token.top.every((each) => isText(each?.[0]) && Number.isFinite(each[1]))
  );
}
