"""The third view: a timeline of all requests."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from tgi_cli.bench.dashboard.charts import RoundTicks
from tgi_cli.bench.dashboard.formatting import error_style, seconds, step_color
from tgi_cli.bench.dashboard.metrics import PAUSE
from tgi_cli.bench.dashboard.run_state import StepState, error_of
from tgi_cli.bench.dashboard.views import ViewState
from tgi_cli.bench.dashboard.widgets import DrawnText
from tgi_cli.bench.events import BatchRecord, BenchRequestRecord, StepRecord

_LEFT = 8
_RIGHT = 17
_QUEUED, _PREFILL, _DECODE = "·", "▒", "█"
MAX_ZOOM = 12


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One request, or one run of a batch; seconds from the start of the step.

    Attributes:
        due, sent, first, last: When it was due, was sent, had its first token (``last`` if it had
            none) and ended.
    """

    label: str
    due: float
    sent: float
    first: float
    last: float
    tokens: int
    error: str = ""
    warmup: bool = False


def rows_of(record: StepRecord) -> list[TimelineRow]:
    """The rows in the order in which requests were due; runs of a batch end to end."""
    if record.batches and not record.requests:
        return _runs(record.batches)
    requests = sorted(record.requests, key=lambda request: (request.scheduled, request.index))
    return [_row(request) for request in requests]


def _row(request: BenchRequestRecord) -> TimelineRow:
    return TimelineRow(
        label=f"#{request.index}",
        due=request.scheduled,
        sent=request.dispatched,
        first=request.arrivals[0] if request.arrivals else request.finished,
        last=request.finished,
        tokens=request.output_tokens,
        error=error_of(request) if request.error is not None else "",
        warmup=request.warmup,
    )


def _runs(batches: list[BatchRecord]) -> list[TimelineRow]:
    rows = []
    now = 0.0
    for number, batch in enumerate(batches):
        first = now + batch.prefill
        last = first + sum(batch.decodes)
        tokens = batch.batch_size * (len(batch.decodes) + 1)
        rows.append(
            TimelineRow(f"run {number}", now, now, first, last, tokens, warmup=batch.warmup)
        )
        now = last
    return rows


class RequestsView(Vertical):
    """The timeline and its axis. ``+`` and ``-`` zoom the time, from the topmost row on."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._painted: tuple[object, ...] = ()
        self._next = 0.0

    def _same(self, key: tuple[object, ...]) -> bool:
        """Whether only the step's requests have changed."""
        return (*key[:1], *key[2:]) == (*self._painted[:1], *self._painted[2:])

    def compose(self) -> ComposeResult:
        """Implement Textual's hook."""
        yield DrawnText(id="axis")
        yield Timeline(id="timeline")
        yield DrawnText(id="legend")

    def paint(self, state: ViewState) -> None:
        """Show the state."""
        shown = state.shown
        key = (shown, shown.version if shown is not None else 0, state.zoom, state.dark)
        running = shown is not None and shown.record is None
        if running and time.monotonic() < self._next and self._same(key):
            return  # laying out all rows ten times per second is too expensive
        self._next = time.monotonic() + PAUSE
        timeline = self.query_one("#timeline", Timeline)
        if key != self._painted:
            self._painted = key
            timeline.show(state)
        self.query_one("#axis", DrawnText).show(lambda width, _: timeline.axis(width), key)
        self.query_one("#legend", DrawnText).show(lambda width, _: timeline.legend(), key)


