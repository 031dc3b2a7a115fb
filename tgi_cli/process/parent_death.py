"""No child outlives its parent: each holds the reading end of a pipe that only the parent can
write to, and that the system closes when the parent is gone, however it went.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tgi_cli.errors import ConfigError, ExitCode
from tgi_cli.process.runtime_dir import VARIABLE, remove_folder

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""For what is in flight to finish."""
LAST_SECONDS = 1.0
"""For those who wait to be told that it will not."""


def exit_with_parent(fd: int, cleanup: Callable[[], None] | None = None) -> None:
    """Watch the inherited lifeline ``fd`` in a thread; when it breaks, end this process.

    The process gets SIGTERM, ``GRACE_SECONDS`` later again, and is then ended the hard way.

    Args:
        fd: the reading end of the parent's pipe.
        cleanup: what the parent would have cleared away, beside the runtime folder.

    Raises:
        ConfigError: ``fd`` is not an open file descriptor.
    """
    try:
        os.fstat(fd)
    except OSError as error:
        raise ConfigError(
            f"--lifeline-fd {fd} is not an open file descriptor",
            "leave it off: it is for the process that starts this one",
        ) from error
    os.set_inheritable(fd, False)
    threading.Thread(target=_watch, args=(fd, cleanup), name="lifeline", daemon=True).start()


def _watch(fd: int, cleanup: Callable[[], None] | None) -> None:
    while os.read(fd, 1):
        pass
    log.error("the launcher is gone; ending")
    folder = os.environ.get(VARIABLE)
    if folder:
        remove_folder(Path(folder))
    if cleanup is not None:
        cleanup()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_SECONDS)
    os._exit(ExitCode.FAILURE)
