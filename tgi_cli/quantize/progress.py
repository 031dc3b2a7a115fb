"""How far a quantization is: a bar with the time left on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)

_INTERVAL = 30.0
"""Seconds between two lines."""


class BlockProgress:
    """Blocks that are done, of how many; a context manager, since a bar has to be cleared up.

    Args:
        shown: a bar; None: if stderr is a terminal.
        json_output: log lines in any case.
    """

    def __init__(self, shown: bool | None = None, json_output: bool = False) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._said = time.monotonic()
        self._done, self._total, self._title = 0.0, 0, ""
        self._began, self._first = time.monotonic(), 0.0
        if json_output or not (sys.stderr.isatty() if shown is None else shown):
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("blocks,"),
            TimeElapsedColumn(),
            TextColumn("gone,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=Console(stderr=True),
            transient=True,
        )

    def start(self, title: str, total: int, done: int = 0) -> None:
        """A new phase of ``total`` blocks begins, of which some are done already."""
        self._title, self._total, self._done = title, total, float(done)
        self._began, self._first = time.monotonic(), float(done)
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._bar.start()
            self._task = self._bar.add_task(title, total=total, completed=done)

    def advance(self, blocks: float) -> None:
        """So much more is done."""
        self._done += blocks
        if self._bar is not None:
            self._bar.update(self._task, completed=min(self._done, self._total))
        elif time.monotonic() - self._said > _INTERVAL:
            self._said = time.monotonic()
            gone = self._done - self._first
            left = (self._total - self._done) * (self._said - self._began) / max(gone, 1e-9)
            log.info(
                "%s: %.1f of %d blocks, %.0f s left", self._title, self._done, self._total, left
            )

    def reached(self, done: int) -> None:
        """Exactly so many are done."""
        self.advance(done - self._done)

    def __enter__(self) -> BlockProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
