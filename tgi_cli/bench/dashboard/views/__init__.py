"""What every view is painted from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tgi_cli.bench.dashboard.metrics import MetricsCache
from tgi_cli.bench.dashboard.poller import ServerHistory
from tgi_cli.bench.dashboard.run_state import RunState, StepState
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

    board: RunState
    figures: MetricsCache
    shown: StepState | None
    zoom: int = 0
    dark: bool = True
    history: ServerHistory | None = None
    other: BenchRun | None = None
