"""Numbers in as many columns as there are, and the colors of steps."""

from __future__ import annotations

import math

_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_ON_DARK = (
    "#5fd7ff", "#ffaf5f", "#87d787", "#ff87d7", "#d7d75f", "#af87ff", "#5fd7af",
    "#ff9f80", "#87afff", "#d7af87", "#d7afff", "#afd75f", "#87d7d7", "#d0d0d0",
)  # fmt: skip
_ON_LIGHT = (
    "#00688b", "#9a4f00", "#1f6f1f", "#a0157a", "#6b6400", "#5f2fb5", "#006b57",
    "#a8431c", "#1f4fae", "#7a4f2a", "#7b3fa0", "#4a6a00", "#12656a", "#444444",
)  # fmt: skip
SHORT_LABELS = {
    "ttft_scheduled": "TTFT (due)",
    "e2e_scheduled": "E2E (due)",
    "late": "Lag",
    "decode_token": "Dec. token",
    "decode_total": "Dec. total",
}
"""Labels that are shorter than in reports."""
COLORS = len(_ON_DARK)
"""As many as text-generation-benchmark has; the fifteenth step gets the first color again."""


def step_color(index: int, dark: bool) -> str:
    """The color of a step on its background. Red is reserved for errors."""
    return (_ON_DARK if dark else _ON_LIGHT)[index % COLORS]


def error_style(dark: bool) -> str:
    """The style of errors."""
    return "bold #ff6b6b" if dark else "bold #b00020"


def warning_style(dark: bool) -> str:
    """The style of warnings."""
    return "#ffd75f" if dark else "#7a5200"


def gauge_styles(bad: bool, dark: bool) -> tuple[str, str]:
    """The styles of a progress bar: its completed part, and the rest."""
    if dark:
        return ("#000000 on #ff6b6b" if bad else "#000000 on #5fd7ff"), "#d0d0d0 on #3a3a3a"
    return ("#ffffff on #b00020" if bad else "#ffffff on #00688b"), "#444444 on #d8d8d8"


def fitted(value: float | None, width: int = 8, decimals: int = 2) -> str:
    """Format a number with as many decimals as fit into ``width``, up to ``decimals``."""
    if value is None or not math.isfinite(value):
        return "-"
    for digits in range(decimals, -1, -1):
        text = f"{value:.{digits}f}"
        if len(text) <= width:
            return text
    return short(value)


def short(value: float) -> str:
    """Format a number with three significant digits: 0.0123, 1.23, 12.3, 123, 1.23k."""
    if not math.isfinite(value):
        return "-"
    for unit, letter in _UNITS:
        if abs(value) >= unit * 0.9995:
            return f"{_significant(value / unit)}{letter}"
    return _significant(value)


def _significant(value: float) -> str:
    size = abs(float(f"{value:.3g}"))
    if size == 0:
        return "0"
    digits = 2 - math.floor(math.log10(size))
    return f"{value:.{min(max(digits, 0), 4)}f}"


def seconds(value: float) -> str:
    """Format a duration: 0.12 s, 12.3 s, 2:05."""
    if value < 10:
        return f"{value:.2f} s"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
