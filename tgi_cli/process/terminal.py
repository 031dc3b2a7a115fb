"""The terminal's width."""

from __future__ import annotations

import os
import sys

FALLBACK = 80


def terminal_width() -> int:
    """Columns of the terminal: COLUMNS, else of the first standard stream that is one, else 80.

    The output of a command that is piped into a pager still ends up on the terminal, which stderr
    or stdin knows.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    for stream in (sys.__stdout__, sys.__stderr__, sys.__stdin__):
        try:
            found = os.get_terminal_size(stream.fileno()).columns if stream is not None else 0
        except (OSError, ValueError):
            continue
        if found > 0:
            return found
    return FALLBACK
