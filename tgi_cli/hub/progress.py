"""How far a download is: a bar in bytes on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Any

logger = logging.getLogger(__name__)

INTERVAL = 10.0
"""Seconds between two lines."""


class Progress:
    """Receives what a download does, from several threads, and shows none of it.

    Bytes count what is had, not what was transferred: ``start`` says how much was there already,
    and ``advance`` goes back when a broken file is thrown away.
    """

    def start(self, title: str, total: int, already: int, files: int) -> None:
        """``files`` files of together ``total`` bytes are wanted; ``already`` bytes are there."""

    def advance(self, count: int) -> None:
        """``count`` more bytes arrived."""

    def file_done(self, name: str) -> None:
        """One file came to its end."""

    def finish(self) -> None:
        """Nothing more will come. May be called twice."""

    def as_tqdm(self) -> type:
        """A class with tqdm's face that feeds ``advance``, for libraries that want one."""
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

        progress = self

        class _Feed(tqdm):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                kwargs["disable"] = True
                super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

            def update(self, n: float | None = 1) -> None:
                progress.advance(int(n or 0))

            def update_transfer(self, n: float) -> None:
                """Bytes on the wire, which xet reports beside those written: not shown."""

        return _Feed


class LineProgress(Progress):
    """One log line every ten seconds, for pipes, log collectors and ``--json-output``."""

    def __init__(self, interval: float = INTERVAL) -> None:
        self._interval = interval
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, title: str, total: int, already: int, files: int) -> None:
        self._title, self._total, self._files = title, total, files
        self._had, self._have, self._done = already, already, 0
        self._began = time.monotonic()
        self._over.clear()
        self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)
        self._thread.start()

    def advance(self, count: int) -> None:
        with self._lock:
            self._have += count

    def file_done(self, name: str) -> None:
        with self._lock:
            self._done += 1

    def finish(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _tick(self) -> None:
        while not self._over.wait(self._interval):
            logger.info("%s", self.line())

    def line(self) -> str:
        """Where the download stands, in one line."""
        from tgi_cli.hub.cache import human_bytes

        with self._lock:
            have, done = self._have, self._done
        speed = max(have - self._had, 0) / max(time.monotonic() - self._began, 1e-9)
        left = f"{_clock((self._total - have) / speed)} left" if speed > 0 else "waiting"
        return (
            f"{self._title}: {human_bytes(have)} of {human_bytes(self._total)} "
            f"({have / max(self._total, 1):.0%}), {done} of {self._files} files, "
            f"{human_bytes(speed)}/s, {left}"
        )


class TerminalProgress(Progress):
    """A bar with bytes, speed and time left on stderr; log lines pass above it."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._diverted: list[logging.StreamHandler[Any]] = []
        self._lock = threading.Lock()

    def start(self, title: str, total: int, already: int, files: int) -> None:
        from rich.console import Console
        from rich.file_proxy import FileProxy
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[done]}/{task.fields[files]} files"),
            console=console,
        )
        # The bar redraws its line; a log record written past it would be torn.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                handler.setStream(FileProxy(console, sys.stderr))
                self._diverted.append(handler)
        self._done = 0
        self._bar.start()
        self._task = self._bar.add_task(title, total=total, done=0, files=files)
        self._bar.update(self._task, completed=already)

    def advance(self, count: int) -> None:
        self._bar.advance(self._task, count)

    def file_done(self, name: str) -> None:
        with self._lock:
            self._done += 1
            self._bar.update(self._task, done=self._done)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        for handler in self._diverted:
            handler.setStream(sys.stderr)
        self._diverted = []


def pick_progress(*, quiet: bool = False, json_output: bool = False) -> Progress:
    """The right one for this stderr: nothing with ``quiet``, a bar on a terminal, else lines."""
    if quiet:
        return Progress()
    if json_output or not sys.stderr.isatty():
        return LineProgress()
    return TerminalProgress()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"
