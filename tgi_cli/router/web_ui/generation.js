// Answers of the model.
//
// A version of an answer is { text, reasoning, tokens, finish, stats, error, thought }: tokens are
// { text, logprob, top: [[text, logprob], ...] }, stats { prompt, cached, completion, first,
// seconds }, error { kind, message, retryAfter }, thought the seconds of reasoning.

import * as api from "./api.js";
import { save, saveSoon, touch } from "./conversations.js";
import { parameters, settings } from "./settings.js";

/** Dispatches Progress events, at most one for each frame of the screen. */
export const progress = new EventTarget();

class Progress extends Event {
  constructor(version) {
    super("progress");
    this.version = version;
  }
}

const running = new Map(); // from versions to their AbortController

export const isRunning = (version) => running.has(version);

/** The running version of a conversation, if any. */
export function runningIn(conversation) {
  for (const message of conversation.messages) {
    const version = message.versions?.[message.current];
    if (version && running.has(version)) return version;
  }
  return null;
}

/** End a version; what it has so far remains. */
export const stop = (version) => running.get(version)?.abort();

/** Add a version to an answer and generate it. */
export async function generate(conversation, message) {
  const version = {
    text: "", reasoning: "", tokens: [], finish: "", stats: null, error: null, thought: 0,
  };
  // An attempt that has brought nothing is replaced.
  message.versions = message.versions.filter((each) => each.text || each.reasoning);
  message.current = message.versions.push(version) - 1;
  const controller = new AbortController();
  running.set(version, controller);
  touch(conversation);
  const show = framewise(() => {
    progress.dispatchEvent(new Progress(version));
    saveSoon(conversation);
  });
  show();
  try {
    const body = {
      ...parameters(),
      messages: prompt(conversation, message),
      stream: true,
      stream_options: { include_usage: true },
    };
    await receive(version, api.chat(body, controller.signal), show);
  } catch (error) {
    if (controller.signal.aborted) version.finish = "stopped";
    else version.error = described(error);
  }
  running.delete(version);
  progress.dispatchEvent(new Progress(version));
  await save(conversation);
}

function described(error) {
  if (error instanceof SyntaxError) {
    return { kind: "request", message: `The JSON schema is not valid JSON: ${error.message}` };
  }
  const { kind = "request", message, retryAfter = 0 } = error;
  return { kind, message, retryAfter };
}

/** Call `action` once before the next frame, or soon if the page is hidden. */
function framewise(action) {
  let due = false;
  return () => {
    if (due) return;
    due = true;
    const run = () => {
      due = false;
      action();
    };
    if (document.hidden) setTimeout(run, 200);
    else requestAnimationFrame(run);
  };
}

async function receive(version, chunks, show) {
  const start = performance.now();
  let first = 0;
  let thinking = 0;
  for await (const chunk of chunks) {
    const now = performance.now();
    const choice = chunk.choices[0];
    if (choice) {
      const { content, reasoning_content: reasoning } = choice.delta;
      if (!first && (content || reasoning || choice.logprobs?.content?.length)) first = now;
      if (reasoning) {
        thinking ||= now;
        version.reasoning += reasoning;
        version.thought = (now - thinking) / 1000;
      }
      if (content) version.text += content;
      if (choice.logprobs?.content) version.tokens.push(...choice.logprobs.content.map(token));
      if (choice.finish_reason) version.finish = choice.finish_reason;
    }
    if (chunk.usage) {
      version.stats = {
        prompt: chunk.usage.prompt_tokens,
        cached: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0,
        completion: chunk.usage.completion_tokens,
        first: ((first || now) - start) / 1000,
        seconds: first ? (now - first) / 1000 : 0,
      };
    }
    show();
  }
}

function token({ token, bytes, logprob, top_logprobs: top }) {
  return {
    text: spelled(token, bytes),
    logprob,
    top: (top ?? []).map((each) => [spelled(each.token, each.bytes), each.logprob]),
  };
}

/** The token's text; if it is part of a character, its bytes. */
function spelled(text, bytes) {
  if (!text.includes("\ufffd") || !bytes) return text;
  return bytes.map((byte) => `<${byte.toString(16).toUpperCase().padStart(2, "0")}>`).join("");
}

/** The messages of a request for this answer: those before it. */
function prompt(conversation, answer) {
  const messages = [];
  const system = settings.system.trim();
  if (system) messages.push({ role: "system", content: system });
  for (const message of conversation.messages) {
    if (message === answer) break;
    if (message.role === "user") {
      messages.push({ role: "user", content: content(message) });
      continue;
    }
    const { text, reasoning } = message.versions[message.current];
    if (!text) continue;
    messages.push({
      role: "assistant",
      content: text,
      ...(reasoning && { reasoning_content: reasoning }),
    });
  }
  return messages;
}

function content({ text, images }) {
  if (!images.length) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}
