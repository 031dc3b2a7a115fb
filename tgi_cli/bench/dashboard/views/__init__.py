"""What every view is painted from."""

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
    """One moment.

    Attributes:
        shown: the step whose tab is active; None before the first.
        zoom: how often ``+`` was pressed more than ``-``, at least 0.
        dark: whether the background is.
        history: of the server; None where there is no URL to ask.
        other: a saved run to compare with.
    """

    run_state: RunState
    figures: MetricsCache
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
            event, and with a line of text for what it waits for before the first event. It returns
            the whole run, also after ``stop``. The screen shows what it raises, and raises it
            again after the terminal is restored.
        stop: Asks the run to end soon. The screen's thread calls it when the user quits; a second
            q leaves at once, without the run.
        run: A saved run, instead of ``start``.
        url: The server measured, whose ``/metrics`` the server view reads, with ``headers``.
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
    url: Url = None
    headers: Mapping[str, str] | None = None
    other: BenchRun | None = None
    slo: Mapping[str, float] | None = None
    svg: Path | None = None
    first: ViewName = "steps"
    step: int = 0
