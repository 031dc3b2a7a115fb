"""Log-probabilities of a prompt, and how they are written down."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec

from tgi_cli.engine.messages import PromptLogprobs

INLINE_SCORES = 2048
"""Log-probabilities of a report that is written on the event loop itself, at 2 us each; longer
ones must not hold up everybody's tokens."""
_SLICE = 128
"""Rows that are encoded at once: the encoder keeps the interpreter lock."""

_encode = msgspec.json.Encoder().encode


def shortest(value: float) -> float:
    """A 32-bit float without the digits that 64 bits add: -0.1, not -0.10000000149011612."""
    return float(f"{value:.7g}")


def encoded_rows(rows: Iterable[Any]) -> bytes:
    """A JSON array's items, without its brackets: never all of them as objects at once."""
    rows = iter(rows)
    parts: list[bytes] = []
    while taken := list(islice(rows, _SLICE)):
        parts.append(_encode(taken)[1:-1])
    return b",".join(parts)


class PromptLogprobTable:
    """What the engine reports of one prompt, run by run: parallel lists from token 1 on.

    Attributes:
        logprobs: of each token after the first, which nothing precedes; as 32-bit floats came.
        tops: ids of the likeliest in its place, and their log-probabilities.
    """

    __slots__ = ("logprobs", "tops")

    def __init__(self) -> None:
        self.logprobs: list[float] = []
        self.tops: list[tuple[Sequence[int], Sequence[float]]] = []

    def take(self, run: PromptLogprobs) -> None:
        """Append a run; one that starts earlier (a prompt computed again) replaces the rest."""
        place = run.start - 1
        self.logprobs[place:] = run.logprobs
        top_ids = run.top_ids or [[]] * len(run.logprobs)
        top_logprobs = run.top_logprobs or [[]] * len(run.logprobs)
        self.tops[place:] = zip(top_ids, top_logprobs, strict=True)
