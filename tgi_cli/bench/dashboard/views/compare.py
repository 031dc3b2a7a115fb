"""The fifth view: this run beside another, with a verdict for each metric."""

from __future__ import annotations

import asyncio

from rich.text import Text

from tgi_cli.bench.compare import ComparedMetric, Comparison, compare
from tgi_cli.bench.dashboard.formatting import SHORT_LABELS, error_style, fitted, warning_style
from tgi_cli.bench.dashboard.views import ViewState
from tgi_cli.bench.dashboard.widgets import TextView, append_notes
from tgi_cli.bench.events import BenchRun
from tgi_cli.bench.statistics.observations import METRICS

_NO_OTHER = "`tgi bench view EARLIER.json RUN.json` compares two saved runs here."
_SHORT_RATES = {"prefill_throughput": "Pref. t/s", "decode_throughput": "Dec. t/s"}
"""Rates whose labels are those of latencies, so that only the unit distinguishes them."""


class CompareView(TextView):
    """The table, computed once, when the view is first open and the run has ended.

    Attributes:
        comparison: The comparison, once it is computed.
    """

    comparison: Comparison | None = None
    _computing = False

    def paint(self, state: ViewState) -> None:
        """Show the state."""
        key = (state.run_state.run is None, self.comparison is None, self.size.width, state.dark)
        self.show(key, lambda: self._text(state))

    def _text(self, state: ViewState) -> Text:
        run, other = state.run_state.run, state.other
        if other is None:
            return Text(_NO_OTHER, "dim")
        if run is None:
            return Text("The comparison is shown when the run has ended.", style="dim")
        if self.comparison is not None:
            return draw_comparison(self.comparison, self.size.width - 1, dark=state.dark)
        if not self._computing:
            self._computing = True
            self.run_worker(self._compare(state, other, run))
        return Text("comparing ...", style="dim")

    async def _compare(self, state: ViewState, before: BenchRun, after: BenchRun) -> None:
        self.comparison = await asyncio.to_thread(compare, before, after)
        self.paint(state)


def draw_comparison(found: Comparison, width: int, *, dark: bool = True) -> Text:
    """Draw a line for each metric: before, after, change, interval, verdict."""
    text = Text(no_wrap=True, overflow="crop")
    label = min(max(width - 64, 15), 40)
    heads = f"{'':{label}}{'before':>10}{'after':>10}{'change':>9}  {'99 % interval':<18}verdict"
    styles = {"better": "bold #1f8a4c" if not dark else "bold #87d787", "worse": error_style(dark)}
    verdicts = {"better": "better", "worse": "worse", "same": "not significant"}
    step = ""
    for row in found.rows:
        if row.step != step:
            step = row.step
            beside = len(step) < label
            text.append(f"{step:<{label}}" if beside else f"{step}\n{'':{label}}", style="bold")
            text.append(f"{heads[label:]}\n", style="dim")
        text.append(f"{name_of(row, label - 1):<{label}}")
        text.append(f"{fitted(row.a, 9):>10}{fitted(row.b, 9):>10}{change(row.ratio):>9}")
        text.append(f"  {change(row.low)} – {change(row.high)}".ljust(20), style="dim")
        text.append(f"{verdicts[row.verdict]}\n", style=styles.get(row.verdict, "dim"))
    if not found.rows:
        text.append("The runs have no step in common.\n", style=warning_style(dark))
    text.append("\n")
    worse = len(found.regressions)
    if worse:
        text.append(f"{worse} of {len(found.rows)} metrics are worse.\n", style=styles["worse"])
    elif found.rows:
        text.append("No metric is worse.\n", style=styles["better"])
    append_notes(text, (*found.unmatched, *found.notes), width, warning_style(dark))
    text.rstrip()
    return text


def name_of(row: ComparedMetric, width: int) -> str:
    """The label of a metric with its statistic, and its unit if it fits."""
    metric = METRICS.get(row.metric)
    if metric is None:
        return row.metric
    name = f"{metric.label} {row.statistic}"
    if len(name) > width:
        name = f"{SHORT_LABELS.get(row.metric, metric.label)} {row.statistic}"
    whole = f"{name}, {metric.unit}"
    if len(whole) <= width:
        return whole
    rate = _SHORT_RATES.get(row.metric)
    return f"{rate} {row.statistic}" if rate else name


def change(ratio: float) -> str:
    """Format a ratio as a change in at most eight columns: +12.3 %, +123 %, x12, > x1000."""
    percent = (ratio - 1) * 100
    if ratio >= 1000:
        return "> x1000"
    if percent >= 1000:
        return f"x{ratio:.0f}"
    return f"{percent:+.1f} %" if abs(percent) < 99.95 else f"{percent:+.0f} %"
