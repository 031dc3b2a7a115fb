"""One answer as it arrives: its text, its reasoning, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from tgi_cli.chat.client import ChatClient, OnPause
from tgi_cli.chat.reasoning_tags import ReasoningTagSplitter, SplitText
from tgi_cli.chat.stream_parser import AnswerPart, ChatUsage

SHORTEST_RATED = 0.1
"""Seconds from the first to the last text from which on a rate is given: parts of a shorter answer
may have arrived together."""


@dataclass(slots=True)
class ReceivedAnswer:
    """What has arrived of an answer.

    Attributes:
        content: the answer.
        reasoning: what the model wrote before it.
        calls: tool calls, as ``name(arguments)``.
        finish_reason: the server's; empty if the answer is not complete.
        usage: tokens as the server counts them, or None.
        began: when the request was sent, on the clock of :func:`time.monotonic`.
        first: when the first text arrived, or None.
        last: when the last text arrived.
    """

    content: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    finish_reason: str = ""
    usage: ChatUsage | None = None
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0

    def take(self, part: AnswerPart, split: SplitText) -> None:
        """Add a part, whose content is split into content and reasoning."""
        now = time.monotonic()
        if part.content or part.reasoning or part.calls:
            self.first = now if self.first is None else self.first
            self.last = now
        if split.was_reasoning:
            self.reasoning, self.content = self.reasoning + self.content, ""
        self.reasoning += part.reasoning + split.reasoning
        self.content += split.content
        for call in part.calls:
            name_and_arguments = self.calls.setdefault(call.index, ["", ""])
            name_and_arguments[0] += call.name
            name_and_arguments[1] += call.arguments
        self.finish_reason = part.finish_reason or self.finish_reason
        self.usage = part.usage or self.usage

    def tool_calls(self) -> list[str]:
        """The tool calls, one line each."""
        return [f"{name}({arguments})" for name, arguments in self.calls.values()]

    def summary(self) -> str:
        """Tokens, their rate, the time to the first, and what of the prompt was cached."""
        if self.first is None:
            return f"no text in {time.monotonic() - self.began:.1f} s"
        waited = f"first after {self.first - self.began:.2f} s"
        if self.usage is None or not self.usage.completion_tokens:
            return f"{self.last - self.began:.1f} s, {waited}"
        tokens = self.usage.completion_tokens
        parts = [f"{tokens} token{'s' * (tokens != 1)}"]
        seconds = self.last - self.first
        if tokens > 1 and seconds >= SHORTEST_RATED:
            parts.append(f"{(tokens - 1) / seconds:.1f} tokens/s")
        parts.append(waited)
        if self.usage.prompt_tokens:
            cached = f", {self.usage.cached_tokens} of them cached" * bool(self.usage.cached_tokens)
            parts.append(f"prompt {self.usage.prompt_tokens}{cached}")
        return " · ".join(parts)

    def warning(self) -> str:
        """What the user should know of how it ended, or an empty string."""
        if self.finish_reason == "length":
            empty = not self.content and self.reasoning
            spent = "within the reasoning " if empty else ""
            return f"cut off {spent}by the limit of tokens (max_tokens, or the model's context)"
        if self.finish_reason == "content_filter":
            return "ended by the server's content filter"
        return ""


OnPart = Callable[[AnswerPart, SplitText], None]


async def receive(
    client: ChatClient,
    body: dict[str, Any],
    answer: ReceivedAnswer,
    on_part: OnPart,
    on_pause: OnPause,
) -> None:
    """Request an answer and add its parts to ``answer`` as they arrive.

    Args:
        body: the request.
        on_part: called with each part, after it was added.
        on_pause: called before a pause, if the server is busy.

    Raises:
        ChatServerError: as :meth:`ChatClient.answer`.
    """
    splitter = ReasoningTagSplitter()

    def take(part: AnswerPart, split: SplitText) -> None:
        answer.take(part, split)
        on_part(part, split)

    async with aclosing(client.answer(body, on_pause)) as parts:
        async for part in parts:
            take(part, splitter.push(part.content) if part.content else SplitText())
    take(AnswerPart(), splitter.finish())
