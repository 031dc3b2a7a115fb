"""What every view is painted from."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_cli.bench.dashboard.metrics import Figures
from tgi_cli.bench.dashboard.poller import History
from tgi_cli.bench.dashboard.run_state import Board, StepState
from tgi_cli.bench.events import Run


@dataclass(frozen=True, slots=True)
class Scene:
    """One moment.

    Attributes:
        shown: the step whose tab is active; None before the first.
        zoom: how often ``+`` was pressed more than ``-``, at least 0.
        dark: whether the background is.
        history: of the server; None where there is no URL to ask.
        other: a saved run to compare with.
    """

    board: Board
    figures: Figures
    shown: StepState | None
    zoom: int = 0
    dark: bool = True
    history: History | None = None
    other: Run | None = None
