"""Histograms and column charts as text."""

from __future__ import annotations

import textwrap

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from tgi_cli.bench.dashboard.formatting import short
from tgi_cli.bench.statistics.summary import histogram

_EIGHTHS = " ▏▎▍▌▋▊▉"
_SPANS = ((0.0, 100.0), (1.0, 99.0), (5.0, 95.0), (10.0, 90.0), (25.0, 75.0))
"""The percentiles between which values are shown, by zoom."""
HISTOGRAM_ZOOM = len(_SPANS) - 1


def draw_histogram(
    values: NDArray[np.float64],
    width: int,
    height: int,
    *,
    style: str,
    zoom: int = 0,
    unresolved: str = "",
) -> Text:
    """Draw a line for each bin: lower edge, bar, count.

    Args:
        values: Values ``[n]``.
        width, height: Size in cells.
        zoom: How much of the tails to omit, 0 to ``HISTOGRAM_ZOOM``.
        unresolved: Why there are no values, if the client could not resolve them.
    """
    if unresolved:
        words = textwrap.wrap(f"unresolved: {unresolved}", max(width - 1, 8))
        return Text("\n".join(words[:height]), style="dim")
    if not len(values) or width < 8 or height < 2:
        return Text("no values yet", style="dim")
    shown = within(values, zoom)
    # Round edges can take an additional bin.
    found = histogram(shown, bins=max(height - 2, 1))
    lines = list(zip(found.edges, found.counts, strict=False))[:height]
    edges = edge_labels([edge for edge, _ in lines])
    left = max(map(len, edges))
    right = max(len(str(count)) for _, count in lines)
    space = max(width - left - right - 2, 1)
    most = max(max(count for _, count in lines), 1)
    text = Text(no_wrap=True, overflow="crop")
    for number, (label, (_, count)) in enumerate(zip(edges, lines, strict=True)):
        if number:
            text.append("\n")
        bar = bar_of(count / most, space)
        text.append(f"{label:>{left}} ", style="dim")
        text.append(f"{bar:<{space}}", style=style)
        text.append(f" {count:>{right}}")
    return text


def within(values: NDArray[np.float64], zoom: int) -> NDArray[np.float64]:
    """The values between the percentiles of a zoom level."""
    low, high = np.percentile(values, _SPANS[min(max(zoom, 0), HISTOGRAM_ZOOM)])
    shown: NDArray[np.float64] = values[(values >= low) & (values <= high)]
    return shown


def edge_labels(edges: list[float]) -> list[str]:
    """Format edges with as few decimals as distinguish them."""
    if max(map(abs, edges)) >= 100_000:
        return [short(edge) for edge in edges]
    for digits in range(4):
        labels = [f"{edge:.{digits}f}" for edge in edges]
        if len(set(labels)) == len(edges) and all(
            abs(float(label) - edge) <= abs(edge) * 1e-3
            for label, edge in zip(labels, edges, strict=True)
        ):
            break
    return labels


def bar_of(share: float, space: int) -> str:
    """A bar in eighths of a cell; at least one eighth if ``share`` is above 0."""
    eighths = round(share * space * 8)
    if share > 0:
        eighths = max(eighths, 1)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def columns(values: list[float], width: int, height: int, top: float) -> list[str]:
    """Draw the latest values as columns from zero to ``top``, in ``height`` lines."""
    blocks = " ▁▂▃▄▅▆▇█"
    shown = values[-width:]
    levels = [0.0 if top <= 0 else min(max(value / top, 0.0), 1.0) * height for value in shown]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = []
        for value, level in zip(shown, levels, strict=True):
            eighths = round(min(max(level - row, 0.0), 1.0) * 8)
            if row == 0 and value > 0:
                eighths = max(eighths, 1)
            cells.append(blocks[eighths])
        lines.append("".join(cells).rjust(width))
    return lines
