"""What a child writes to stderr, as log lines: with JSON logs every line has to be JSON.

Most lines are log lines already. The others come from libraries below Python, from an interpreter
that crashes, or are the half of a line that a killed process was writing. Those that come together
(the stacks of all threads) become one.
"""

from __future__ import annotations

import os
import select
import threading
from typing import IO

from tgi_cli.logging import is_log_line, pass_on, say_for

_LAST_SECONDS = 1.0
"""For what is still in the pipe when the child has ended; who else holds it is not waited for."""
_TOGETHER_SECONDS = 0.1
_MOST_LINES = 500
_LONGEST = 1 << 20
"""Bytes of a line."""


class Relay:
    """Passes lines on in a thread until the other end closes.

    Args:
        source: the reading end of the pipe.
        role: of the process that writes to it.
    """

    def __init__(self, source: IO[bytes], role: str) -> None:
        self._source = source
        self._role = role
        self._foreign: list[bytes] = []
        self._thread = threading.Thread(target=self._run, name=f"log of {role}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until all that was written is passed on."""
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
                if len(rest) > _LONGEST:
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
            if len(self._foreign) >= _MOST_LINES:
                self._flush()

    def _flush(self) -> None:
        if self._foreign:
            say_for(self._role, b"\n".join(self._foreign).decode("utf-8", "replace"))
            self._foreign.clear()
