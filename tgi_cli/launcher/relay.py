"""What a child writes to stderr, as log lines: with JSON logs every line has to be JSON.

Most lines are log lines already. The others come from libraries below Python, from an interpreter
that crashes, or are the half of a line that a killed process was writing.
"""

from __future__ import annotations

import threading
from typing import IO

from tgi_cli.logging import pass_on

_LAST_SECONDS = 1.0
"""For what is still in the pipe when the child has ended; who else holds it is not waited for."""
_LONGEST = 1 << 16


class Relay:
    """Passes lines on in a thread until the other end closes.

    Args:
        source: the reading end of the pipe.
        role: of the process that writes to it.
    """

    def __init__(self, source: IO[bytes], role: str) -> None:
        self._source = source
        self._role = role
        self._thread = threading.Thread(target=self._run, name=f"log of {role}", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until all that was written is passed on."""
        self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        with self._source:
            while line := self._source.readline(_LONGEST):
                pass_on(line, self._role)
