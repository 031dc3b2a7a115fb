"""What a screen shows, as lines of text."""

from __future__ import annotations

import html
import re

from rich.cells import cell_len

from tgi_cli.bench.dashboard.app import BenchApp

_PIECE = re.compile(
    r'<text class="[^"]*" x="([\d.]+)" y="[\d.]+" textLength="[\d.]+"'
    r' clip-path="url\(#[^)]*-line-(\d+)\)">(.*?)</text>'
)
_COLUMN = 12.2
"""Width of a cell in the pictures."""


def cells(app: BenchApp) -> list[str]:
    """The lines of the screen as it is painted now, without blanks at their ends."""
    return of_picture(app.export_screenshot())


def of_picture(svg: str) -> list[str]:
    """The lines of a picture."""
    lines: dict[int, dict[int, str]] = {}
    for x, row, piece in _PIECE.findall(svg):
        place = round(float(x) / _COLUMN)
        lines.setdefault(int(row), {})[place] = html.unescape(piece).replace("\xa0", " ")
    found = []
    for row in range(max(lines, default=-1) + 1):
        line = ""
        for place, piece in sorted(lines.get(row, {}).items()):
            line += " " * (place - cell_len(line)) + piece
        found.append(line.rstrip())
    return found


def shown(app: BenchApp) -> str:
    """The whole screen as one string."""
    return "\n".join(cells(app))
