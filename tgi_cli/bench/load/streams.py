"""Parses the event streams of each route: when tokens arrived, how many, and their text.

TGI's: https://huggingface.co/docs/text-generation-inference/main/en/conceptual/streaming.
OpenAI's: https://platform.openai.com/docs/api-reference/chat-streaming, with the additions of
other servers (``reasoning_content``, an ``error`` event, a usage in every event).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

_DETAIL_LENGTH = 300
"""Characters of an error message that are recorded."""


class _Token(msgspec.Struct):
    text: str = ""


class _Details(msgspec.Struct):
    finish_reason: str = ""
    generated_tokens: int = 0
    input_length: int | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Logprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None
    tokens: list[msgspec.Raw] | None = None


class _ChunkChoice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _ChunkUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _StreamEvent(msgspec.Struct):
    """An event of TGI's (``token`` to ``details``) or of OpenAI's (``choices``, ``usage``)."""

    token: _Token | None = None
    generated_text: str | None = None
    details: _Details | None = None
    choices: list[_ChunkChoice] | None = None
    usage: _ChunkUsage | None = None
    error: Any = None
    error_type: Any = None


_decode = msgspec.json.Decoder(_StreamEvent).decode


@dataclass(slots=True, eq=False)
class StreamedResponse:
    """A response as it arrives; a :class:`tgi_cli.bench.load.http.ResponseSink`.

    Attributes:
        arrivals: When each event with generated text arrived, on the clock of the process.
        counts: Tokens of each of them; 1 if the stream does not count.
        pieces: Pieces of the text.
        input_tokens, output_tokens: The server's usage, or None if it sends none.
        finish_reason: The server's finish reason; empty if it sent none.
        touched: When the last byte arrived.
        error, detail: The error's kind and message, or None and empty.
    """

    arrivals: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    input_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str = ""
    error: str | None = None
    detail: str = ""
    status: int = 0
    touched: float = 0.0
    _rest: bytes = b""
    _plain: list[bytes] | None = None
    _running: list[int] = field(default_factory=list)
    _ended: bool = False

    def head(self, status: int, content_type: str) -> None:
        """Take the status and the content type."""
        self.status = status
        if status != 200:
            self.error = f"http {status}"
            self._plain = []
        elif not content_type.lower().startswith("text/event-stream"):
            self.fail("protocol", f"the response is {content_type or 'untyped'}, not a stream")
            self._plain = []

    def body(self, data: bytes, now: float) -> None:
        """Take a piece of the body that arrived at ``now``."""
        self.touched = now
        if self._plain is not None:
            self._plain.append(data)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            # Each event of these servers is one line; comments keep connections alive.
            if line.startswith(b"data:") and (payload := line[5:].strip()):
                self._event(payload, now)

    def complete(self) -> None:
        """Check that the whole response has everything that it needs."""
        if self._rest.startswith(b"data:"):
            self._event(self._rest[5:].strip(), self.touched)
        if self._plain is not None and self.status != 200:
            self.detail = error_message(b"".join(self._plain))
        elif self.error is None and not self._ended:
            self.fail("cut off", "the stream ended before the response did")
        if len(self._running) == len(self.counts):
            before = [0, *self._running]
            self.counts = [b - a for a, b in zip(before, self._running, strict=False)]

    def fail(self, kind: str, detail: str) -> None:
        """Record an error, unless there is one already."""
        if self.error is None:
            self.error, self.detail = kind, detail[:_DETAIL_LENGTH]

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self._ended = True
            return
        try:
            event = _decode(payload)
        except msgspec.DecodeError as error:
            start = payload[:80].decode(errors="replace")
            self.fail("protocol", f"an event is invalid ({error}): {start}")
            return
        if event.error is not None:
            self._fault(event.error, event.error_type)
            return
        if event.token is not None:
            self._arrived(event.token.text, 1, now)
        if event.generated_text is not None:
            self._ended = True
            self.pieces = [event.generated_text]
        if event.details is not None:
            self._ended = True
            self.finish_reason = event.details.finish_reason
            self.output_tokens = event.details.generated_tokens
            self.input_tokens = event.details.input_length
        generated = event.usage.completion_tokens if event.usage is not None else None
        if event.usage is not None and generated is not None:
            self.output_tokens = generated
            self.input_tokens = event.usage.prompt_tokens
        if event.choices and self._take_choice(event.choices[0], now) and generated is not None:
            self._running.append(generated)

    def _take_choice(self, choice: _ChunkChoice, now: float) -> bool:
        """Take a choice of OpenAI's; return whether it has generated text."""
        if choice.finish_reason:
            self.finish_reason = choice.finish_reason
            self._ended = True
        text, tools = choice.text or "", None
        if (delta := choice.delta) is not None:
            text = delta.content or delta.reasoning_content or delta.reasoning or ""
            tools = delta.tool_calls
        if not text and not tools:
            return False
        logprobs = choice.logprobs
        count = len(logprobs.content or logprobs.tokens or "1") if logprobs is not None else 1
        self._arrived(text, count, now)
        return True

    def _arrived(self, text: str, count: int, now: float) -> None:
        self.arrivals.append(now)
        self.counts.append(count)
        self.pieces.append(text)

    def _fault(self, error: Any, kind: Any) -> None:
        """Record the error of an event."""
        if isinstance(error, dict):
            kind = kind or error.get("type")
            error = error.get("message", error)
        kind = kind if isinstance(kind, str) and len(kind) <= 40 else ""
        self.fail(f"stream {kind}".strip(), str(error))


def error_message(body: bytes) -> str:
    """The message in the body of an error, shortened."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = body.decode(errors="replace").strip()
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    return (value if isinstance(value, str) else msgspec.json.encode(value).decode())[
        :_DETAIL_LENGTH
    ]
