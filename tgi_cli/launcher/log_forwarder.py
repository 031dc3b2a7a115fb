"""Forwards a child's stderr as log lines: with JSON logs every line has to be JSON.

Most lines are log lines already. Others come from libraries below Python or from an interpreter
that crashes, or are the half of a line that a killed process was writing. Those that arrive
together, such as the stacks of all threads, become one record.
"""

from __future__ import annotations

import os
import select
import threading
from typing import IO

from tgi_cli.logging import is_log_line, pass_on, say_for

_LAST_SECONDS = 1.0
"""Time to read what is left in the pipe after the child's end, as others may hold the pipe."""
_TOGETHER_SECONDS = 0.1
"""Pause after which foreign lines no longer belong together."""
_MAX_LINES = 500
"""Foreign lines in one record."""
_MAX_LINE_BYTES = 1 << 20


class LogForwarder:
    """Forwards lines in a thread until the other end of the pipe closes.

    Args:
        source: The reading end.
        role: Role of the process that writes.
    """

    def __init__(self, source: IO[bytes], role: str) -> None:
        self._source = source
        self._role = role
        self._foreign: list[bytes] = []
        self._thread = threading.Thread(target=self._run, name=f"log of {role}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until everything that was written is forwarded."""
        self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        rest = b""
        with self._source:
            fd = self._source.fileno()
            while True:
                if self._foreign and not select.select([fd], [], [], _TOGETHER_SECONDS)[0]:
                    self._flush()
                data = os.read(fd, 1 << 16)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._take(line)
        self._take(rest)
        self._flush()

    def _take(self, line: bytes) -> None:
        if is_log_line(line):
            self._flush()
            pass_on(line)
        elif line.strip():
            self._foreign.append(line)
            if len(self._foreign) >= _MAX_LINES:
                self._flush()

    def _flush(self) -> None:
        if self._foreign:
            say_for(self._role, b"\n".join(self._foreign).decode("utf-8", "replace"))
            self._foreign.clear()
