"""The widgets of all views, and the lines of text around them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import HorizontalScroll, VerticalScroll
from textual.widget import Widget
from textual.widgets import Static, Tab

from tgi_cli.bench.dashboard.formatting import error_style, step_color, warning_style
from tgi_cli.bench.dashboard.run_state import ScreenTitle
from tgi_cli.bench.dashboard.views import ViewState

_MODEL = 20
"""Columns of the first line that the model's name keeps."""

Draw = Callable[[int, int], Text]


class DrawnText(Widget):
    """Text drawn for the size of the widget, by ``draw(width, height)``."""

    DEFAULT_CSS = "DrawnText { text-wrap: nowrap; text-overflow: clip; }"

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._draw: Draw = lambda width, height: Text()
        self._key: object = None

    def show(self, draw: Draw, key: object = None) -> None:
        """Set the function that draws, unless ``key`` is given and unchanged."""
        if key is None or key != self._key:
            self._draw, self._key = draw, key
            self.refresh()

    def render(self) -> Text:
        """Implement Textual's hook."""
        size = self.content_size
        return self._draw(size.width, size.height)


class TextView(VerticalScroll):
    """A text that scrolls; its lines may be as wide as the view less the scroll bar, a column."""

    DEFAULT_CSS = "TextView { scrollbar-size-vertical: 1; }"

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._key: object = None

    def compose(self) -> ComposeResult:
        yield Static(markup=False)

    def show(self, key: object, draw: Callable[[], Text]) -> None:
        """Draw the text, unless ``key`` is unchanged."""
        if key != self._key:
            self._key = key
            self.query_one(Static).update(draw())


class TabRow(HorizontalScroll, can_focus=False):
    """Tabs in one line, scrolled to the active one."""

    DEFAULT_CSS = """
    TabRow { height: 1; scrollbar-size: 0 0; }
    TabRow Tab { color: $foreground; }
    TabRow Tab:hover { text-style: underline; }
    """

    _key: object = None

    def show(self, labels: Sequence[Text], active: int) -> None:
        """Show tabs from left to right."""
        key = ([label.markup for label in labels], active)
        if key == self._key:
            return
        self._key = key
        tabs = list(self.query(Tab))
        for tab in tabs[len(labels) :]:
            tab.remove()
        added = [Tab(label) for label in labels[len(tabs) :]]
        self.mount_all(added)
        for number, (tab, label) in enumerate(zip([*tabs, *added], labels, strict=False)):
            if number == active:
                label.stylize("bold reverse")
                self.scroll_to_widget(tab, animate=False)
            tab.label = label


def draw_gauge(
    label: str, share: float, count: str, style: str, left: str, width: int, height: int
) -> Text:
    """Draw a progress bar with a name, and a count within the bar.

    Args:
        share: Completed share, 0 to 1.
        style, left: Styles of the completed part and of the rest.
    """
    space = width - cell_len(label) - 1
    if space < 4:
        return Text(label)
    bar = Text(count[:space].center(space), left)
    bar.stylize(style, 0, round(space * share))
    return Text.assemble(f"{label} ", bar)


def head_line(title: ScreenTitle, status: str, width: int) -> Text:
    """The model and its details, and the status at the right if it fits.

    A long name loses its beginning, since the end distinguishes models.
    """
    details = list(title.details)
    while len(details) > 1 and sum(cell_len(each) + 3 for each in details) > width - _MODEL:
        details.pop()
    rest = "".join(f" | {detail}" for detail in details)
    space = max(width - cell_len(rest), 12)
    model = title.model
    while cell_len(model) > space and model:
        model = "…" + model.lstrip("…")[1:]
    text = Text(no_wrap=True, overflow="crop")
    text.append(model, style="bold")
    text.append(rest)
    gap = width - text.cell_len - cell_len(status)
    if gap >= 2:
        text.append(" " * gap)
        text.append(status, style="dim")
    return truncated(text, width)


def status_text(state: ViewState, leaving: bool, live: bool) -> str:
    """The status of the run."""
    run_state = state.run_state
    if leaving:
        return "stopping"
    if run_state.fatal is not None:
        return "failed"
    if run_state.run is not None:
        return "finished" if live else "saved"
    if run_state.running is None:
        return "starting" if live else ""
    seen = run_state.running.progress
    return "running" if seen is None else f"{seen.in_flight} in flight"


def step_labels(state: ViewState) -> list[Text]:
    """The labels of the steps' tabs, in the colors of their points."""
    return [
        Text(f"{_one_line(step.label)}!", error_style(state.dark))
        if step.bad
        else Text(_one_line(step.label), step_color(index, state.dark))
        for index, step in enumerate(state.run_state)
    ]


def key_help() -> Text:
    """The help on keys, in 22 columns."""
    text = Text(no_wrap=True)
    for key, meaning in (("←→", " step "), ("?", " keys "), ("q", " quit")):
        text.append(key, style="bold")
        text.append(meaning)
    return text


def message_line(state: ViewState, leaving: bool) -> Text:
    """The current message for the user, or an empty text."""
    run_state, dark = state.run_state, state.dark
    if leaving:
        return Text(
            "stopping: waiting for the run's record; q again leaves at once",
            style=warning_style(dark),
        )
    if run_state.fatal is not None:
        cause, remedy = run_state.fatal
        advice = f" ({remedy})" if remedy else ""
        return Text(_one_line(f"failed: {cause}{advice}"), style=error_style(dark))
    if run_state.error:
        count = f"{run_state.errors} errors, the newest: " if run_state.errors > 1 else "error: "
        return Text(_one_line(count + run_state.error), style=error_style(dark))
    if run_state.waiting_for:
        return Text(_one_line(run_state.waiting_for), style="dim")
    notes = _notes(state)
    return Text(_one_line("; ".join(notes)), style=warning_style(dark))


def _notes(state: ViewState) -> list[str]:
    notes: list[str] = []
    run_state, shown = state.run_state, state.shown
    record = shown.record if shown is not None else None
    panels = state.metrics.panels(shown) if shown is not None else None
    if panels is not None:
        notes += filter(None, (panels.prefill.note, panels.decode.note))
    if record is not None and record.client.behind:
        reason = record.client.reason or "its event loop lagged"
        notes.append(f"the client was the bottleneck: {reason}")
    if run_state.run is not None:
        notes += run_state.run.notes
    return notes


def truncated(text: Text, width: int) -> Text:
    """Cut a line to the width, with an ellipsis."""
    line = text.copy()
    line.truncate(width, overflow="ellipsis")
    return line


def append_notes(text: Text, notes: Iterable[str], width: int, style: str) -> None:
    """Append notes, each from a line of its own on, wrapped to the width."""
    for note in notes:
        lines = textwrap.wrap(f"! {note}", max(width, 20), subsequent_indent="  ")
        text.append("\n".join(lines) + "\n", style=style)


def _one_line(text: str) -> str:
    return " ".join(text.split())
