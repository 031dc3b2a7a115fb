"""Shows an answer while it arrives: rendered Markdown on a terminal, plain text on a dumb one."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from tgi_cli.chat.live_region import LiveRegion
from tgi_cli.chat.markdown import (
    Line,
    MarkdownBlock,
    line_text,
    printable,
    render_block,
    split_blocks,
)
from tgi_cli.chat.reasoning_tags import SplitText
from tgi_cli.chat.stream_parser import AnswerPart

_DIM = Style(dim=True)
_THOUGHT = Style(dim=True, italic=True)
_SHOWN_THOUGHTS = 4
"""Lines of reasoning that are shown while it arrives."""
_THOUGHT_TAIL = 4000
"""Characters of reasoning that are wrapped for these lines."""
_MIN_SECONDS = 0.05
"""Least interval of redraws, which also take at most a quarter of the time."""
_MIN_LINES = 4
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ASCII_SPINNER = "|/-\\"
_FRAMES_PER_SECOND = 10


class AnswerView(Protocol):
    """Shows one answer."""

    def add(self, part: AnswerPart, split: SplitText) -> None:
        """Take a part of the answer, whose content is split into content and reasoning."""

    def refresh(self) -> None:
        """Redraw what has changed, if it is time; called several times a second."""

    def notice(self, text: str) -> None:
        """Show a line beside the answer."""

    def finish(self) -> None:
        """Show all that has arrived for good."""


class PlainAnswer:
    """Writes the text as it arrives, for terminals that cannot move their cursor."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_written = ""
        self._thinking = self._answering = False

    def add(self, part: AnswerPart, split: SplitText) -> None:
        if (part.reasoning or split.reasoning) and not self._thinking:
            self._thinking = True
            self._write("(thinking)\n")
        text = printable(split.content)
        text = text if self._answering else text.lstrip("\n")
        self._answering = self._answering or bool(text)
        self._write(text)

    def refresh(self) -> None:
        pass

    def notice(self, text: str) -> None:
        self._write(f"({text})\n")

    def finish(self) -> None:
        if self._last_written and not self._last_written.endswith("\n"):
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._console.file.write(text)
            self._console.file.flush()
            self._last_written = text


