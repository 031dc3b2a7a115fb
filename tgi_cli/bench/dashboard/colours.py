"""One colour for each step, readable on its background. Red is kept for errors."""

from __future__ import annotations

_ON_DARK = (
    "#5fd7ff",
    "#ffaf5f",
    "#87d787",
    "#ff87d7",
    "#d7d75f",
    "#af87ff",
    "#5fd7af",
    "#ff9f80",
    "#87afff",
    "#d7af87",
    "#d7afff",
    "#afd75f",
    "#87d7d7",
    "#d0d0d0",
)
_ON_LIGHT = (
    "#00688b",
    "#9a4f00",
    "#1f6f1f",
    "#a0157a",
    "#6b6400",
    "#5f2fb5",
    "#006b57",
    "#a8431c",
    "#1f4fae",
    "#7a4f2a",
    "#7b3fa0",
    "#4a6a00",
    "#12656a",
    "#444444",
)
COLOURS = len(_ON_DARK)
"""Text-generation-benchmark's number of them; the fifteenth step has the first one's again."""


def colour(index: int, dark: bool) -> str:
    """The colour of a step, as Rich and Textual write it."""
    return (_ON_DARK if dark else _ON_LIGHT)[index % COLOURS]


def error_style(dark: bool) -> str:
    """Of what failed."""
    return "bold #ff6b6b" if dark else "bold #b00020"


def warning_style(dark: bool) -> str:
    """Of what to beware of."""
    return "#ffd75f" if dark else "#7a5200"
