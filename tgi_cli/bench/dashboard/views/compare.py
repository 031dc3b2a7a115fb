"""The fifth view: this run beside another, with a verdict for each figure."""

from __future__ import annotations

import asyncio

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from tgi_cli.bench.compare import ComparedMetric, Comparison, compare
from tgi_cli.bench.dashboard.formatting import error_style, fitted, warning_style
from tgi_cli.bench.dashboard.views import ViewState
from tgi_cli.bench.events import BenchRun
from tgi_cli.bench.statistics import METRICS


class CompareView(VerticalScroll):
    """The table; computed once, when it is first seen and the run is over."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._of: tuple[BenchRun, BenchRun] | None = None
        self._found: Comparison | None = None
        self._painted: object = None

    def compose(self) -> ComposeResult:
        """Textual's."""
        yield Static(id="comparison", markup=False)

    def paint(self, state: ViewState) -> None:
        """Show this moment."""
        run, other = state.run_state.run, state.other
        key = (run is None, self._of is None, self._found is None, self.size.width, state.dark)
        if key == self._painted:
            return
        self._painted = key
        if other is None:
            text = Text("Nothing to compare with: open this run with another, saved one.", "dim")
        elif run is None:
            text = Text("The comparison comes when the run is over.", style="dim")
        elif self._found is not None:
            text = draw_comparison(self._found, self.size.width - 1, dark=state.dark)
        else:
            text = Text("comparing ...", style="dim")
            if self._of is None:
                self._of = (other, run)
                self.run_worker(self._compare(state, other, run))
        self.query_one("#comparison", Static).update(text)

    async def _compare(self, state: ViewState, before: BenchRun, after: BenchRun) -> None:
        self._found = await asyncio.to_thread(compare, before, after)
        self.paint(state)


def draw_comparison(found: Comparison, width: int, *, dark: bool = True) -> Text:
    """A line for each figure: before, after, the change and its interval, the verdict."""
    text = Text(no_wrap=True, overflow="crop")
    label = min(max(width - 57, 16), 40)
    heads = f"{'':{label}}{'before':>10}{'after':>10}{'change':>9}  {'99 % interval':<18}verdict"
    styles = {"better": "bold #1f8a4c" if not dark else "bold #87d787", "worse": error_style(dark)}
    step = ""
    for row in found.rows:
        if row.step != step:
            step = row.step
            text.append(f"{step:<{label}}"[:label], style="bold")
            text.append(f"{heads[label:]}\n", style="dim")
        text.append(f"{name_of(row, label - 1):<{label}}")
        text.append(f"{fitted(row.a, 9):>10}{fitted(row.b, 9):>10}{change(row.ratio):>9}")
        text.append(f"  {change(row.low)} – {change(row.high)}".ljust(20), style="dim")
        text.append(f"{row.verdict}\n", style=styles.get(row.verdict, "dim"))
    if not found.rows:
        text.append("The runs have no step in common.\n", style=warning_style(dark))
    text.append("\n")
    worse = len(found.regressions)
    if worse:
        text.append(f"{worse} of {len(found.rows)} figures are worse.\n", style=styles["worse"])
    elif found.rows:
        text.append("No figure is worse.\n", style=styles["better"])
    for note in (*found.unmatched, *found.notes):
        text.append(f"! {note}\n", style=warning_style(dark))
    text.rstrip()
    return text


def name_of(row: ComparedMetric, width: int) -> str:
    """A figure's label, which of its statistics, and its unit where there is room for it."""
    metric = METRICS.get(row.metric)
    if metric is None:
        return row.metric[:width]
    name = f"{metric.label} {row.statistic}"
    whole = f"{name}, {metric.unit}"
    return whole if len(whole) <= width else name[:width]


def change(ratio: float) -> str:
    """A ratio as a change in at most eight columns: +12.3 %, +123 %, x12, > x1000."""
    percent = (ratio - 1) * 100
    if ratio >= 1000:
        return "> x1000"
    if percent >= 1000:
        return f"x{ratio:.0f}"
    return f"{percent:+.1f} %" if abs(percent) < 99.95 else f"{percent:+.0f} %"
