"""Many requests in flight at once, and their outcomes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

PROMPT = "def read_json(path):"
ROUTES = {
    "stream": "/generate_stream",
    "whole": "/generate",
    "openai stream": "/v1/completions",
    "openai whole": "/v1/completions",
}
"""Routes by form of request: TGI's and OpenAI's, streamed and not."""


@dataclass(slots=True)
class Outcome:
    """Outcome of a request.

    Attributes:
        form: a key of :data:`ROUTES`.
        kind: ``well``, ``error`` (in the API's own form) or ``torn``.
        text: of the error.
        at: time of the end, in seconds of time.monotonic().
    """

    form: str
    kind: str
    text: str
    at: float


def request_body(form: str, new_tokens: int) -> dict[str, Any]:
    """A greedy request of this form."""
    if form in ("stream", "whole"):
        return {"inputs": PROMPT, "parameters": {"max_new_tokens": new_tokens}}
    streamed = form.endswith("stream")
    return {
        "prompt": PROMPT,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": streamed,
    }


class ConcurrentRequests:
    """Sends requests, each from its own thread.

    Args:
        url: of the server.
        forms: one key of :data:`ROUTES` per request.
        new_tokens: of each request.
    """

    def __init__(self, url: str, forms: Iterable[str], new_tokens: int) -> None:
        # A shared client: each would load the system's certificates again.
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.Client(base_url=url, timeout=None, limits=limits)
        self._new_tokens = new_tokens
        self._outcomes: list[Outcome] = []
        self._changed = threading.Condition()
        self._waiting = 0
        self._threads = []
        for form in forms:
            self._waiting += form.endswith("stream")
            thread = threading.Thread(target=self._run, args=(form,), daemon=True)
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def wait_until_started(self, seconds: float = 120.0, endless: bool = True) -> None:
        """Wait for the first token of each stream; with ``endless``, none may have ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._waiting <= 0, seconds), "not all started"
            assert not (endless and self._outcomes), self._outcomes

    def outcomes(self, seconds: float = 150.0) -> list[Outcome]:
        """Outcomes of the requests that end in time; the others hang."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._changed:
            return list(self._outcomes)

    @property
    def size(self) -> int:
        return len(self._threads)

    def _run(self, form: str) -> None:
        try:
            kind, text = self._ask(form)
        except httpx.HTTPError as error:
            kind, text = "torn", f"{type(error).__name__}: {error}"
        with self._changed:
            self._outcomes.append(Outcome(form, kind, text, time.monotonic()))
            self._changed.notify_all()

    def _ask(self, form: str) -> tuple[str, str]:
        url, body = ROUTES[form], request_body(form, self._new_tokens)
        if not form.endswith("stream"):
            answer = self._client.post(url, json=body)
            if answer.status_code == 200:
                return "well", ""
            return "error", f"{answer.status_code} {error_text(answer.json())}"
        with self._client.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                return "error", f"{answer.status_code} {error_text(json.loads(answer.read()))}"
            first, kind, text = True, "torn", "the stream ended without an end"
            for event in events(answer):
                if first:
                    first = False
                    with self._changed:
                        self._waiting -= 1
                        self._changed.notify_all()
                if "error" in event:
                    kind, text = "error", error_text(event)
                elif is_last(event):
                    kind, text = "well", ""
            return kind, text


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, except OpenAI's ``[DONE]``."""
    for line in answer.iter_lines():
        if line.startswith("data:") and not line.endswith("[DONE]"):
            yield json.loads(line.removeprefix("data:"))


def is_last(event: dict[str, Any]) -> bool:
    """Whether an event completes the text, in either form."""
    choices = event.get("choices") or [{}]
    return event.get("generated_text") is not None or bool(choices[0].get("finish_reason"))


def error_text(body: dict[str, Any]) -> str:
    """The message of an error, in either form."""
    error = body["error"]
    return str(error["message"] if isinstance(error, dict) else error)
