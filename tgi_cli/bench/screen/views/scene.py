"""What every view is painted from."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_cli.bench.records import Run
from tgi_cli.bench.screen.board import Board, StepState
from tgi_cli.bench.screen.figures import Figures
from tgi_cli.bench.screen.poller import History


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
