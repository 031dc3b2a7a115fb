// Requests to the server that has served this page, below the same path prefix.

import { events } from "./sse.js";
import { settings } from "./settings.js";

/** An answer that is not what was asked for; `kind` tells what to do about it. */
export class RequestError extends Error {
  constructor(kind, message, { status = 0, retryAfter = 0 } = {}) {
    super(message);
    Object.assign(this, { kind, status, retryAfter });
  }
}

const KINDS = { 401: "key", 403: "key", 429: "busy", 503: "unavailable" };

function kindOf(status, code) {
  return code === "context_length_exceeded" ? "context" : (KINDS[status] ?? "request");
}

async function request(path, { body, signal } = {}) {
  const headers = {};
  if (settings.apiKey) headers.authorization = `Bearer ${settings.apiKey}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      credentials: "same-origin", // of a proxy that asks for a login
      cache: "no-store",
    });
  } catch (error) {
    throw signal?.aborted ? error : new RequestError("network", "No answer from the server.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  const text = await response.text().catch(() => "");
  let message = text.slice(0, 500);
  let code = null;
  try {
    const { error } = JSON.parse(text);
    message = typeof error === "string" ? error : error.message;
    code = error.code ?? null;
  } catch {
    // Not of this server, such as a proxy's page.
    if (message.startsWith("<")) message = "";
  }
  return new RequestError(
    kindOf(response.status, code),
    message || `HTTP status ${response.status} ${response.statusText}`.trim(),
    { status: response.status, retryAfter: Number(response.headers.get("retry-after")) || 0 },
  );
}

/** The served model and its adapters. */
export async function models() {
  return (await (await request("v1/models")).json()).data;
}

/** Prometheus' text. */
export async function metrics(signal) {
  return (await request("metrics", { signal })).text();
}

/** Yields the chunks of a streamed chat completion. Raises RequestError. */
export async function* chat(body, signal) {
  const response = await request("v1/chat/completions", { body, signal });
  let complete = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        complete = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) {
        const { message, code, type } = chunk.error;
        const busy = type === "requests" ? 429 : code === "service_unavailable" ? 503 : 0;
        throw new RequestError(kindOf(busy, code), message);
      }
      yield chunk;
    }
  } catch (error) {
    if (signal.aborted || error instanceof RequestError) throw error;
    throw new RequestError("network", "The connection broke off within the answer.");
  }
  if (!complete) throw new RequestError("network", "The connection ended before the answer did.");
}
