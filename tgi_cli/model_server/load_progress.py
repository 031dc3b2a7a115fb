"""How far loading is: a bar on a terminal, a log line every ten seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)

_QUIET_SECONDS = 1.0
"""Loading that is done by then is not worth a bar."""
_LINE_SECONDS = 10.0


class LoadProgress:
    """Told of bytes done and bytes to do; a context manager, since a bar has to be cleared."""

    def __init__(self, json_output: bool) -> None:
        self._terminal = sys.stderr.isatty() and not json_output
        self._next = time.monotonic() + (_QUIET_SECONDS if self._terminal else _LINE_SECONDS)
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() >= self._next:
            if self._terminal:
                self._start_bar(done, total)
            else:
                self._next += _LINE_SECONDS
                log.info("loading: %.1f of %.1f GB", done / 1e9, total / 1e9)

    def _start_bar(self, done: int, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        self._bar = Progress(
            "loading weights",
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("loading", completed=done, total=total)
        self._bar.start()
