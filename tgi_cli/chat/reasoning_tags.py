"""Separates reasoning that a model writes as text, ``<think>...</think>``, from the answer.

Servers with a reasoning parser send it in fields of its own; others send the text as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

_TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
}
"""Closing tags by opening tag. Qwen and DeepSeek write the first."""

_UNOPENED = "</think>"
"""Ends reasoning whose opening tag is part of the prompt, as with DeepSeek R1's template."""


@dataclass(frozen=True, slots=True)
class SplitText:
    """A piece of a message, by what it belongs to.

    Attributes:
        reasoning: part of the reasoning.
        content: part of the answer.
        was_reasoning: whether all content before this piece has turned out to be reasoning.
    """

    reasoning: str = ""
    content: str = ""
    was_reasoning: bool = False


class ReasoningTagSplitter:
    """Splits the text of one message as it arrives.

    Reasoning is only looked for at the beginning of a message, so that an answer may write about
    tags. Text that may be part of a tag is held back until that is decided.
    """

    def __init__(self) -> None:
        self._held = ""
        self._close = ""
        self._state = "start"

    def push(self, text: str) -> SplitText:
        """Take a piece of text; return what is decided."""
        self._held += text
        reasoning, content, was_reasoning = "", "", False
        if self._state == "start":
            self._start()
        if self._state == "opened":
            self._held = self._held.lstrip("\n")
            self._state = "reasoning" if self._held else "opened"
        if self._state == "reasoning":
            reasoning = self._until(self._close)
        elif self._state == "unopened":
            content = self._until(_UNOPENED)
            if self._state == "closed":
                reasoning, content, was_reasoning = content, "", True
        if self._state == "closed":
            self._held = self._held.lstrip("\n")
            self._state = "done" if self._held else "closed"
        if self._state == "done":
            content, self._held = content + self._held, ""
        return SplitText(reasoning, content, was_reasoning)

    def finish(self) -> SplitText:
        """Return what is held back at the end of the message."""
        rest, self._held = self._held, ""
        if self._state == "reasoning":
            return SplitText(reasoning=rest)
        return SplitText(content=rest)

    def _start(self) -> None:
        """Decide whether the message begins with a tag."""
        text = self._held.lstrip()
        for tag, close in _TAGS.items():
            if text.startswith(tag):
                self._state, self._close = "opened", close
                self._held = text.removeprefix(tag)
                return
        if text and not any(tag.startswith(text) for tag in _TAGS):
            self._state = "unopened"

    def _until(self, close: str) -> str:
        """Take what is held up to ``close``, or up to what may be its beginning."""
        found = self._held.find(close)
        if found >= 0:
            before = self._held[:found]
            self._held = self._held[found + len(close) :]
            self._state = "closed"
            return before
        kept = next(n for n in range(len(close) - 1, -1, -1) if self._held.endswith(close[:n]))
        end = len(self._held) - kept
        before, self._held = self._held[:end], self._held[end:]
        return before
