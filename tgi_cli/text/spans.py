"""Tokens with the characters that they cover."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

Span = tuple[int, int, int]
"""A token id with the start and the end of its characters in the text."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Tokens of a part of a text; as a sequence, those of the text.

    Two lists, as the tokenizer returns them: a tuple for each token would hold the interpreter
    lock for another 5 ms in 16,384 tokens.

    Attributes:
        ids: Token ids.
        offsets: Start and end of the characters of each token, from ``start`` on.
        start: First character of the part.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    start: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Span]:
        start = self.start
        for token_id, (begin, end) in zip(self.ids, self.offsets, strict=True):
            yield token_id, start + begin, start + end

    def __getitem__(self, part: slice) -> Spans:
        return Spans(self.ids[part], self.offsets[part], self.start)

    def at(self, start: int) -> Spans:
        """These tokens within a part that begins at ``start``."""
        return replace(self, start=start)


def repeated(spans: Spans, token_id: int, counts: deque[int]) -> Spans:
    """The tokens with each ``token_id`` as often as the next of ``counts`` says, which is removed.

    The repetitions cover the same characters.
    """
    if not counts or token_id not in spans.ids:
        return spans
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    for each, span in zip(spans.ids, spans.offsets, strict=True):
        times = counts.popleft() if each == token_id and counts else 1
        ids += [each] * times
        offsets += [span] * times
    return Spans(ids, offsets, spans.start)
