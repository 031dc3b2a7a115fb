"""Parsers of flags' values that say what is wrong in one line."""

from __future__ import annotations

import math
from collections.abc import Callable

import typer


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers from ``low`` to ``high``."""

    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise typer.BadParameter(f"{value!r} is not a whole number") from None
        if number < low or (high is not None and number > high):
            limits = f"at least {low}" if high is None else f"from {low} to {high}"
            raise typer.BadParameter(f"{number} is not {limits}")
        return number

    return parse


def share(value: str) -> float:
    """A number between 0 and 1, neither of them."""
    number = ratio(value)
    if not 0 < number < 1:
        raise typer.BadParameter(f"{value} is not between 0 and 1")
    return number


def ratio(value: str) -> float:
    """A finite number of at least 0."""
    try:
        number = float(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not a number") from None
    if not (math.isfinite(number) and number >= 0):
        raise typer.BadParameter(f"{value} is not at least 0")
    return number


def sizes(value: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    number = whole(0)
    return tuple(number(part.strip()) for part in value.split(","))
