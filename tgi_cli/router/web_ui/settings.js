// What the user has set, kept in this browser alone.

const KEY = "tgi.settings";

/** Sampling parameters of /v1/chat/completions; empty fields are the server's defaults. */
export const SAMPLING = [
  { name: "temperature", label: "Temperature", min: 0, max: 5, step: 0.05, hint: "0: always the likeliest token" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01 },
  { name: "top_k", label: "Top k", min: 0, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "max_tokens", label: "Maximum tokens", min: 1, step: 1, hint: "of an answer" },
  { name: "seed", label: "Seed", min: 0, step: 1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.05, step: 0.05, hint: "1: none" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
];

export const DEFAULTS = {
  apiKey: "",
  model: "",
  system: "",
  sampling: {},
  stop: "",
  effort: "",
  logprobs: true,
  alternatives: 5,
  useSchema: false,
  schema: "",
  panel: "server",
};

export const settings = { ...DEFAULTS, ...read(KEY) };
settings.sampling = { ...settings.sampling };

const listeners = new Set();

/** Call `listener` after each change. */
export function onSettings(listener) {
  listeners.add(listener);
}

/** Change settings, and keep them. */
export function update(changes) {
  Object.assign(settings, changes);
  write(KEY, settings);
  for (const listener of listeners) listener(settings);
}

/** A value of localStorage, or null. */
export function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

export function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch {
    // Storage is disabled or full: the value holds until the page is closed.
  }
}

/** The JSON schema as an object; null if none applies. Raises SyntaxError. */
export function parsedSchema() {
  if (!settings.useSchema || !settings.schema.trim()) return null;
  return JSON.parse(settings.schema);
}

/** The parameters of a chat completion, besides its messages. Raises SyntaxError. */
export function parameters() {
  const body = { ...settings.sampling };
  if (settings.model) body.model = settings.model;
  const stop = settings.stop.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (settings.effort) body.reasoning_effort = settings.effort;
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: settings.alternatives });
  const schema = parsedSchema();
  if (schema !== null) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return body;
}
