"""The markers of reasoning: what they enclose, how many tokens that is, and how it is bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tgi_cli.engine.thinking import ThinkingBudget
from tgi_cli.text.formats.reasoning import REASONING_FIELDS
from tgi_cli.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerMarkers:
    """The texts around reasoning and in front of the content; empty: none.

    They let a grammar constrain the content alone, after any reasoning.

    Attributes:
        open: In front of reasoning.
        close: After reasoning.
        turn: What must follow the closing marker, where reasoning is a turn of its own.
        then: In front of the content.
    """

    open: str = ""
    close: str = ""
    turn: str = ""
    then: str = ""

    @classmethod
    def of(cls, template: Mapping[str, Any]) -> AnswerMarkers:
        """Those markers of a response template that are fixed texts."""
        fields = template["fields"]
        then = _first_text(fields.get("content", {}), "open")
        # Where even the content is marked, a turn of its own follows the reasoning's.
        turn = template.get("start_anchor", "") if then else ""
        for name in REASONING_FIELDS:
            region = fields.get(name, {})
            opening, close = _first_text(region, "open"), _first_text(region, "close")
            if opening and close:
                return cls(opening, close, turn, then)
        return cls(then=then)

    def before(self, inside: bool) -> dict[str, Any] | None:
        """The argument of :meth:`~tgi_cli.text.grammar.grammar.Grammar.behind`.

        None if there is nothing but content.

        Args:
            inside: generation starts within reasoning.
        """
        if not self.open and not self.then:
            return None
        close = self.close + self.turn
        return {"open": self.open, "close": close, "then": self.then, "inside": inside}

    def is_open(self, text: str) -> bool:
        """Whether a text ends within reasoning."""
        opened = text.rfind(self.open) if self.open else -1
        return opened >= 0 and self.close not in text[opened:]

    def budget(self, tokens: int, inside: bool, tokenizer: Tokenizer) -> ThinkingBudget:
        """A bound of a response's reasoning.

        The engine finds the markers by their tokens, so these must be certain. They are if a
        marker begins with an added token (``<think>`` in Qwen3): no other token can hold a part
        of it. Plain text may be tokenized together with what is around it.

        Args:
            tokens: Most tokens of reasoning.
            inside: The response starts within reasoning.
            tokenizer: Tokenizer of the model.

        Raises:
            ValueError: Reasoning is not marked, or not by added tokens.
        """
        if not self.open:
            raise ValueError("this model's reasoning, if any, is not marked")
        parts = (self.open, self.close, self.turn, self.then)
        ids = [_marker_ids(part, tokenizer) for part in parts]
        return ThinkingBudget(
            tokens=tokens, open=ids[0], close=ids[1], then=ids[2], answer=ids[3], inside=inside
        )


def _marker_ids(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = tokenizer.encode(text, False) if text else []
    if ids and ids[0] not in tokenizer.added_ids:
        raise ValueError(
            f"this model writes {text!r} as plain text, not as a token of its own, so that the "
            "engine cannot tell where reasoning begins and ends"
        )
    return tuple(ids)


class ReasoningCounter:
    """Counts the tokens of reasoning in one response, as they are generated.

    Args:
        markers: Texts around reasoning.
        inside: The response starts within reasoning.

    Attributes:
        tokens: Tokens of reasoning so far. A token that holds a part of a marker is none.
    """

    __slots__ = ("_close", "_inside", "_open", "_sizes", "_tail", "tokens")

    def __init__(self, markers: AnswerMarkers, inside: bool) -> None:
        self.tokens = 0
        self._open, self._close = markers.open, markers.close
        self._inside = inside
        self._tail = ""
        """What may be the beginning of the next marker."""
        self._sizes: deque[int] = deque(maxlen=len(self._close))
        """Lengths of the last tokens' texts, as many as the closing marker may have."""

    def push(self, text: str) -> None:
        """Add the text of a token. 0.3 us on one 2025 server core."""
        marker = self._close if self._inside else self._open
        tail = self._tail + text
        if self._inside:
            self.tokens += 1
            self._sizes.append(len(text))
        start = tail.find(marker)
        if start < 0:
            self._tail = tail[1 - len(marker) :] if len(marker) > 1 else ""
            return
        if self._inside:
            self._uncount(len(tail) - start)
        self._inside = not self._inside
        self._tail = tail[start + len(marker) :]

    def _uncount(self, characters: int) -> None:
        """Take back the last tokens, up to the one that has the first of these characters."""
        while characters > 0 and self._sizes:
            characters -= self._sizes.pop()
            self.tokens -= 1
        self._sizes.clear()


def _first_text(region: Mapping[str, Any], key: str) -> str:
    """The first marker of a region, or an empty text if it is a pattern."""
    found = region.get(key, "")
    if isinstance(found, list | tuple):
        found = found[0] if found else ""
    return found if isinstance(found, str) else ""
