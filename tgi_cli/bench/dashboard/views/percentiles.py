"""The second view: every metric's mean and percentiles with their intervals."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from tgi_cli.bench.dashboard.formatting import error_style, fitted, warning_style
from tgi_cli.bench.dashboard.views import ViewState
from tgi_cli.bench.dashboard.widgets import TextView, append_notes
from tgi_cli.bench.statistics.metrics import StepMetrics
from tgi_cli.bench.statistics.observations import METRICS
from tgi_cli.bench.statistics.summary import Summary

_COLUMNS = {name: name for name in ("mean", "p50", "p90", "p95", "p99")} | {"p999": "p99.9"}
_LABEL = 17
"""Width of the metrics' names."""


class PercentilesView(TextView):
    """The table of the step that is shown."""

    def paint(self, state: ViewState) -> None:
        """Show the state."""
        width = self.size.width - 1  # without the scroll bar
        step = state.shown
        table = state.metrics.table(step) if step is not None else None

        def draw() -> Text:
            if table is None or step is None:
                return Text("Percentiles are shown when a step has results.", style="dim")
            running = step.record is None
            return draw_percentiles(
                table, width, slo=state.metrics.slo, running=running, dark=state.dark
            )

        self.show((table, step, width, state.dark), draw)


def draw_percentiles(
    metrics: StepMetrics,
    width: int,
    *,
    slo: Mapping[str, float],
    running: bool = False,
    dark: bool = True,
) -> Text:
    """Draw the whole table."""
    width = max(width, 60)
    column = (width - _LABEL) // len(_COLUMNS)
    text = Text(no_wrap=True, overflow="crop")
    for unit in ("ms", "tokens/s"):
        rows = {
            name: summary
            for name, summary in {**metrics.latencies, **metrics.batches}.items()
            if METRICS[name].unit == unit
        }
        if rows:
            heads = "".join(f"{head:>{column}}" for head in _COLUMNS.values())
            text.append(f"{unit:<{_LABEL}}{heads}\n", style="bold")
        for name, summary in rows.items():
            _append_row(text, METRICS[name].label, summary, column)
        if unit == "ms":
            for name in metrics.unresolved:
                text.append(f"{METRICS[name].label:<{_LABEL}}{'unresolved':>{column}}\n")
    if metrics.rates:
        text.append("\n")
        _append_rates(text, metrics, width)
    text.append("\n")
    _append_counts(text, metrics, slo, error_style(dark))
    append_notes(text, metrics.warnings, width, warning_style(dark))
    if running:
        text.append("The intervals are shown when the step has ended.", style="dim")
    elif metrics.latencies or metrics.batches:
        text.append("Below each value: its 95 % bootstrap interval.")
    text.rstrip()
    return text


def _append_row(text: Text, label: str, summary: Summary, column: int) -> None:
    """Append values, and below them their intervals."""
    values = "".join(f"{fitted(getattr(summary, n), column - 1):>{column}}" for n in _COLUMNS)
    text.append(f"{label:<{_LABEL}}{values}\n")
    if summary.intervals:
        spans = "".join(f"{span_of(*summary.intervals[name]):>{column}}" for name in _COLUMNS)
        text.append(f"{'':{_LABEL}}{spans}\n", style="dim")


def _append_rates(text: Text, metrics: StepMetrics, width: int) -> None:
    """Append two rates per line: value, unit, interval."""
    half = width // 2
    for number, (name, rate) in enumerate(metrics.rates.items()):
        metric = METRICS[name]
        interval = metrics.rate_intervals.get(name)
        span = f" {span_of(*interval)}" if interval else ""
        plain = f"{metric.label:<9}{fitted(rate, 8):>9} {metric.unit}"
        text.append(plain)
        text.append(span, style="dim")
        left = number % 2 == 0 and number + 1 < len(metrics.rates)
        text.append(" " * max(half - len(plain) - len(span), 1) if left else "\n")


def _append_counts(text: Text, metrics: StepMetrics, slo: Mapping[str, float], error: str) -> None:
    if metrics.runs:
        text.append(f"{metrics.runs} runs\n")
    if metrics.requests:
        text.append(f"{metrics.requests} requests, {metrics.concurrency:.1f} at a time")
        counted = ", ".join(f"{count} by {source}" for source, count in metrics.counted_by.items())
        text.append(f"; tokens counted: {counted}\n" if counted else "\n")
    if metrics.errors:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in metrics.errors.items())
        text.append(f"{metrics.failed} failed: {kinds}\n", style=error)
    if metrics.attainment is not None:
        limits = ", ".join(f"{METRICS[name].label} {limit:g} ms" for name, limit in slo.items())
        text.append(f"{metrics.attainment:.1%} within {limits}\n")


def span_of(low: float, high: float) -> str:
    """Format an interval in at most nine columns."""
    return f"{_brief(low)}–{_brief(high)}"


def _brief(value: float) -> str:
    size = abs(value)
    for bound, digits in ((9.995, 2), (99.95, 1), (9999.5, 0)):
        if size < bound:
            return f"{value:.{digits}f}"
    for unit, letter in ((1e3, "k"), (1e6, "M"), (1e9, "G")):
        if size < unit * 999.5:
            return f"{value / unit:.0f}{letter}"
    return f"{value:.0e}"
