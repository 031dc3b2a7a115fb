"""The views of the dashboard: their names, options and common state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tgi_cli.bench.dashboard.metrics import MetricsCache
from tgi_cli.bench.dashboard.poller import ServerHistory
from tgi_cli.bench.dashboard.run_state import Emit, RunState, ScreenTitle, StepState, Url
from tgi_cli.bench.events import BenchRun

ViewName = Literal["steps", "percentiles", "requests", "server", "compare"]
VIEWS: tuple[ViewName, ...] = ("steps", "percentiles", "requests", "server", "compare")
"""Names of the views in the order of their keys, 1 to 5."""


@dataclass(frozen=True, slots=True)
class ViewState:
    """The state that views are painted from.

    Attributes:
        shown: The step whose tab is active, or None before the first.
        zoom: Zoom level, at least 0.
        dark: Whether the background is dark.
        history: Metrics of the server, or None without a URL.
        other: A saved run to compare with.
    """

    run_state: RunState
    metrics: MetricsCache
    shown: StepState | None
    zoom: int = 0
    dark: bool = True
    history: ServerHistory | None = None
    other: BenchRun | None = None


@dataclass(frozen=True, kw_only=True)
class ScreenOptions:
    """What a screen shows.

    Attributes:
        start: Does the run, in a thread of its own. It calls ``emit``, from any thread, with each
            event, and with lines of text before the first event. It returns the whole run, also
            after ``stop``. The screen shows its errors, and raises them again after the terminal
            is restored.
        stop: Asks the run to end soon. The screen's thread calls it when the user quits; a second
            q leaves at once, without the run.
        run: A saved run, instead of ``start``.
        model: Returns the model's name once the server has reported it, an empty string before.
        url: The measured server; the server view reads its ``/metrics``, with ``headers``.
        other: A saved, earlier run to compare with.
        slo: Limits by metric in ms. Default: those of ``run``.
        svg: File for a picture of the last screen.
        first: View to open.
        step: Number of the step to show.
    """

    title: ScreenTitle
    start: Callable[[Emit], BenchRun] | None = None
    stop: Callable[[], None] | None = None
    run: BenchRun | None = None
    model: Callable[[], str] = str
    url: Url = None
    headers: Mapping[str, str] | None = None
    other: BenchRun | None = None
    slo: Mapping[str, float] | None = None
    svg: Path | None = None
    first: ViewName = "steps"
    step: int = 0
