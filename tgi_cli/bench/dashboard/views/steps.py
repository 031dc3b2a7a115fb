"""The first view, after text-generation-benchmark: progress, statistics, histograms, charts."""

from __future__ import annotations

from functools import partial

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from tgi_cli.bench.dashboard import histogram
from tgi_cli.bench.dashboard.charts import ChartSeries, LatencyChart
from tgi_cli.bench.dashboard.formatting import fitted, gauge_styles, seconds, step_color
from tgi_cli.bench.dashboard.metrics import StepPanel
from tgi_cli.bench.dashboard.run_state import StepState
from tgi_cli.bench.dashboard.views import ViewState
from tgi_cli.bench.dashboard.widgets import DrawnText, draw_gauge
from tgi_cli.bench.statistics.summary import Summary

_ROWS = (
    *(("Average", "mean"), ("Lowest", "minimum"), ("Highest", "maximum")),
    *((percentile, percentile) for percentile in ("p50", "p90", "p99")),
)
_LABEL = 8
_COLUMN = 9
_EMPTY = StepPanel("", {"ms": None})


class StepsView(Vertical):
    """The metrics of one step, and charts of all steps."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._painted: object = None

    def compose(self) -> ComposeResult:
        """Implement Textual's hook."""
        with Horizontal(id="gauges"):
            yield DrawnText(id="total")
            yield DrawnText(id="step")
        with Horizontal(id="statistics"):
            for kind in ("prefill", "decode"):
                yield DrawnText(id=f"{kind}-statistics", classes=f"statistics {kind}")
                yield DrawnText(id=f"{kind}-histogram", classes=f"histogram {kind}")
        with Horizontal(id="charts"):
            yield LatencyChart(id="prefill-chart")
            yield LatencyChart(id="decode-chart")

    def set_tall(self, tall: bool) -> None:
        """Adapt to a tall screen."""
        for chart in self.query(LatencyChart):
            chart.set_margins(tall=tall)

    def release(self) -> None:
        """Let the keys zoom again after the mouse."""
        for chart in self.query(LatencyChart):
            chart.release()
        self._painted = None

    def paint(self, state: ViewState) -> None:
        """Show the state."""
        run_state, shown = state.run_state, state.shown
        count = f"{run_state.done} / {run_state.total or '?'}"
        share = run_state.done / run_state.total if run_state.total else 0.0
        self._paint_gauge("total", "Total Progress", share, count, run_state.bad, state.dark)
        label = "Batch Progress" if shown and shown.step.kind == "batch" else "Step Progress"
        share, count = (shown.share or 0.0, counted(shown)) if shown else (0.0, "")
        self._paint_gauge("step", label, share, count, bool(shown and shown.bad), state.dark)
        all_panels = [state.metrics.panels(step) for step in run_state]
        key = (all_panels, shown, state.zoom, state.dark)
        if key == self._painted:
            return  # the rest costs a hundred times as much
        self._painted = key
        found = state.metrics.panels(shown) if shown is not None else None
        index = run_state.steps.index(shown) if shown is not None else 0
        style = step_color(index, state.dark)
        for kind in ("prefill", "decode"):
            panel: StepPanel = getattr(found, kind) if found is not None else _EMPTY
            heading = panel.heading or kind.capitalize()
            self._paint_statistics(kind, heading, panel)
            drawing = self.query_one(f"#{kind}-histogram", DrawnText)
            drawing.border_title = heading_of_histogram(panel, heading)
            zoom = min(state.zoom, histogram.HISTOGRAM_ZOOM)
            draw = partial(histogram.draw_histogram, panel.values, style=style, zoom=zoom)
            drawing.show(partial(draw, unresolved=panel.unresolved))
            self._paint_chart(kind, heading, state)

    def _paint_gauge(
        self, name: str, label: str, share: float, count: str, bad: bool, dark: bool
    ) -> None:
        key = (label, share, count, bad, dark)
        draw = partial(draw_gauge, label, share, count, *gauge_styles(bad, dark))
        self.query_one(f"#{name}", DrawnText).show(draw, key)

    def _paint_statistics(self, kind: str, heading: str, panel: StepPanel) -> None:
        drawing = self.query_one(f"#{kind}-statistics", DrawnText)
        drawing.border_title = heading
        drawing.show(partial(statistics, panel))

    def _paint_chart(self, kind: str, heading: str, state: ViewState) -> None:
        chart = self.query_one(f"#{kind}-chart", LatencyChart)
        series, axis = [], "ms"
        for index, step in enumerate(state.run_state):
            found = state.metrics.panels(step)
            if found is None:
                continue
            panel: StepPanel = getattr(found, kind)
            axis = panel.axis
            series.append(
                ChartSeries(
                    panel.latency,
                    panel.throughput,
                    step_color(index, state.dark),
                    chosen=step is state.shown,
                )
            )
        chart.border_title = f"{heading}: tokens/s over {axis}"
        chart.show(series, state.zoom)


def counted(step: StepState) -> str:
    """The progress of a step: runs or requests, or seconds if they limit it."""
    if step.record is not None:
        done = len(step.batches) or len(step.requests)
        return f"{done} / {done}"
    seen = step.progress
    if seen is None:
        return ""
    if seen.expected:
        return f"{seen.done} / {seen.expected}"
    if step.step.seconds:
        return f"{seconds(seen.elapsed)} / {seconds(step.step.seconds)}"
    return str(seen.done)


def heading_of_histogram(panel: StepPanel, heading: str) -> str:
    """The heading of a histogram."""
    *_, newest = panel.columns
    names_its_latency = panel.axis != "ms"
    return newest if names_its_latency else f"{heading} {newest}"


def statistics(panel: StepPanel, width: int, height: int) -> Text:
    """Draw latencies, a column each, and throughput."""
    text = Text(no_wrap=True, overflow="crop")
    heads = "".join(f"{head:>{_COLUMN}}" for head in panel.columns)
    text.append(f"{'':{_LABEL}}{heads}\n", style="dim")
    for label, name in _ROWS:
        cells = "".join(_cell(summary, name) for summary in panel.columns.values())
        text.append(f"{label:<{_LABEL}}", style="dim")
        text.append(f"{cells}\n")
    rate = panel.rate
    if rate is None:
        for label, number in panel.counts.items():
            digits = 0 if number == int(number) else 2
            text.append(f"{label:<{_LABEL + 1}}", style="dim")
            text.append(f"{fitted(number, _COLUMN - 2, digits):>{_COLUMN - 1}}\n")
    elif height >= 11:
        text.append(f"{'':{_LABEL}}{'tokens/s':>{_COLUMN}}\n", style="dim")
        for label, name in _ROWS[:3]:
            text.append(f"{label:<{_LABEL}}", style="dim")
            text.append(f"{_cell(rate, name)}\n")
    else:
        text.append("tokens/s", style="dim")
        text.append(f"{_cell(rate, 'mean')}\n")
        text.append(f"{fitted(rate.minimum, 7)} – {fitted(rate.maximum, 7)}", style="dim")
    text.rstrip()
    return text


def _cell(summary: Summary | None, name: str) -> str:
    value = None if summary is None else getattr(summary, name)
    return f"{fitted(value, _COLUMN - 1):>{_COLUMN}}"
