"""The fourth view: the metrics of the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Grid, Vertical
from textual.widgets import Static

from tgi_cli.bench.dashboard.formatting import error_style, fitted, seconds, short, step_color
from tgi_cli.bench.dashboard.histogram import columns
from tgi_cli.bench.dashboard.poller import ServerHistory, ServerSample
from tgi_cli.bench.dashboard.views import ViewState
from tgi_cli.bench.dashboard.widgets import DrawnText
from tgi_cli.bench.statistics.summary import round_up


@dataclass(frozen=True, slots=True)
class _ServerPlot:
    """A metric over time; ``scale`` converts it to ``unit``, ``top`` is its maximum if known.

    An ``optional`` one is shown only if the server has it. ``parts`` are what the newest value is
    made of, by name, on the same scale.
    """

    name: str
    title: str
    unit: str
    value: Callable[[ServerSample], float | None]
    scale: float = 1.0
    top: float | None = None
    optional: bool = False
    parts: Callable[[ServerSample], Mapping[str, float]] = lambda sample: {}

    def heading(self, newest: ServerSample | None) -> str:
        """The title with the newest value and its parts."""
        value = None if newest is None else self.value(newest)
        shown = "-" if value is None else fitted(value * self.scale, 9, 1)
        parts = {} if newest is None else self.parts(newest)
        more = "".join(f", {name} {fitted(p * self.scale, 5, 0)}" for name, p in parts.items())
        return f"{self.title}: {shown} {self.unit}{more}"


_PLOTS = (
    _ServerPlot("queued", "Queue", "requests", lambda sample: sample.queued),
    _ServerPlot("running", "Batch", "requests", lambda sample: sample.running),
    _ServerPlot("kv", "KV cache", "%", lambda sample: sample.kv, 100.0, 100.0),
    _ServerPlot("hits", "Prefix hits", "%", lambda sample: sample.hits, 100.0, 100.0),
    _ServerPlot("output", "Output", "tokens/s", lambda sample: sample.output),
    _ServerPlot("input", "Prompts", "tokens/s", lambda sample: sample.input),
    _ServerPlot(
        "drafts",
        "Drafts accepted",
        "%",
        lambda sample: sample.accepted,
        100.0,
        100.0,
        optional=True,
        parts=lambda sample: sample.accepted_by_source,
    ),
)


class ServerView(Vertical):
    """Six metrics over time, seven with speculative decoding, or why there are none."""

    def compose(self) -> ComposeResult:
        """Implement Textual's hook."""
        yield Static(id="server-state", markup=False)
        with Grid(id="plots"):
            for plot in _PLOTS:
                yield DrawnText(id=f"plot-{plot.name}")

    def paint(self, state: ViewState) -> None:
        """Show the state."""
        history = state.history
        self.query_one("#plots").display = history is not None
        self.query_one("#server-state", Static).update(state_of(state))
        if history is None:
            return
        key = (history.version, state.dark)
        for index, plot in enumerate(_PLOTS):
            drawing = self.query_one(f"#plot-{plot.name}", DrawnText)
            if plot.optional:
                drawing.display = any(plot.value(one) is not None for one in history.samples)
            drawing.border_title = plot.heading(history.samples[-1] if history.samples else None)
            drawing.show(partial(_drawn, plot, history, step_color(index, state.dark)), key)


def _drawn(plot: _ServerPlot, history: ServerHistory, style: str, width: int, height: int) -> Text:
    """Draw columns over time with their scale."""
    samples = list(history.samples)
    values = [plot.value(sample) for sample in samples]
    if width < 12 or height < 1 or all(value is None for value in values):
        return Text("unavailable", style="dim")
    space = width - 7
    shown = [(value or 0.0) * plot.scale for value in values][-space:]
    top = plot.top or round_up(max(*shown, 1.0), (1, 2, 5))
    lines = columns(shown, space, height, top)
    text = Text(no_wrap=True, overflow="crop")
    for number, line in enumerate(lines):
        label = short(top) if number == 0 else "0" if number == height - 1 else ""
        text.append(f"{label:>6} ", style="dim")
        text.append(line, style=style)
        if number + 1 < height:
            text.append("\n")
    return text


def state_of(state: ViewState) -> Text:
    """The line above the charts; for a saved run, the recorded metrics of the server."""
    history, run = state.history, state.run_state.run
    ended = run is not None and bool(run.target.started_here)
    if history is not None and (history.samples or not ended):
        if history.error and not ended:
            return Text(f"{history.url}: {history.error}", style=error_style(state.dark))
        if not history.samples:
            return Text(f"{history.url}: connecting ...", style="dim")
        span = seconds(history.samples[-1].at - history.samples[0].at)
        if ended:  # with the run
            return Text(f"{history.url}, the last {span} of the run", style="dim")
        return Text(f"{history.url}, the last {span}", style="dim")
    metrics = state.shown.record.server if state.shown and state.shown.record else {}
    if not metrics:
        return Text(
            "No server: this is a saved run, or a shard without HTTP.\n"
            "With --url, and in `tgi bench` of a model, its /metrics are shown here.",
            style="dim",
        )
    text = Text("Server metrics over the step:\n\n")
    longest = max(map(len, metrics))
    for name, value in metrics.items():
        text.append(f"{name:<{longest}}", style="dim")
        text.append(f"  {fitted(value, 12, 3):>12}\n")
    return text
