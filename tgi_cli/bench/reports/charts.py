"""Charts of a run as static SVG.

The templates draw them. No library fits: pygal has neither a logarithmic x axis nor timelines,
matplotlib takes 40 MB and fixes its colors, and others need scripts in the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import jinja2
import numpy as np

from tgi_cli.bench.events import BenchRequestRecord, BenchRun, StepRecord
from tgi_cli.bench.statistics.metrics import StepMetrics, find_knee
from tgi_cli.bench.statistics.observations import (
    METRICS,
    batch_values,
    latencies_of,
    without_warmup,
)
from tgi_cli.bench.statistics.summary import round_up

_COLORS = 8
_CURVE_POINTS = 200
_TIMELINE_REQUESTS = 120
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 14, 44
"""Margins in pixels, which the templates have too."""

_T = TypeVar("_T")


def format_tick(value: float) -> str:
    """Format the number of a tick: 0.25, 12, 1.5k, 2M."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters.update(px="{:.1f}".format, fixed="{:.2f}".format, tick=format_tick)


@dataclass
class AxisScale:
    """Maps the values ``low`` to ``high`` to the pixels ``start`` to ``end``.

    Attributes:
        log: Whether the axis is logarithmic; then every value must be above 0.
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
        """Round numbers within the axis."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for factors in ((1, 2, 5), (1, 3), (1,)):
                ticks = [f * 10.0**d for d in range(first, last + 1) for f in factors]
                inside = [t for t in ticks if self.low * 0.999 <= t <= self.high * 1.001]
                if len(inside) <= most + 2:
                    break
            if len(inside) > 1:
                return inside
        step = round_up((self.high - self.low) / most * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def spaced(values: Iterable[float], axis: AxisScale, least: float = 26.0) -> list[float]:
    """Those of the values that are at least so many pixels from the one before."""
    ticks: list[float] = []
    for value in sorted(values):
        if not ticks or axis(value) - axis(ticks[-1]) >= least:
            ticks.append(value)
    return ticks


class ChartPoint(NamedTuple):
    """A point with a label beside it, a tooltip, and a vertical interval."""

    x: float
    y: float
    hint: str = ""
    label: str = ""
    interval: tuple[float, float] | None = None


@dataclass
class ChartLine:
    """A line through points; its name is for the legend."""

    points: Sequence[ChartPoint]
    name: str = ""
    markers: bool = True
    dashed: bool = False


@dataclass
class LineChart:
    """Lines over two axes; linear axes begin at 0.

    Attributes:
        x_values: Whether the ticks of the x axis are the points' values, as far as they fit.
    """

    heading: str
    x_label: str
    y_label: str
    lines: Sequence[ChartLine]
    text: str = ""
    x_log: bool = False
    y_log: bool = False
    x_values: bool = False
    width: int = 560
    height: int = 320

    @property
    def keys(self) -> list[tuple[str, str]]:
        """CSS class and name of each line in the legend."""
        return [(f"c{number}", line.name) for number, line in enumerate(self.lines) if line.name]

    def svg(self) -> str:
        """The SVG element."""
        points = [point for line in self.lines for point in line.points]
        ys = [point.y for point in points]
        ys += [bound for point in points for bound in point.interval or ()]
        x = self._scale([point.x for point in points], self.x_log, _LEFT, self.width - _RIGHT)
        y = self._scale(ys, self.y_log, self.height - _BOTTOM, _TOP)
        labels = self._labels(points, x, y)
        ticks = spaced({point.x for point in points}, x) if self.x_values else x.ticks()
        macros = TEMPLATES.get_template("charts.svg").module
        return macros.line_chart(self, x, y, ticks, labels)  # type: ignore[attr-defined, no-any-return]

    @staticmethod
    def _scale(values: list[float], log: bool, start: float, end: float) -> AxisScale:
        values = [value for value in values if value > 0] if log else [0.0, *values]
        low, high = min(values, default=1.0), max(values, default=1.0)
        if log:
            return AxisScale(low / 1.15, high * 1.15, start, end, True)
        return AxisScale(low, high + (high - low) * 0.06, start, end)

    def _labels(
        self, points: Iterable[ChartPoint], x: AxisScale, y: AxisScale
    ) -> list[tuple[float, float, str, str]]:
        """Position, anchor and text of those labels that do not overlap another."""
        labels: list[tuple[float, float, str, str]] = []
        taken: list[tuple[float, float]] = []
        for point in points:
            left, top = x(point.x) + 7, y(point.y) - 6
            crowded = any(abs(left - a) < 22 and abs(top - b) < 12 for a, b in taken)
            if point.label and not crowded:
                taken.append((left, top))
                at_edge = left > self.width - 60
                labels.append(
                    (left - 14 * at_edge, top, "end" if at_edge else "start", point.label)
                )
        return labels


class TimelineBar(NamedTuple):
    """A phase of a request, in seconds, with its tooltip."""

    start: float
    end: float
    phase: str
    hint: str


@dataclass
class TimelineChart:
    """A row of bars for each request over a common time axis."""

    heading: str
    rows: Sequence[Sequence[TimelineBar]]
    seconds: float
    text: str = ""
    width: int = 1140
    keys = (
        ("waiting", "due, not yet sent"),
        ("first", "until the first token"),
        ("decoding", "until complete"),
        ("failed", "failed"),
    )

    @property
    def row_height(self) -> int:
        """Pixels of a row."""
        return 7 if len(self.rows) > 60 else 11

    @property
    def row_ticks(self) -> list[int]:
        """The rows that are numbered, from 0."""
        return list(range(0, len(self.rows), 10 if len(self.rows) > 20 else 5))

    @property
    def height(self) -> int:
        """Pixels of the whole chart."""
        return _TOP + self.row_height * len(self.rows) + _BOTTOM

    def svg(self) -> str:
        """The SVG element."""
        x = AxisScale(0.0, self.seconds or 1.0, _LEFT, self.width - _RIGHT)
        macros = TEMPLATES.get_template("charts.svg").module
        return macros.timeline(self, x, self.row_height)  # type: ignore[attr-defined, no-any-return]


def charts_of(run: BenchRun, steps: Sequence[StepMetrics]) -> list[LineChart | TimelineChart]:
    """All charts of a run, the most informative first; ``steps`` are those of ``run.steps``."""
    pairs = list(zip(run.steps, steps, strict=True))
    charts: list[LineChart | TimelineChart] = []
    batches = [record for record, step in pairs if step.batches]
    if batches:
        charts += _batch_charts([step for step in steps if step.batches])
        for name, label in (("prefill", "Prefill"), ("decode_token", "Decode (token)")):
            values = [(r.step.title, batch_values(r.batches)[name]) for r in batches]
            charts += _distribution(f"{label} latency", values)
    loads = [step for step in steps if step.latencies]
    if len([step for step in loads if "e2e" in step.latencies]) > 1:
        charts.append(_throughput_over_latency(loads))
    shown = ("ttft", "itl", *["tpot"] * any(step.bursty for step in loads))
    if len(loads) > 1:
        charts += [chart for name in shown for chart in _latency_by_load(loads, name, run)]
        charts += _goodput(loads) if run.slo else []
    records = [record for record, step in pairs if step.latencies]
    for name in shown:
        values = [
            (record.step.title, latencies_of(record.requests)[name].values)
            for record, step in pairs
            if name in step.latencies
        ]
        charts += _distribution(METRICS[name].label, values)
    return charts + [_timeline(record) for record in _spread(records)]


def _batch_charts(steps: Sequence[StepMetrics]) -> list[LineChart]:
    charts = []
    for name, latency, throughput, unit in (
        ("Prefill", "prefill", "prefill_throughput", "ms"),
        ("Decode", "decode_token", "decode_throughput", "ms per token"),
    ):
        points = []
        for step in steps:
            if latency in step.batches:
                x, y = step.batches[latency].mean, step.batches[throughput].mean
                hint = f"{step.step.title}: {x:.2f} {unit}, {y:.1f} tokens/s"
                points.append(ChartPoint(x, y, hint, step.step.label))
        if points:
            heading, text = f"{name}: throughput over latency", "One point per batch size (means)."
            lines = [ChartLine(points)]
            charts.append(LineChart(heading, f"latency, {unit}", "tokens per second", lines, text))
    return charts


def _by_kind(steps: Sequence[StepMetrics]) -> dict[str, list[StepMetrics]]:
    """Steps by kind of load, each by rising load."""
    kinds: dict[str, list[StepMetrics]] = {}
    for step in sorted(steps, key=lambda step: step.step.value):
        kinds.setdefault(step.step.kind, []).append(step)
    return kinds


def _main_kind(steps: Sequence[StepMetrics]) -> tuple[list[StepMetrics], str, bool]:
    """The steps of the most frequent kind of load, its axis label, whether the axis is log."""
    chosen = max(_by_kind(steps).values(), key=len)
    concurrency = chosen[0].step.kind == "concurrency"
    return chosen, "concurrent clients" if concurrency else "requests per second", concurrency


def _throughput_over_latency(steps: Sequence[StepMetrics]) -> LineChart:
    lines = []
    kinds = _by_kind([step for step in steps if "e2e" in step.latencies])
    for kind, chosen in kinds.items():
        knee = find_knee(chosen) if kind == "concurrency" else None
        points = []
        for number, step in enumerate(chosen):
            x, y = step.latencies["e2e"].p50, step.rates["output_tokens_per_second"]
            label = f"{step.step.label} (knee)" if number == knee else step.step.label
            hint = f"{step.step.title}: {x:.1f} ms, {y:.1f} tokens/s"
            interval = step.rate_intervals.get("output_tokens_per_second")
            points.append(ChartPoint(x, y, hint, label, interval))
        name = {"concurrency": "concurrent clients", "rate": "request rates"}.get(kind, kind)
        lines.append(ChartLine(points, name if len(kinds) > 1 else ""))
    text = "One point per load; up and to the left is better."
    x_label, y_label = "end-to-end latency, median, ms", "output tokens per second"
    return LineChart("Throughput over latency", x_label, y_label, lines, text)


def _latency_by_load(steps: Sequence[StepMetrics], name: str, run: BenchRun) -> list[LineChart]:
    steps, x_label, x_log = _main_kind(steps)
    steps = [step for step in steps if name in step.latencies]
    if len(steps) < 2:
        return []
    label = METRICS[name].label
    lines = []
    for cut in ("p50", "p90", "p99"):
        points = []
        for step in steps:
            summary = step.latencies[name]
            y, interval = getattr(summary, cut), summary.intervals.get(cut)
            hint = f"{step.step.title}: {cut} {y:.1f} ms"
            points.append(ChartPoint(step.step.value, y, hint, interval=interval))
        lines.append(ChartLine(points, cut))
    if name in run.slo:
        ends = [ChartPoint(step.step.value, run.slo[name]) for step in (steps[0], steps[-1])]
        lines.append(ChartLine(ends, f"limit {run.slo[name]:g} ms", markers=False, dashed=True))
    text = "Bars are 95 % bootstrap intervals."
    y_label = f"{label}, ms"
    return [LineChart(f"{label} by load", x_label, y_label, lines, text, x_log, True, True)]


def _goodput(steps: Sequence[StepMetrics]) -> list[LineChart]:
    steps, x_label, _ = _main_kind(steps)
    lines = []
    for rate, name in (("requests_per_second", "all"), ("goodput", "within the limits")):
        loads = [(step.step.value, step.rates[rate]) for step in steps if "goodput" in step.rates]
        lines.append(ChartLine([ChartPoint(x, y, f"{x:g}: {y:.3g}/s") for x, y in loads], name))
    y_label = "responses per second"
    return [LineChart("Goodput by load", x_label, y_label, lines, x_values=True)]


def _spread(values: Sequence[_T]) -> list[_T]:
    """At most as many values as there are colors, evenly taken, with the first and the last."""
    if len(values) <= _COLORS:
        return list(values)
    numbers = np.unique(np.round(np.linspace(0, len(values) - 1, _COLORS)).astype(int))
    return [values[number] for number in numbers]


def _distribution(name: str, values: Sequence[tuple[str, np.ndarray]]) -> list[LineChart]:
    """A curve for each step: the share of values up to each value."""
    lines = []
    for title, array in _spread([pair for pair in values if pair[1].size > 1]):
        shares = np.unique(np.concatenate([np.linspace(0, 1, _CURVE_POINTS), [0.99, 0.999]]))
        cuts = np.maximum(np.quantile(array, shares), 1e-3)
        curve = [ChartPoint(float(x), float(y)) for x, y in zip(cuts, shares * 100, strict=True)]
        lines.append(ChartLine(curve, title, markers=False))
    if not lines:
        return []
    heading, text = f"{name}: distribution", "Cumulative share of values."
    return [LineChart(heading, f"{name}, ms", "share of values, %", lines, text, x_log=True)]


def _timeline(record: StepRecord) -> TimelineChart:
    requests = sorted(without_warmup(record.requests), key=lambda request: request.scheduled)
    shown = requests[:_TIMELINE_REQUESTS]
    start = min((request.scheduled for request in shown), default=0.0)
    rows = [_bars(request, start) for request in shown]
    seconds = max((request.finished - start for request in shown), default=1.0)
    cut = len(requests) > len(shown)
    text = f"The first {len(shown)} of {len(requests)}." if cut else ""
    return TimelineChart(f"Requests of {record.step.title}", rows, seconds, text)


def _bars(request: BenchRequestRecord, start: float) -> list[TimelineBar]:
    due, sent = request.scheduled - start, request.dispatched - start
    end = request.finished - start
    name = f"request {request.index}"
    bars = []
    if sent > due:
        bars.append(TimelineBar(due, sent, "waiting", f"{name}: {sent - due:.3f} s late"))
    if request.error is not None:
        hint = f"{name}: {request.error} {request.detail}"
        return [*bars, TimelineBar(sent, end, "failed", hint)]
    first = request.arrivals[0] - start if request.arrivals else end
    hint = f"{name}: first token after {first - sent:.3f} s"
    bars.append(TimelineBar(sent, first, "first", hint))
    hint = f"{name}: {request.output_tokens} tokens in {end - sent:.3f} s"
    return [*bars, TimelineBar(first, end, "decoding", hint)]
