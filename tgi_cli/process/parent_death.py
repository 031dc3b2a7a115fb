"""Ends a child with its parent, however the parent ends.

The child inherits the reading end of a pipe. Only the parent can write to it, so that the system
closes it when the parent is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tgi_cli.errors import ConfigError, ExitCode
from tgi_cli.process.runtime_dir import VARIABLE, remove_folder

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""Time for requests in flight to finish."""
LAST_SECONDS = 1.0
"""Time for clients to receive the error of requests that do not finish."""


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
