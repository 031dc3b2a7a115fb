"""Progress of long tasks on stderr: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Any, Self

from tgi_cli.process.units import format_duration, format_size

log = logging.getLogger(__name__)

_REFRESH_PER_SECOND = 4
"""Redraws of the bar. Each takes the interpreter lock from the thread that does the work."""


INTERVAL_VARIABLE = "TGI_PROGRESS_INTERVAL"
"""Environment variable with the seconds between log lines, for a parent process that draws a bar
of its own from the log."""


class ProgressReporter:
    """Reports how much of a task is done. Any thread may call any method.

    Args:
        unit: What is counted: "bytes", or a plural noun such as "blocks".
        show_bar: Whether to show a bar. Default: if stderr is a terminal.
        log_interval: Seconds between log lines where no bar is shown, or None for no lines.
        delay: Seconds before the bar appears.
        transient: Whether to erase the bar at the end.

    Attributes:
        show_bar: Whether a bar is shown.
    """

    def __init__(
        self,
        unit: str = "bytes",
        *,
        show_bar: bool | None = None,
        log_interval: float | None = 10.0,
        delay: float = 0.0,
        transient: bool = False,
    ) -> None:
        self.show_bar = sys.stderr.isatty() if show_bar is None else show_bar
        self._unit = unit
        variable = os.environ.get(INTERVAL_VARIABLE)
        self._log_interval = float(variable) if variable and log_interval else log_interval
        self._delay = delay
        self._transient = transient
        self._lock = threading.RLock()
        self._title, self._note = "", ""
        self._total, self._completed, self._initial = 0.0, 0.0, 0.0
        self._began = 0.0
        self._bar: Any = None
        self._task: Any = None
        self._diverted: list[logging.StreamHandler[Any]] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, title: str, total: float, completed: float = 0) -> None:
        """Begin a task, which replaces the previous one; ``completed`` units are done already."""
        with self._lock:
            self._title, self._note = title, ""
            self._total, self._completed, self._initial = total, completed, completed
            self._began = time.monotonic()
            if self._task is not None:
                self._bar.remove_task(self._task)
                self._task = None
            self._draw()
        if not self.show_bar and self._log_interval is not None and self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._log_lines, name="progress", daemon=True)
            self._thread.start()

    def advance(self, count: float, note: str | None = None) -> None:
        """Add ``count`` to the completed units; a negative count takes some back."""
        with self._lock:
            self.update(self._completed + count, note=note)

    def update(self, completed: float, total: float | None = None, note: str | None = None) -> None:
        """Set the completed units, and the total and the note after the bar unless None."""
        with self._lock:
            self._completed = completed
            if total is not None:
                self._total = total
            if note is not None:
                self._note = note
            self._draw()

    def stop(self) -> None:
        """Remove the bar or end the log lines. May be called twice."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = self._task = None
            for handler in self._diverted:
                handler.setStream(sys.stderr)
            self._diverted = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def line(self) -> str:
        """The progress as one log line."""
        with self._lock:
            completed, total, note = self._completed, self._total, self._note
            done = max(completed - self._initial, 0)
            speed = done / max(time.monotonic() - self._began, 1e-9)
        left = f"{format_duration((total - completed) / speed)} left" if speed > 0 else "waiting"
        if self._unit == "bytes":
            amount = f"{format_size(completed)} of {format_size(total)}"
            left = f"{format_size(speed)}/s, {left}"
        else:
            amount = f"{completed:.1f}".removesuffix(".0") + f" of {total:.0f} {self._unit}"
        parts = [f"{amount} ({completed / max(total, 1):.0%})", note, left]
        return f"{self._title}: " + ", ".join(filter(None, parts))

    def _log_lines(self) -> None:
        while not self._stopped.wait(self._log_interval):
            if self._total:
                log.info("%s", self.line())

    def _draw(self) -> None:
        if not self.show_bar or time.monotonic() - self._began < self._delay:
            return
        if self._bar is None:
            self._start_bar()
        if self._task is None:
            self._task = self._bar.add_task(
                self._title, total=self._total, completed=self._completed, note=self._note
            )
        completed = min(self._completed, self._total)
        self._bar.update(self._task, total=self._total, completed=completed, note=self._note)

    def _start_bar(self) -> None:
        from rich import progress
        from rich.console import Console
        from rich.file_proxy import FileProxy

        if self._unit == "bytes":
            amount = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
        else:
            amount = [progress.MofNCompleteColumn(), progress.TextColumn(self._unit)]
        console = Console(stderr=True)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            *amount,
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[note]}"),
            console=console,
            refresh_per_second=_REFRESH_PER_SECOND,
            transient=self._transient,
        )
        # The bar redraws its line: a log record written past it would tear both.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                handler.setStream(FileProxy(console, sys.stderr))
                self._diverted.append(handler)
        self._bar.start()
