"""What values settings take, and how they are read from a word: of a flag, a variable or a file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SHOWN = 40
"""Characters of a word in an error message."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value.

    Attributes:
        type: of the value: str, int, float, bool (a switch), Path, list (of words: the flag may be
            repeated) or tuple (with commas between its parts).
        metavar: how help names a value.
        parse: from a word to the value, where ``type`` does not say it all. Raises ValueError.
        choices: the words that there are; none: all that can be read.
    """

    type: type
    metavar: str = ""
    parse: Callable[[str], Any] | None = None
    choices: tuple[str, ...] = ()

    def read(self, word: str) -> Any:
        """The value that a word stands for. Raises ValueError, which says what is wrong."""
        if self.choices and word not in self.choices:
            raise ValueError(f"{word!r} is not one of {', '.join(map(repr, self.choices))}")
        if self.parse is not None:
            return self.parse(word)
        if self.type is bool:
            return truth(word)
        return [word] if self.type is list else self.type(word)


def truth(word: str) -> bool:
    """A yes or a no, in the spellings that environment variables have. Raises ValueError."""
    if word.strip().lower() in ("true", "1", "yes", "on", "t", "y"):
        return True
    if word.strip().lower() in ("false", "0", "no", "off", "f", "n"):
        return False
    raise ValueError(f"{word!r} is neither true nor false")


LARGEST = (1 << 31) - 1
"""Of whole numbers that nothing else bounds: what every part of the program holds exactly."""

LARGEST_RATIO = 1e9
"""Of other numbers; seconds among them, of which threads wait for 9.2e9 at most."""

LARGEST_FACTOR = 1e4
"""By which the context of a model is stretched."""

MOST_SIZES = 4096
"""Numbers in a list, and the largest of them: sequences that run at once."""


def _whole(low: int, high: int = LARGEST) -> Callable[[str], int]:
    def parse(word: str) -> int:
        try:
            number = int(word)
        except ValueError:
            raise ValueError(f"{word[:_SHOWN]!r} is not a whole number") from None
        if number < low:
            raise ValueError(f"{word[:_SHOWN]} is not at least {low}")
        if number > high:
            raise ValueError(f"{word[:_SHOWN]} is not from {low} to {high}")
        return number

    return parse


def _ratio(word: str, high: float = LARGEST_RATIO) -> float:
    try:
        number = float(word)
    except ValueError:
        raise ValueError(f"{word[:_SHOWN]!r} is not a number") from None
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{word[:_SHOWN]} is not at least 0")
    if number > high:
        raise ValueError(f"{word[:_SHOWN]} is not at most {high:g}")
    return number


def _share(word: str) -> float:
    number = _ratio(word)
    if not 0 < number < 1:
        raise ValueError(f"{word} is not between 0 and 1")
    return number


def _part(word: str) -> float:
    number = _ratio(word)
    if not 0 < number <= 1:
        raise ValueError(f"{word} is not above 0 and at most 1")
    return number


def _factor(word: str) -> float:
    number = _ratio(word, LARGEST_FACTOR)
    if number < 1:
        raise ValueError(f"{word} is not at least 1")
    return number


def _sizes(word: str) -> tuple[int, ...]:
    number, parts = _whole(0, MOST_SIZES), word.split(",")
    if len(parts) > MOST_SIZES:
        raise ValueError(f"more than {MOST_SIZES} numbers")
    return tuple(number(part.strip()) for part in parts)


def _items(word: str) -> tuple[str, ...]:
    return tuple(item for item in (part.strip() for part in word.split(",")) if item)


def whole(low: int, high: int = LARGEST) -> Kind:
    """Whole numbers from ``low`` to ``high``."""
    return Kind(int, "N", _whole(low, high))


def one_of(metavar: str, *words: str) -> Kind:
    """One of some words."""
    return Kind(str, metavar, choices=words)


def text(metavar: str = "TEXT") -> Kind:
    """Any word."""
    return Kind(str, metavar)


def path(metavar: str = "PATH") -> Kind:
    """Of a file or a folder."""
    return Kind(Path, metavar)


SWITCH = Kind(bool)
RATIO = Kind(float, "X", _ratio)
"""A number of at least 0, up to :data:`LARGEST_RATIO`."""
SHARE = Kind(float, "X", _share)
"""A number between 0 and 1, neither of them."""
PART = Kind(float, "X", _part)
"""A number above 0, up to 1."""
FACTOR = Kind(float, "X", _factor)
"""A number of at least 1, up to :data:`LARGEST_FACTOR`."""
SIZES = Kind(tuple, "SIZES", _sizes)
"""Whole numbers between commas."""
ITEMS = Kind(tuple, "LIST", _items)
"""Words between commas."""


def words(metavar: str) -> Kind:
    """Words, the flag said once for each."""
    return Kind(list, metavar)
