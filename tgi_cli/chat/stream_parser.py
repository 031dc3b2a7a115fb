"""Parses the event stream of a chat completion, as the servers in use send it.

OpenAI's: https://platform.openai.com/docs/api-reference/chat-streaming. Additions of others:
``reasoning_content`` and ``reasoning`` (vLLM, DeepSeek, OpenRouter), content as a list of parts
(Mistral), ``error`` events, ``timings`` (llama.cpp).
Framing: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tgi_cli.chat.errors import ChatServerError, error_message

_MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ChatUsage:
    """Tokens of one answer.

    Attributes:
        prompt_tokens: tokens of the prompt.
        completion_tokens: generated, reasoning included.
        cached_tokens: of the prompt, those whose keys and values the server still had.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A part of a tool call.

    Attributes:
        index: which call it belongs to.
        name: the tool's; only in the first part.
        arguments: a piece of them.
    """

    index: int
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What one event adds to the answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CalledTool, ...] = ()
    finish_reason: str = ""
    usage: ChatUsage | None = None


class ChatStreamParser:
    """Parses bytes as they arrive.

    Attributes:
        complete: whether the stream has ended as it should, with a finish reason or ``[DONE]``.
    """

    def __init__(self) -> None:
        self.complete = False
        self._rest = b""
        self._data: list[bytes] = []

    def push(self, data: bytes) -> list[AnswerPart]:
        """Take bytes of the body; return the parts that they complete.

        Raises:
            ChatServerError: an event reports an error, or is not JSON.
        """
        parts = []
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            raise ChatServerError("the server sent an event of more than 64 MiB")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line:
                parts += self._dispatch()
        return parts

    def finish(self) -> list[AnswerPart]:
        """Return the part of a last event that no empty line follows, unless it is cut off."""
        parts = self.push(b"\n") if self._rest else []
        try:
            json.loads(b"\n".join(self._data) or b"0")
        except (ValueError, RecursionError):
            if b"[DONE]" not in self._data:
                return parts
        return [*parts, *self._dispatch()]

    def _dispatch(self) -> list[AnswerPart]:
        payload, self._data = b"\n".join(self._data).strip(), []
        if not payload:
            return []
        if payload == b"[DONE]":
            self.complete = True
            return []
        try:
            event = json.loads(payload)
        except (ValueError, RecursionError):
            shown = payload[:100].decode("utf-8", "replace")
            raise ChatServerError(f"the server sent an event that is not JSON: {shown}") from None
        part = read_answer(event)
        self.complete = self.complete or bool(part.finish_reason)
        return [part]


def read_answer(event: Any) -> AnswerPart:
    """Read a chunk of a stream, or a whole answer.

    Raises:
        ChatServerError: it reports an error, or is not an object.
    """
    if not isinstance(event, dict):
        raise ChatServerError("the server sent an event that is not an object")
    if event.get("error"):
        message = error_message(event) or "no message"
        raise ChatServerError(f"the server failed: {message}", message=message)
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    choice = choice if isinstance(choice, dict) else {}
    delta = choice.get("delta") or choice.get("message") or {}
    delta = delta if isinstance(delta, dict) else {}
    content, reasoning = _texts(delta.get("content"))
    return AnswerPart(
        content=content or _string(delta.get("refusal")),
        reasoning=reasoning
        or _string(delta.get("reasoning_content"))
        or _string(delta.get("reasoning")),
        calls=_calls(delta.get("tool_calls")),
        finish_reason=_string(choice.get("finish_reason")),
        usage=_usage(event),
    )


def _string(value: Any) -> str:
    """A text, or an empty one for anything else. Halves of surrogate pairs become ``?``."""
    if not isinstance(value, str):
        return ""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _texts(content: Any) -> tuple[str, str]:
    """The text and the reasoning of a content, which is a string or a list of parts."""
    if not isinstance(content, list):
        return _string(content), ""
    texts, thoughts = "", ""
    for part in content:
        if isinstance(part, str):
            texts += part
        elif isinstance(part, dict) and part.get("type") == "thinking":
            thoughts += "".join(_texts(part.get("thinking")))
        elif isinstance(part, dict):
            texts += _string(part.get("text"))
    return texts, thoughts


def _calls(value: Any) -> tuple[CalledTool, ...]:
    found = []
    for place, call in enumerate(value if isinstance(value, list) else []):
        if not isinstance(call, dict):
            continue
        called = call.get("function") or call.get("custom") or {}
        called = called if isinstance(called, dict) else {}
        arguments = _string(called.get("arguments")) or _string(called.get("input"))
        index = call.get("index")
        found.append(
            CalledTool(
                index if isinstance(index, int) else place, _string(called.get("name")), arguments
            )
        )
    return tuple(found)


def _usage(event: dict[str, Any]) -> ChatUsage | None:
    """OpenAI's usage, or llama.cpp's timings."""
    usage = event.get("usage")
    if isinstance(usage, dict):
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else 0
        return ChatUsage(
            _count(usage.get("prompt_tokens")),
            _count(usage.get("completion_tokens")),
            _count(cached) or _count(usage.get("prompt_cache_hit_tokens")),  # DeepSeek's
        )
    timings = event.get("timings")
    if isinstance(timings, dict):
        cached = _count(timings.get("cache_n"))
        prompt = _count(timings.get("prompt_n")) + cached
        return ChatUsage(prompt, _count(timings.get("predicted_n")), cached)
    return None
