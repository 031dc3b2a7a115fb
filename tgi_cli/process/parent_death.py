"""Ends a child with its parent, however the parent ends.

The child inherits the reading end of a pipe. Only the parent can write to it, so that the system
closes it when the parent is gone.

``python -m tgi_cli.process.parent_death COMMAND`` runs a command that cannot do so itself: the pipe
is its standard input. SIGTERM and SIGINT are forwarded.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tgi_cli.errors import ConfigError, ExitCode
from tgi_cli.process.runtime_dir import VARIABLE, remove_folder

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""Time for requests in flight to finish."""
LAST_SECONDS = 1.0
"""Time for clients to receive the error of requests that do not finish."""
_COMMAND_SECONDS = 30.0
"""Time for a command to end after SIGTERM."""


@contextmanager
def parent_pipe() -> Iterator[int]:
    """Open the pipe in the parent and yield the descriptor that children inherit."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def exit_with_parent(parent_fd: int) -> None:
    """Watch the inherited pipe in a thread; when it closes, end this process.

    The runtime folder is removed, as the parent would have done. The process gets SIGTERM, and
    SIGTERM again ``GRACE_SECONDS`` later; ``LAST_SECONDS`` after that it exits at once.

    Raises:
        ConfigError: ``parent_fd`` is not an open file descriptor.
    """
    try:
        os.fstat(parent_fd)
    except OSError as error:
        raise ConfigError(f"the parent's pipe {parent_fd} is not an open descriptor") from error
    os.set_inheritable(parent_fd, False)
    threading.Thread(target=_watch, args=(parent_fd,), name="parent death", daemon=True).start()


def _watch(parent_fd: int) -> None:
    while os.read(parent_fd, 1):
        pass
    log.error("the launcher is gone; ending")
    folder = os.environ.get(VARIABLE)
    if folder:
        remove_folder(Path(folder))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_SECONDS)
    os._exit(ExitCode.FAILURE)


def run_with_parent(command: list[str]) -> int:
    """Run a command, end it when standard input closes, and return its exit status."""
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    def end_with_stdin(process: subprocess.Popen[bytes]) -> None:
        while os.read(0, 1 << 10):
            pass
        process.terminate()
        try:
            process.wait(_COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    for number in early:
        process.send_signal(number)
    threading.Thread(target=end_with_stdin, args=(process,), daemon=True).start()
    status = process.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(run_with_parent(sys.argv[1:]))
