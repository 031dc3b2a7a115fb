"""Charts of throughput over latency, a color per step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Grid
from textual.strip import Strip
from textual.widget import Widget
from textual_hires_canvas import Canvas
from textual_plot import AxisFormatter, PlotWidget
from textual_plot.plot_widget import Legend

from tgi_cli.bench.dashboard.formatting import short
from tgi_cli.bench.statistics.summary import round_up

MAX_ZOOM = 6
_TICK_COLUMNS = 7
"""Columns of a tick of the x axis with its label."""


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """The points of one step: latency in ms and tokens per second, float64 ``[n]``."""

    latency: NDArray[np.float64]
    throughput: NDArray[np.float64]
    style: str
    chosen: bool = False


class ChartCanvas(Canvas):
    """A canvas that may be temporarily smaller than its widget.

    Canvas then renders a line without style, which Textual cannot draw under NO_COLOR.
    """

    def render_line(self, y: int) -> Strip:
        """Implement Textual's hook."""
        strip = super().render_line(y)
        return strip if strip.cell_length else Strip.blank(self.size.width, self.rich_style)


class LatencyChart(PlotWidget, can_focus=False):
    """A scatter chart. The wheel zooms it too, and dragging moves it; ``+`` and ``-`` undo that.

    Zoom 0 begins at the origin, 1 fits the points, and higher levels zoom into the chosen step.
    """

    DEFAULT_CSS = """
    LatencyChart > .plot--axis { color: $text-muted; }
    LatencyChart > .plot--tick { color: $text-muted; text-style: none; }
    LatencyChart > .plot--label { color: $text-muted; text-style: none; }
    """

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._by_mouse = False
        self._across, self._upward = RoundTicks(), RoundTicks()
        self.set_x_formatter(self._across)
        self.set_y_formatter(self._upward)

    def compose(self) -> ComposeResult:
        """Replace PlotWidget's canvases."""
        with Grid():
            for name in ("margin-top", "margin-left", "plot", "margin-bottom"):
                yield ChartCanvas(1, 1, id=name)
        yield Legend(id="legend")

    def on_mount(self) -> None:
        """Implement Textual's hook."""
        self.margin_left = 8
        self.set_margins(tall=False)

    def set_margins(self, *, tall: bool) -> None:
        """Show the names of the axes if the screen is tall."""
        self.margin_top, self.margin_bottom = (1, 3) if tall else (0, 1)
        self.set_xlabel("latency (ms)" if tall else "")
        self.set_ylabel("tokens/s" if tall else "")

    def notify_style_update(self) -> None:
        """Follow a change of the theme, which PlotWidget ignores."""
        Widget.notify_style_update(self)
        super().notify_style_update()

    def release(self) -> None:
        """Forget the position that the mouse has set."""
        self._by_mouse = False

    def on_plot_widget_scale_changed(self) -> None:
        """Keep the position that the mouse has set."""
        self._by_mouse = True

    def show(self, series: Sequence[ChartSeries], zoom: int) -> None:
        """Show points; those of the chosen step are on top."""
        self.clear()
        there = [one for one in series if len(one.latency)]
        for one in sorted(there, key=lambda one: one.chosen):
            marker = "◆" if one.chosen else "●"
            style = f"bold {one.style}" if one.chosen else one.style
            self.scatter(one.latency, one.throughput, marker=marker, marker_style=style)
        if there and not self._by_mouse:
            self.set_xlimits(*limits([one.latency for one in there], _chosen(there, "x"), zoom))
            self.set_ylimits(*limits([one.throughput for one in there], _chosen(there, "y"), zoom))

    def render(self) -> Text | str:
        """Render the axes, or nothing if they do not fit."""
        canvas = self.query_one("#plot", Canvas).size
        if canvas.width < 6 or canvas.height < 3:
            return ""
        self._across.most = max(canvas.width // _TICK_COLUMNS, 1)
        self._upward.most = max(canvas.height // 2, 1)
        return str(super().render())


def _chosen(series: Sequence[ChartSeries], axis: str) -> float | None:
    """The mean of the points of the chosen step."""
    for one in series:
        if one.chosen:
            return float((one.latency if axis == "x" else one.throughput).mean())
    return None


def limits(
    values: Sequence[NDArray[np.float64]], centre: float | None, zoom: int
) -> tuple[float, float]:
    """The ends of an axis."""
    low = min(float(found.min()) for found in values)
    high = max(float(found.max()) for found in values)
    if zoom <= 0:
        return 0.0, (high or 1.0) * 1.1
    half = (high - low) / 2 * 1.1 or max(abs(high), 1.0) * 0.1
    middle = (low + high) / 2
    if zoom > 1:
        half /= 2 ** (zoom - 1)
        middle = middle if centre is None else centre
    return middle - half, middle + half


class RoundTicks(AxisFormatter):
    """Ticks at round numbers.

    Attributes:
        most: Maximum number of ticks.
    """

    def __init__(self) -> None:
        self.most = 5

    def get_ticks(self, min_: float, max_: float, max_ticks: int = 8) -> list[float]:
        """Place ticks at multiples of 1, 2 or 5 times a power of ten."""
        span = max_ - min_
        if not math.isfinite(span) or span <= 0:
            return []
        step = round_up(span / self.most, (1, 2, 5))
        first, last = math.ceil(min_ / step), math.floor(max_ / step)
        return [number * step for number in range(first, last + 1)]

    def get_labels_for_ticks(self, ticks: Sequence[float]) -> list[str]:
        """Format ticks with as few digits as distinguish them."""
        if not ticks:
            return []
        if max(map(abs, ticks)) >= 10_000:
            return [short(tick) for tick in ticks]
        step = ticks[1] - ticks[0] if len(ticks) > 1 else max(abs(ticks[0]), 1.0)
        digits = max(-math.floor(math.log10(step) + 1e-9), 0)
        # Adding 0.0 removes the sign of -0.0.
        return [f"{tick + 0.0:.{digits}f}" for tick in ticks]
