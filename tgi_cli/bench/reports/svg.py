"""Charts as SVG: axes with round numbers, lines, points, bars. Colours come from the page's CSS.

Classes: ``axis``, ``grid``, ``note`` (text), ``s0`` to ``s7`` (lines), ``f0`` to ``f7`` (areas).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

SERIES = 8
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 14, 44


@dataclass
class AxisScale:
    """Numbers of one axis to places on it.

    Attributes:
        log: equal factors are equal distances; every value must be above 0.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __post_init__(self) -> None:
        if self.log:
            self.low = max(self.low, self.high * 1e-6, 1e-9)
        if self.high <= self.low:
            self.high = self.low * 1.1 if self.low > 0 else self.low + 1

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers on the axis."""
        if self.log:
            return self._log_ticks(most)
        raw = (self.high - self.low) / most
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * f for f in (1, 2, 2.5, 5, 10) if unit * f >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]

    def _log_ticks(self, most: int) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            ticks = [f * 10.0**d for d in decades for f in factors]
            inside = [t for t in ticks if self.low * 0.999 <= t <= self.high * 1.001]
            if len(inside) <= most + 2:
                break
        if len(inside) > 1:
            return inside
        return AxisScale(self.low, self.high, self.start, self.end).ticks(most)


@dataclass
class SvgChart:
    """One chart; add to it, then ``render`` it.

    Attributes:
        zero: the axes begin at 0 (of an axis that is not logarithmic).
    """

    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False
    zero: bool = True
    width: int = 560
    height: int = 320
    _lines: list[tuple[list[float], list[float], int, bool]] = field(default_factory=list)
    _points: list[tuple[float, float, int, str, str]] = field(default_factory=list)
    _bars: list[tuple[float, float, float]] = field(default_factory=list)

    def line(
        self, xs: Sequence[float], ys: Sequence[float], colour: int, *, dashed: bool = False
    ) -> None:
        """A line through points."""
        if len(xs):
            self._lines.append((list(xs), list(ys), colour % SERIES, dashed))

    def point(self, x: float, y: float, colour: int, label: str = "", hint: str = "") -> None:
        """A point, with a label beside it and a hint for who points at it."""
        self._points.append((x, y, colour % SERIES, label, hint or label))

    def error_bar(self, x: float, low: float, high: float) -> None:
        """The vertical interval of a point at ``x``."""
        self._bars.append((x, low, high))

    def render(self, title: str) -> str:
        """The SVG element; ``title`` is for who cannot see it."""
        xs = [x for line in self._lines for x in line[0]] + [p[0] for p in self._points]
        ys = [y for line in self._lines for y in line[1]] + [p[1] for p in self._points]
        ys += [bound for bar in self._bars for bound in bar[1:3]]
        x = self._scale(xs, self.x_log, _LEFT, self.width - _RIGHT)
        y = self._scale(ys, self.y_log, self.height - _BOTTOM, _TOP)
        body = [self._grid(x, y)]
        for at, low, high in self._bars:
            body.append(
                f'<line class="bar" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{y(low):.1f}" '
                f'y2="{y(high):.1f}"/>'
            )
        for line_xs, line_ys, colour, dashed in self._lines:
            path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(line_xs, line_ys, strict=True))
            dash = ' stroke-dasharray="5 4"' if dashed else ""
            body.append(f'<polyline class="line s{colour}" points="{path}"{dash}/>')
        body += self._dots(x, y)
        return _svg(self.width, self.height, title, body)

    def _scale(self, values: list[float], log: bool, start: float, end: float) -> AxisScale:
        if log:
            values = [value for value in values if value > 0]
        low, high = min(values, default=0.0), max(values, default=1.0)
        if log:
            return AxisScale(low / 1.15, high * 1.15, start, end, True)
        if self.zero or (low >= 0 and low < high * 0.4):
            low = min(low, 0.0)
        return AxisScale(low, high + (high - low) * 0.06, start, end)

    def _dots(self, x: AxisScale, y: AxisScale) -> list[str]:
        out = []
        taken: list[tuple[float, float]] = []
        for at_x, at_y, colour, label, hint in self._points:
            px, py = x(at_x), y(at_y)
            title = f"<title>{escape(hint)}</title>" if hint else ""
            out.append(
                f'<circle class="f{colour}" cx="{px:.1f}" cy="{py:.1f}" r="4">{title}</circle>'
            )
            place = (px + 7, py - 6)
            crowded = any(abs(place[0] - a) < 22 and abs(place[1] - b) < 12 for a, b in taken)
            if label and not crowded:
                taken.append(place)
                side = "end" if place[0] > self.width - 60 else "start"
                shift = px - 7 if side == "end" else place[0]
                out.append(
                    f'<text class="note" x="{shift:.1f}" y="{place[1]:.1f}" '
                    f'text-anchor="{side}">{escape(label)}</text>'
                )
        return out

    def _grid(self, x: AxisScale, y: AxisScale) -> str:
        bottom, right = self.height - _BOTTOM, self.width - _RIGHT
        parts = []
        for tick in x.ticks():
            at = f"{x(tick):.1f}"
            parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}"/>')
            parts.append(
                f'<text class="tick" x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">'
                f"{number(tick)}</text>"
            )
        for tick in y.ticks():
            at = f"{y(tick):.1f}"
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
            parts.append(
                f'<text class="tick" x="{_LEFT - 7}" y="{y(tick) + 4:.1f}" text-anchor="end">'
                f"{number(tick)}</text>"
            )
        parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
        middle = (_TOP + bottom) / 2
        parts.append(
            f'<text class="label" x="{(_LEFT + right) / 2:.0f}" y="{self.height - 8}" '
            f'text-anchor="middle">{escape(self.x_label)}</text>'
            f'<text class="label" transform="translate(14 {middle:.0f}) rotate(-90)" '
            f'text-anchor="middle">{escape(self.y_label)}</text>'
        )
        return "".join(parts)


def timeline(
    rows: Sequence[Sequence[tuple[float, float, str, str]]], seconds: float, title: str
) -> str:
    """Bars along a common time axis, one row for each request.

    Args:
        rows: (start, end, class, hint) of each row's parts, in seconds.
        seconds: the axis' end.
    """
    width, row_height = 1140, 7 if len(rows) > 60 else 11
    height = _TOP + row_height * len(rows) + _BOTTOM
    x = AxisScale(0.0, seconds or 1.0, _LEFT, width - _RIGHT)
    bottom = height - _BOTTOM
    body = []
    for tick in x.ticks(10):
        at = f"{x(tick):.1f}"
        body.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}"/>')
        body.append(
            f'<text class="tick" x="{at}" y="{bottom + 16}" text-anchor="middle">'
            f"{number(tick)}</text>"
        )
    for number_, row in enumerate(rows):
        top = _TOP + number_ * row_height
        for start, end, kind, hint in row:
            span = max(x(end) - x(start), 0.8)
            body.append(
                f'<rect class="{kind}" x="{x(start):.1f}" y="{top}" width="{span:.1f}" '
                f'height="{row_height - 2}"><title>{escape(hint)}</title></rect>'
            )
    body.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{width - _RIGHT}"/>')
    body.append(
        f'<text class="label" x="{width / 2:.0f}" y="{height - 8}" text-anchor="middle">'
        "seconds since the step began</text>"
    )
    return _svg(width, height, title, body)


def _svg(width: int, height: int, title: str, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{"".join(body)}</svg>'
    )


def number(value: float) -> str:
    """A tick's number, short: 0.25, 12, 1.5k, 2M."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"
