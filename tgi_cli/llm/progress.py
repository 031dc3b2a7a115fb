"""How far a call is: requests done, tokens in and out per second, on a terminal's stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_REFRESH_PER_SECOND = 4
"""Drawing takes the interpreter from the engine's loop."""


class RequestProgress:
    """A bar over the requests of one call; a context manager, since it has to be cleared up.

    Args:
        total: requests.
        shown: None: if stderr is a terminal.
    """

    def __init__(self, total: int, shown: bool | None) -> None:
        self._bar: Any = None
        self._task: Any = None
        if not (sys.stderr.isatty() if shown is None else shown):
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[taken]:.0f} tokens/s in, {task.fields[given]:.0f} out"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=_REFRESH_PER_SECOND,
        )
        self._task = self._bar.add_task("requests", total=total, taken=0.0, given=0.0)
        self._began = time.monotonic()
        self._taken = self._given = 0

    def add(self, taken: int, given: int, done: int) -> None:
        """So many more prompt tokens, generated tokens and finished requests."""
        if self._bar is None:
            return
        self._taken += taken
        self._given += given
        seconds = max(time.monotonic() - self._began, 1e-9)
        self._bar.update(
            self._task, advance=done, taken=self._taken / seconds, given=self._given / seconds
        )

    def __enter__(self) -> RequestProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
