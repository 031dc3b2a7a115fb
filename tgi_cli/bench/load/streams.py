"""Streams of events, read as each route writes them: when tokens came, how many, what they say.

TGI's: https://huggingface.co/docs/text-generation-inference/main/en/conceptual/streaming.
OpenAI's: https://platform.openai.com/docs/api-reference/chat-streaming, with what servers of open
models add (``reasoning_content``, an ``error`` event, a usage that runs along).
"""

from __future__ import annotations

from typing import Any

import msgspec

from tgi_cli.bench.settings import Route

_SHOWN = 300
"""Characters of an error that are kept."""


class _Token(msgspec.Struct):
    text: str = ""


class _Details(msgspec.Struct):
    finish_reason: str = ""
    generated_tokens: int = 0
    input_length: int | None = None


class _TgiEvent(msgspec.Struct):
    token: _Token | None = None
    generated_text: str | None = None
    details: _Details | None = None
    error: Any = None
    error_type: Any = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Logprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None
    tokens: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    error_type: Any = None


_native = msgspec.json.Decoder(_TgiEvent)
_chunk = msgspec.json.Decoder(_Chunk)


class StreamedResponse:
    """One answer as it comes; a :class:`tgi_cli.bench.load.http.ResponseSink`.

    Attributes:
        arrivals: when each event with something generated came, on the process's clock.
        counts: tokens in each; 1 where the stream does not say.
        pieces: of the text.
        input_tokens, output_tokens: by the server's usage; None: it did not say.
        finish_reason: the server's word; empty: none came.
        touched: when its last byte came.
        error, detail: what went wrong; None: nothing did.
    """

    __slots__ = (
        "_ended",
        "_expects_chunk",
        "_plain",
        "_rest",
        "_running",
        "arrivals",
        "counts",
        "detail",
        "error",
        "finish_reason",
        "input_tokens",
        "output_tokens",
        "pieces",
        "status",
        "touched",
    )

    def __init__(self, route: Route) -> None:
        self.arrivals: list[float] = []
        self.counts: list[int] = []
        self.pieces: list[str] = []
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.finish_reason = ""
        self.error: str | None = None
        self.detail = ""
        self.status = 0
        self.touched = 0.0
        self._expects_chunk = route != "generate_stream"
        self._rest = b""
        self._plain: list[bytes] | None = None
        self._running: list[int] = []
        self._ended = False

    # -------------------------------------------------------------- from the connection

    def head(self, status: int, content_type: str) -> None:
        """The answer begins."""
        self.status = status
        if status != 200:
            self.error = f"http {status}"
            self._plain = []
        elif not content_type.lower().startswith("text/event-stream"):
            self.fail("protocol", f"the answer is {content_type or 'untyped'}, not a stream")
            self._plain = []

    def body(self, data: bytes, now: float) -> None:
        """A piece of its body came at ``now``."""
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
        """The answer is whole: is there all that must be?"""
        if self._rest.startswith(b"data:"):
            self._event(self._rest[5:].strip(), self.touched)
        if self._plain is not None and self.status != 200:
            self.detail = error_message(b"".join(self._plain))
        elif self.error is None and not self._ended:
            self.fail("cut off", "the stream ended before its answer did")
        if len(self._running) == len(self.counts):
            self.counts = [
                now - before
                for now, before in zip(self._running, [0, *self._running], strict=False)
            ]

    def fail(self, kind: str, detail: str) -> None:
        """Note an error; the first one stands."""
        if self.error is None:
            self.error, self.detail = kind, detail[:_SHOWN]

    # -------------------------------------------------------------- events

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self._ended = True
            return
        try:
            if self._expects_chunk:
                self._take_chunk(_chunk.decode(payload), now)
            else:
                self._take_native(_native.decode(payload), now)
        except msgspec.DecodeError as error:
            said = payload[:80].decode(errors="replace")
            self.fail("protocol", f"an event cannot be read ({error}): {said}")

    def _take_native(self, event: _TgiEvent, now: float) -> None:
        if event.error is not None:
            self._fault(event.error, event.error_type)
            return
        if event.token is not None:
            self.arrivals.append(now)
            self.counts.append(1)
            self.pieces.append(event.token.text)
        if event.generated_text is not None:
            self._ended = True
            self.pieces = [event.generated_text]
        if event.details is not None:
            self._ended = True
            self.finish_reason = event.details.finish_reason
            self.output_tokens = event.details.generated_tokens
            self.input_tokens = event.details.input_length

    def _take_chunk(self, chunk: _Chunk, now: float) -> None:
        if chunk.error is not None:
            self._fault(chunk.error, chunk.error_type)
            return
        usage = chunk.usage
        if usage is not None and usage.completion_tokens is not None:
            self.output_tokens = usage.completion_tokens
            self.input_tokens = usage.prompt_tokens
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        if choice.finish_reason:
            self.finish_reason = choice.finish_reason
            self._ended = True
        text, tools = choice.text or "", None
        if choice.delta is not None:
            delta = choice.delta
            text = delta.content or delta.reasoning_content or delta.reasoning or ""
            tools = delta.tool_calls
        if not text and not tools:
            return
        self.arrivals.append(now)
        self.pieces.append(text)
        count = 1
        if choice.logprobs is not None:
            count = len(choice.logprobs.content or choice.logprobs.tokens or "1")
        self.counts.append(count)
        if usage is not None and usage.completion_tokens is not None:
            self._running.append(usage.completion_tokens)

    def _fault(self, error: Any, kind: Any) -> None:
        """An event that says that generation failed."""
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
    return (value if isinstance(value, str) else msgspec.json.encode(value).decode())[:_SHOWN]
