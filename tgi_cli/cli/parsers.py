"""Parsers of flags' values for Typer, which say what is wrong in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from tgi_cli.config.settings import values


def parser(read: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Typer's form of a function that reads a word and raises ValueError."""

    def parse(value: Any) -> Any:
        if not isinstance(value, str):
            return value  # a default
        try:
            return read(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def whole(low: int, high: int = values.LARGEST) -> Callable[[Any], Any]:
    """A parser of whole numbers from ``low`` to ``high``."""
    return parser(values.whole(low, high).read)


ratio = parser(values.RATIO.read)
"""A finite number of at least 0."""
share = parser(values.SHARE.read)
"""A number between 0 and 1, neither of them."""
sizes = parser(values.SIZES.read)
"""Whole numbers between commas."""
