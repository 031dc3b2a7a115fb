"""A command in a terminal, whose screen can be read: a pseudo terminal with an emulator."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import pyte

_SECONDS = 240.0


class _Screen(pyte.HistoryScreen):  # type: ignore[misc]
    """A screen that answers the program's questions, as for the position of the cursor."""

    def __init__(self, columns: int, lines: int, answer: Callable[[bytes], object]) -> None:
        super().__init__(columns, lines, history=10_000, ratio=1)
        self._answer = answer

    def write_process_input(self, data: str) -> None:
        self._answer(data.encode())


class Emulator:
    """The screen that a text leaves.

    Attributes:
        screen: pyte's.
    """

    def __init__(
        self,
        columns: int = 80,
        lines: int = 24,
        answer: Callable[[bytes], object] = lambda data: None,
    ) -> None:
        self.screen = _Screen(columns, lines, answer)
        self._stream = pyte.ByteStream(self.screen)

    def feed(self, data: bytes) -> None:
        """Show what a program has written."""
        self._stream.feed(data)

    def shown(self) -> list[str]:
        """The lines of the screen, without spaces and empty lines at their ends."""
        return _stripped([line.rstrip() for line in self.screen.display])

    def everything(self) -> list[str]:
        """The lines that have left the screen at its top, and those on it."""
        columns = range(self.screen.columns)
        left = ["".join(row[x].data for x in columns).rstrip() for row in self.screen.history.top]
        return [*left, *self.shown()]


class Terminal:
    """A command in a terminal of its own; a context manager that ends it.

    Args:
        command: the words of the command.
        environment: variables besides those of this process.
        columns, lines: the size.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        columns: int = 80,
        lines: int = 24,
    ) -> None:
        self._master, slave = os.openpty()
        self._emulator = Emulator(columns, lines, lambda data: os.write(self._master, data))
        self.written = b""
        self._set_size(columns, lines)
        # Programs believe these more than the terminal's own size.
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command,
            env={**inherited, "TERM": "xterm-256color", **environment},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=lambda: _control(slave),
        )
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # which ends its own server, too
            try:
                self.process.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        os.close(self._master)

    def type(self, keys: str) -> None:
        """Type keys: ``\\r`` is Enter, ``\\x03`` Ctrl-C."""
        os.write(self._master, keys.encode())

    def shown(self) -> list[str]:
        """The lines of the screen."""
        self._read(0)
        return self._emulator.shown()

    def everything(self) -> str:
        """All lines, those that have left the screen included."""
        self._read(0)
        return "\n".join(self._emulator.everything())

    def wait_for(self, condition: str | Callable[[str], Any], seconds: float = _SECONDS) -> str:
        """Wait until a text is on the screen, or a condition holds; return the screen."""
        end = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None  # asked first: then all that it wrote is read
            screen = "\n".join(self.shown())
            if (condition in screen) if isinstance(condition, str) else condition(screen):
                return screen
            assert time.monotonic() < end, f"{condition!r} is not on the screen:\n{screen}"
            assert not ended, f"it has ended:\n{screen}"
            self._read(0.1)

    def wait(self) -> int:
        """Wait for the end of the command; return its exit code."""
        end = time.monotonic() + _SECONDS
        while self.process.poll() is None:
            self._read(0.1)
            assert time.monotonic() < end, "\n".join(self.shown())
        self._read(0)
        return int(self.process.returncode)

    def resize(self, columns: int, lines: int) -> None:
        """Change the size; the program is told."""
        self._read(0)
        self._emulator.screen.resize(lines, columns)
        self._set_size(columns, lines)
        self.process.send_signal(signal.SIGWINCH)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self, seconds: float) -> bool:
        """Show what the command has written; whether there was anything."""
        anything = False
        while select.select([self._master], [], [], 0 if anything else seconds)[0]:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # no process has the other end any more
                return anything
            if not data:
                return anything
            self.written += data
            self._emulator.feed(data)
            anything = True
        return anything


def _control(terminal: int) -> None:
    """Make it the controlling terminal of a new session, so that Ctrl-C is a signal."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def _stripped(lines: list[str]) -> list[str]:
    while lines and not lines[-1]:
        lines.pop()
    return lines
