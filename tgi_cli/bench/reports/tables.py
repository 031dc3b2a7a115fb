"""Tables of markdown, aligned so that they read well as they are."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, merge: bool = False) -> str:
    """A markdown table.

    Args:
        merge: leave a cell empty that says what the one above it says, as TGI's benchmark does.
    """
    shown = _merged(rows) if merge else [list(row) for row in rows]
    shown = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in shown]
    widths = [max(map(len, column)) for column in zip(header, *shown, strict=True)]
    lines = [_line(header, widths)]
    lines.append("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    lines += [_line(row, widths) for row in shown]
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "| " + " | ".join(padded) + " |"


def _merged(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    merged = []
    for number, row in enumerate(rows):
        above = rows[number - 1] if number else [None] * len(row)
        pairs = zip(row, above, strict=True)
        merged.append(["" if cell == upper else cell for cell, upper in pairs])
    return merged
