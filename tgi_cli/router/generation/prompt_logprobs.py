"""Log-probabilities of a prompt and their encoding."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

INLINE_SCORES = 2048
"""Most log-probabilities that are encoded on the event loop, at 2 us each; longer reports would
delay the tokens of other requests."""
_SLICE = 128
"""Rows that are encoded in one call, which holds the interpreter lock."""

_encode = msgspec.json.Encoder().encode


def shortest(value: float) -> float:
    """A 32-bit float without the digits that 64 bits add: -0.1, not -0.10000000149011612."""
    return float(f"{value:.7g}")


def encoded_rows(rows: Iterable[Any]) -> bytes:
    """The items of a JSON array without its brackets, encoded in slices to save memory."""
    rows = iter(rows)
    parts: list[bytes] = []
    while taken := list(islice(rows, _SLICE)):
        parts.append(_encode(taken)[1:-1])
    return b",".join(parts)
