"""The lines of text around the views: head, tabs, message, keys."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from tgi_cli.bench.dashboard import Title
from tgi_cli.bench.dashboard.colours import colour, error_style, warning_style
from tgi_cli.bench.dashboard.run_state import Board, StepState
from tgi_cli.bench.dashboard.views.view_state import Scene
from tgi_cli.bench.dashboard.widgets import Tab


def head(title: Title, state: str, width: int) -> Text:
    """Model, lengths, and at the right how the run is getting on where there is room for it.

    A name that is too long loses its front: the end tells models apart.
    """
    rest = "".join(f" | {detail}" for detail in title.details)
    room = max(width - cell_len(rest), 12)
    model = title.model
    while cell_len(model) > room and model:
        model = "…" + model.lstrip("…")[1:]
    text = Text(no_wrap=True, overflow="crop")
    text.append(model, style="bold")
    text.append(rest)
    gap = width - text.cell_len - cell_len(state)
    if gap >= 2:
        text.append(" " * gap)
        text.append(state, style="dim")
    return cut(text, width)


def state(scene: Scene, leaving: bool, live: bool) -> str:
    """How the run is getting on."""
    board = scene.board
    if leaving:
        return "stopping"
    if board.fatal is not None:
        return "failed"
    if board.run is not None:
        return "over" if live else "saved"
    if board.running is None:
        return "starting" if live else ""
    seen = board.running.progress
    return "running" if seen is None else f"{seen.in_flight} in flight"


def step_tabs(scene: Scene) -> list[Tab]:
    """One for each step, in the colour of its points."""
    return [
        Tab(_one_line(step.label), colour(place, scene.dark), step.bad)
        for place, step in enumerate(scene.board)
    ]


def keys() -> Text:
    """What the keys do, in 22 columns."""
    text = Text(no_wrap=True)
    for key, meaning in (("←→", " step "), ("+-", " zoom "), ("q", " quit")):
        text.append(key, style="bold")
        text.append(meaning)
    return text


def message(scene: Scene, leaving: bool) -> Text:
    """What the user must know now; empty where there is nothing."""
    board, dark = scene.board, scene.dark
    if leaving:
        return Text(
            "stopping: waiting for the run's record; q again leaves at once",
            style=warning_style(dark),
        )
    if board.fatal is not None:
        cause, remedy = board.fatal
        advice = f" ({remedy})" if remedy else ""
        return Text(_one_line(f"failed: {cause}{advice}"), style=error_style(dark))
    if board.error:
        count = f"{board.errors} errors, the newest: " if board.errors > 1 else "error: "
        return Text(_one_line(count + board.error), style=error_style(dark))
    if board.saying:
        return Text(_one_line(board.saying), style="dim")
    notes = _notes(board, scene.shown)
    return Text(_one_line("; ".join(notes)), style=warning_style(dark))


def _notes(board: Board, shown: StepState | None) -> list[str]:
    notes = []
    record = shown.record if shown is not None else None
    if record is not None and record.client.behind:
        reason = record.client.reason or "its clock ticked late"
        notes.append(f"the client was the bottleneck: {reason}")
    if board.run is not None:
        notes += board.run.notes
    return notes


def cut(text: Text, width: int) -> Text:
    """A line that ends in an ellipsis where it does not fit."""
    line = text.copy()
    line.truncate(width, overflow="ellipsis")
    return line


def _one_line(text: str) -> str:
    return " ".join(text.split())
