"""The part of a terminal that is redrawn: the lines below all that is written for good.

Rich's Live neither accounts for lines that a narrower terminal has rewrapped nor lets text
leave a region that outgrows the screen.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segments

from tgi_cli.chat.markdown import Line, line_text

_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_ERASE_BELOW = "\x1b[J"


class LiveRegion:
    """Lines at the end of the terminal, of which at most a screen can be redrawn.

    Args:
        console: a terminal that can move its cursor.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._widths: list[int] = []
        self._hidden = False

    def draw(self, live: Sequence[Line], settled: Sequence[Line] = ()) -> None:
        """Replace the region: ``settled`` lines stay above it for good, ``live`` ones are in it."""
        parts = [self._erase()]
        if live and not self._hidden:
            parts.append(_HIDE_CURSOR)
            self._hidden = True
        parts += [self._encode(line) + "\n" for line in settled]
        parts.append("\n".join(map(self._encode, live)))
        self._widths = [cell_len(line_text(line)) for line in live]
        if not live and self._hidden:
            parts.append(_SHOW_CURSOR)
            self._hidden = False
        self._console.file.write("".join(parts))
        self._console.file.flush()

    def _erase(self) -> str:
        """Move to the region's first line, and erase from there on."""
        if not self._widths:
            return ""
        rows = len(self._widths)
        if _wraps_anew():
            columns = max(self._console.width, 1)
            rows = sum(max(1, -(-width // columns)) for width in self._widths)
        up = min(rows, self._console.height) - 1
        return "\r" + (f"\x1b[{up}A" if up else "") + _ERASE_BELOW

    def _encode(self, line: Line) -> str:
        """The line with the escape sequences of the styles that the terminal has."""
        with self._console.capture() as captured:
            self._console.print(Segments(line), end="", soft_wrap=True)
        return captured.get()


def _wraps_anew() -> bool:
    """Whether the terminal rewraps its lines when it becomes narrower: all but xterm do."""
    return "XTERM_VERSION" not in os.environ or "TMUX" in os.environ