class TerminalAnswer:
    """Renders Markdown while it arrives.

    Blocks that can no longer change are written for good. The last one is redrawn; lines by which
    it outgrows half the screen are written for good, too, but for tables, whose columns change
    with every row.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._region = LiveRegion(console)
        self._began = time.monotonic()
        self._changed = True
        self._drawn_at = self._cost = 0.0
        self._settled: list[Line] = []
        self._pending = ""
        self._last_kind = ""
        self._written_lines = self._written_chars = self._written_width = 0
        self._thoughts = ""
        self._thinking_since: float | None = None
        frames = _SPINNER if console.encoding.startswith("utf") else _ASCII_SPINNER
        self._frames = frames

    def add(self, part: AnswerPart, split: SplitText) -> None:
        """See :class:`AnswerView`."""
        reasoning = part.reasoning + split.reasoning
        if split.was_reasoning:
            self._pending, self._written_lines, self._written_chars = "", 0, 0
            self._thinking_since = self._began
        elif reasoning and self._thinking_since is None:
            self._settle_all()
            self._thinking_since = time.monotonic()
        if reasoning:
            self._thoughts = (self._thoughts + printable(reasoning))[-_THOUGHT_TAIL:]
        content = printable(split.content)
        if content.strip():
            self._fold()
        if not self._pending:
            content = content.lstrip("\n")
        self._pending += content
        self._changed = self._changed or bool(content or reasoning)

    def refresh(self) -> None:
        """See :class:`AnswerView`."""
        now = time.monotonic()
        waiting = not self._pending.strip()  # its clock is shown
        pause = max(_MIN_SECONDS, 3 * self._cost, waiting / _FRAMES_PER_SECOND)
        if (self._changed or waiting) and now - self._drawn_at >= pause:
            self._draw()
            self._drawn_at = time.monotonic()
            self._cost = self._drawn_at - now

    def notice(self, text: str) -> None:
        """See :class:`AnswerView`."""
        self._settled.append([Segment(printable(text), _DIM)])
        self._draw()

    def finish(self) -> None:
        """See :class:`AnswerView`."""
        self._fold()
        self._settle_all()
        self._region.draw([], self._taken())

    def _draw(self) -> None:
        self._changed = False
        live = self._live()  # which may settle lines
        self._region.draw(live, self._taken())

    def _taken(self) -> list[Line]:
        settled, self._settled = self._settled, []
        return settled

    def _live(self) -> list[Line]:
        """The lines that may still change."""
        if self._thinking_since is not None:
            return self._thinking_lines(self._thinking_since)
        if not self._pending.strip():
            return [[Segment(f"{self._frame()} {self._seconds(self._began)}", _DIM)]]
        *done, last = split_blocks(self._pending) or [MarkdownBlock("", self._pending, 0)]
        for block in done:
            self._settle(block)
        if done:
            rest = self._pending.split("\n")[sum(block.num_lines for block in done) :]
            self._pending = "\n".join(rest)
        lines = self._rendered(last)
        most = max(_MIN_LINES, self._console.height // 2)
        if len(lines) <= most:
            return lines
        if last.kind != "table_open":
            self._write_for_good(lines[:-most])
        return lines[-most:]

    def _settle_all(self) -> None:
        """Settle everything that has arrived."""
        for block in split_blocks(self._pending):
            self._settle(block)
        self._pending = ""

    def _settle(self, block: MarkdownBlock) -> None:
        self._settled += self._rendered(block)
        self._written_lines = self._written_chars = 0
        self._last_kind = block.kind

    def _rendered(self, block: MarkdownBlock) -> list[Line]:
        """The lines of a block that are not written yet, with an empty one before the block."""
        width = self._console.width
        lines = render_block(block, self._console, width)
        if self._last_kind and not block.follows_closely(self._last_kind):
            lines.insert(0, [])
        if not self._written_lines:
            return lines
        if width != self._written_width:
            # Wrapped again: a line that is only partly written is written again.
            count, chars = 0, 0
            for line in lines:
                chars += _num_chars(line)
                if chars > self._written_chars:
                    break
                count += 1
            self._written_lines, self._written_width = count, width
        return lines[self._written_lines :]

    def _write_for_good(self, lines: list[Line]) -> None:
        """Settle lines of the last block."""
        self._settled += lines
        self._written_lines += len(lines)
        self._written_chars += sum(map(_num_chars, lines))
        self._written_width = self._console.width

    def _fold(self) -> None:
        """Replace the lines of the reasoning by one that says how long it took."""
        if self._thinking_since is not None:
            text = f"thought for {self._seconds(self._thinking_since)} (/thinking shows it)"
            self._settled += [[Segment(text, _DIM)], []]
            self._thinking_since, self._thoughts, self._last_kind = None, "", ""
            self._changed = True

    def _thinking_lines(self, since: float) -> list[Line]:
        width = max(self._console.width - 2, 1)
        wrapped = Text(self._thoughts.strip()).wrap(self._console, width)[-_SHOWN_THOUGHTS:]
        first: Line = [Segment(f"{self._frame()} thinking {self._seconds(since)}", _DIM)]
        return [first, *([Segment(f"  {line.plain.rstrip()}", _THOUGHT)] for line in wrapped)]

    def _frame(self) -> str:
        return self._frames[int(time.monotonic() * _FRAMES_PER_SECOND) % len(self._frames)]

    @staticmethod
    def _seconds(since: float) -> str:
        return f"{time.monotonic() - since:.1f} s"


def _num_chars(line: Line) -> int:
    """Characters of a line without its spaces, whose number depends on the width."""
    return len("".join(line_text(line).split()))
