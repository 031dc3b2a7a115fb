"""The columns of the tables: kinds of requests to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PROMPT = 128
NEW = 128
PREFILLS = (512, 1024)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
LONG_NEW = 32


@dataclass(frozen=True)
class Column:
    """Waves of requests of one kind.

    Attributes:
        name: key in the saved file.
        concurrency: concurrent requests.
        prompt: tokens of each prompt.
        new: output tokens of each request.
        repeats: waves per measurement, which is their median.
    """

    name: str
    concurrency: int
    prompt: int
    new: int
    repeats: int = 1


def serving(
    concurrency: Sequence[int],
    prefills: Sequence[int] = PREFILLS,
    prompt: int = PROMPT,
    new: int = NEW,
) -> list[Column]:
    """Return a column for each concurrency, and one for each length of a single prompt."""
    columns = [
        Column(f"c{count}", count, prompt, new, repeats=3 if count == 1 else 1)
        for count in concurrency
    ]
    return columns + [Column(f"p{length}", 1, length, 1, repeats=3) for length in prefills]


def long_contexts(contexts: Sequence[int], new: int = LONG_NEW) -> list[Column]:
    """Return a column of single requests for each context length."""
    return [Column(f"l{length}", 1, length, new) for length in contexts]