class Timeline(ScrollView, can_focus=True):
    """Draws only the visible rows."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._rows: list[TimelineRow] = []
        self._shown: StepState | None = None
        self._end = 1.0
        self._zoom = 0
        self._style = ""
        self._error = ""

    def show(self, state: ViewState) -> None:
        """Show a step; a running one is followed unless it was scrolled up."""
        step = state.shown
        following = self.scroll_offset.y >= self.max_scroll_y and step is not None
        another = step is not self._shown
        self._shown = step
        self._rows = [] if step is None else rows_of(step.snapshot())
        self._end = max((row.last for row in self._rows), default=1.0) or 1.0
        self.virtual_size = Size(self.size.width, len(self._rows))
        if another:
            self.scroll_to(y=0, animate=False)
        if following and step is not None and step.record is None:
            self.scroll_end(animate=False)
        index = state.run_state.steps.index(step) if step is not None else 0
        self._style = step_color(index, state.dark)
        self._error = error_style(state.dark)
        self._zoom = min(state.zoom, MAX_ZOOM)
        self.refresh()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Begin the axis at the topmost row."""
        super().watch_scroll_y(old_value, new_value)
        if self._zoom and self.parent is not None:
            self.parent.query_one("#axis", DrawnText).refresh()

    @property
    def window(self) -> tuple[float, float]:
        """The visible part of the step's time, in seconds."""
        length = self._end / 2**self._zoom
        if not self._zoom or not self._rows:
            return 0.0, length
        top = min(self.scroll_offset.y, len(self._rows) - 1)
        begin = min(self._rows[top].due, self._end - length)
        return begin, begin + length

    def axis(self, width: int) -> Text:
        """Draw the time axis."""
        space = max(width - _LEFT - _RIGHT - self.scrollbar_size_vertical, 10)
        low, high = self.window
        ticks = RoundTicks()
        ticks.most = max(space // 12, 1)
        ticks_at, labels = ticks.get_ticks_and_labels(low, high)
        line = [" "] * (space + _RIGHT)
        for tick, label in zip(ticks_at, labels, strict=True):
            at = int((tick - low) / (high - low) * space)
            for offset, letter in enumerate(f"╷{label} s"):
                if at + offset < len(line):
                    line[at + offset] = letter
        return Text(" " * _LEFT + "".join(line), style="dim", no_wrap=True)

    def legend(self) -> Text:
        """Draw the legend."""
        text = Text(f"{len(self._rows)} rows   ", no_wrap=True)
        for letter, meaning in (
            (_QUEUED, "due"),
            (_PREFILL, "to first token"),
            (_DECODE, "decode"),
        ):
            text.append(letter * 2, style=self._style)
            text.append(f" {meaning}   ")
        text.append("✕", style=self._error)
        text.append(" failed")
        return text

    def render_line(self, y: int) -> Strip:
        """Implement Textual's hook."""
        width = self.scrollable_content_region.width
        index = y + self.scroll_offset.y
        if index >= len(self._rows):
            return Strip.blank(width, self.rich_style)
        segments = self._segments(self._rows[index], width)
        strip = Strip(segments).adjust_cell_length(width, self.rich_style)
        return strip.apply_style(self.rich_style)

    def _segments(self, row: TimelineRow, width: int) -> list[Segment]:
        space = max(width - _LEFT - _RIGHT, 1)
        dim = Style(dim=True)
        style = Style.parse(self._style) if self._style else Style()
        parts = bars(row, *self.window, space)
        label = f"{row.label:>{_LEFT - 1}} "[-_LEFT:]
        if row.error:
            used = len("".join(parts))
            note = f"✕ {row.error}"
            if used + len(note) > space + _RIGHT:
                note = f"{note[: max(space + _RIGHT - used - 1, 1)]}…"
            return [
                Segment(label, dim),
                *(Segment(part, style) for part in parts),
                Segment(note, Style.parse(self._error)),
            ]
        tail = f" {seconds(row.last - row.sent):>8} {row.tokens:>5} t"
        return [
            Segment(label, dim),
            *(Segment(part, style + dim if row.warmup else style) for part in parts),
            Segment(" " * (space - len("".join(parts)))),
            Segment(tail[:_RIGHT], dim),
        ]


def bars(row: TimelineRow, low: float, high: float, space: int) -> tuple[str, str, str, str]:
    """Space, queued, prefill and decode: the cells of a row between two times, at least one."""

    def cell(time: float) -> int:
        return min(max(int((time - low) / (high - low) * space), 0), space)

    due, sent, first = cell(row.due), cell(row.sent), cell(row.first)
    last = cell(row.last)
    if row.last < low or row.due > high:
        return "", "", "", ""
    if not row.error:
        last = max(last, first + 1) if first < space else last
    if last <= due:
        due = sent = first = min(due, space - 1)
        last = due + 1
    last = min(last, space)
    return " " * due, _QUEUED * (sent - due), _PREFILL * (first - sent), _DECODE * (last - first)
