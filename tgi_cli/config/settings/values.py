"""Kinds of values that settings take, and how each is parsed from a flag, a variable or a file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

LARGEST = (1 << 31) - 1
"""Upper bound of integers that have no other."""

LARGEST_RATIO = 1e9
"""Upper bound of other numbers. Some are seconds, and threads wait at most 9.2e9."""

LARGEST_FACTOR = 1e4
"""Upper bound of the factor by which a model's context is stretched."""

MAX_SIZES = 4096
"""Maximum length of a list of batch sizes, and of each of them."""

LARGEST_SIZE = 909_494 << 40
"""Most bytes of a size: as a number without a unit, as other processes get it, it has 18 digits."""

_MEMORY = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) ?([kmgt])(?:i?b?)", re.IGNORECASE)

_BYTES = re.compile(r"[0-9]{7,18}")

_SHOWN = 40
"""Characters of an invalid value that an error message repeats."""


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of value.

    Attributes:
        type: str, int, float, bool (a switch), Path, list (a flag that may be repeated) or tuple
            (comma-separated).
        metavar: how help names a value.
        parse: converts a word, where ``type`` alone cannot. Raises ValueError.
        choices: allowed words; empty: any.
        default: the value of a setting without a default of its own.
    """

    type: type
    metavar: str = ""
    parse: Callable[[str], Any] | None = None
    choices: tuple[str, ...] = ()
    default: Any = None

    def read(self, word: str) -> Any:
        """Parse a word. Raises ValueError with the reason."""
        if "\0" in word:  # which a configuration file may have
            raise ValueError(f"{word[:_SHOWN]!r} has a NUL character")
        if self.choices and word not in self.choices:
            raise ValueError(f"{word!r} is not one of {', '.join(map(repr, self.choices))}")
        if self.type is list:
            return [self.parse(word) if self.parse else word]
        if self.type is bool:
            return parse_bool(word)
        return self.parse(word) if self.parse else self.type(word)


def parse_bool(word: str) -> bool:
    """Parse a boolean in the spellings of environment variables. Raises ValueError."""
    if word.strip().lower() in ("true", "1", "yes", "on", "t", "y"):
        return True
    if word.strip().lower() in ("false", "0", "no", "off", "f", "n"):
        return False
    raise ValueError(f"{word!r} is neither true nor false")


def _parse_int(low: int, high: int, word: str) -> int:
    try:
        number = int(word)
    except ValueError:
        raise ValueError(f"{word[:_SHOWN]!r} is not a whole number") from None
    if number < low:
        raise ValueError(f"{word[:_SHOWN]} is not at least {low}")
    if number > high:
        raise ValueError(f"{word[:_SHOWN]} is not from {low} to {high}")
    return number


def _parse_float(low: float, high: float, word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        raise ValueError(f"{word[:_SHOWN]!r} is not a number") from None
    if not (math.isfinite(number) and number >= low):
        raise ValueError(f"{word[:_SHOWN]} is not at least {low:g}")
    if number > high:
        raise ValueError(f"{word[:_SHOWN]} is not at most {high:g}")
    return number


def _parse_fraction(with_one: bool, word: str) -> float:
    number = _parse_float(0, LARGEST_RATIO, word)
    if not (0 < number < 1 or (with_one and number == 1)):
        bounds = "above 0 and at most 1" if with_one else "between 0 and 1"
        raise ValueError(f"{word} is not {bounds}")
    return number


def _parse_sizes(word: str) -> tuple[int, ...]:
    parts = word.split(",")
    if len(parts) > MAX_SIZES:
        raise ValueError(f"more than {MAX_SIZES} numbers")
    return tuple(_parse_int(0, MAX_SIZES, part.strip()) for part in parts)


def _parse_memory(word: str) -> int:
    found = _MEMORY.fullmatch(word.strip())
    if found is not None:
        size = int(float(found[1]) * 1024 ** (1 + "kmgt".index(found[2].lower())))
    elif _BYTES.fullmatch(word):
        size = int(word)
    else:
        raise ValueError(f"{word[:_SHOWN]!r} is not a size, as 16GiB")
    if size < 1 << 20:
        raise ValueError(f"{word[:_SHOWN]} is not at least 1MiB")
    if size > LARGEST_SIZE:
        raise ValueError(f"{word[:_SHOWN]} is not at most 909494TiB")
    return size


def _parse_path(word: str) -> Path:
    if not word:  # which pathlib takes for the current folder
        raise ValueError("the path is empty")
    return Path(word)


def _parse_items(word: str) -> tuple[str, ...]:
    return tuple(item for item in (part.strip() for part in word.split(",")) if item)


def whole(low: int, high: int = LARGEST, *, repeated: bool = False) -> ValueKind:
    """Integers from ``low`` to ``high``; ``repeated``: a flag that may be given several times."""
    return ValueKind(list if repeated else int, "N", partial(_parse_int, low, high))


def whole_or(word: str, low: int) -> ValueKind:
    """Integers from ``low`` on, or ``word`` for None."""

    def parse(given: str) -> int | None:
        if given == word:
            return None
        try:
            return _parse_int(low, LARGEST, given)
        except ValueError as error:
            raise ValueError(f"{error}, nor {word}") from None

    return ValueKind(int, f"{word}|N", parse)


def number(low: float, high: float = LARGEST_RATIO, metavar: str = "X") -> ValueKind:
    """Numbers from ``low`` to ``high``."""
    return ValueKind(float, metavar, partial(_parse_float, low, high))


def one_of_numbers(*numbers: int) -> ValueKind:
    """One of several whole numbers."""
    known = {str(each): each for each in numbers}

    def parse(word: str) -> int:
        if word not in known:
            raise ValueError(f"{word[:_SHOWN]!r} is not one of {', '.join(known)}")
        return known[word]

    return ValueKind(int, "N", parse)


def one_of(metavar: str, *words: str) -> ValueKind:
    """One of several words."""
    return ValueKind(str, metavar, choices=words)


def text(metavar: str = "TEXT") -> ValueKind:
    """Any word."""
    return ValueKind(str, metavar)


def words(metavar: str) -> ValueKind:
    """A flag that may be repeated."""
    return ValueKind(list, metavar)


def memory() -> ValueKind:
    """Amounts in powers of 1024, as ``16GiB``, ``16Gi``, ``16g`` or ``512M``, or in bytes."""
    return ValueKind(int, "SIZE", _parse_memory)


def path(metavar: str = "PATH") -> ValueKind:
    """A file or a folder."""
    return ValueKind(Path, metavar, _parse_path)


SWITCH = ValueKind(bool, default=False)
OPTIONAL_SWITCH = ValueKind(bool)
RATIO = number(0)
FACTOR = number(1, LARGEST_FACTOR)
SECONDS = number(0, metavar="SECONDS")
SHARE = ValueKind(float, "X", partial(_parse_fraction, False))
"""Numbers between 0 and 1, both excluded."""
FRACTION = ValueKind(float, "X", partial(_parse_fraction, True))
"""Numbers above 0, up to 1."""
SIZES = ValueKind(tuple, "SIZES", _parse_sizes)
"""Comma-separated integers."""
ITEMS = ValueKind(tuple, "LIST", _parse_items)
"""Comma-separated words."""
