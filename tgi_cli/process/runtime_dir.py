"""The private folder of one running server: its socket, and a lock that says it is in use."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "tgi-"
_LOCK = "lock"
SOCKET = "engine.sock"
"""The model server's, in it."""

VARIABLE = "TGI_RUNTIME_FOLDER"
"""Tells the model server where what its shards share is to lie."""
SHARDS_PREFIX = "tgi-shards-"
"""Of a folder in it; see :mod:`tgi_cli.worker.tensor_parallel.group`."""

_MAX_BASE = 70
"""Bytes of the path above it: a socket's path may have about 100."""
_YOUNG_SECONDS = 60.0
"""A folder may be this old before its lock has to be held."""


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """A new folder of mode 0700 that is gone afterwards.

    It lies in XDG_RUNTIME_DIR where there is one, else in the folder for temporary files. What
    servers that were killed left there is removed.
    """
    base = _base()
    _sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        remove_folder(folder)
        os.close(lock)


def remove_folder(folder: Path) -> None:
    """Remove a runtime folder and what its server has put there; several processes may do so.

    Anything else in it stays, and so does the folder then.
    """
    with contextlib.suppress(OSError):  # what is missing here, another of them removed
        for path in folder.iterdir():
            if path.name in (_LOCK, SOCKET) or path.is_socket():
                path.unlink(missing_ok=True)
            elif path.name.startswith(SHARDS_PREFIX):
                shutil.rmtree(path, ignore_errors=True)
        folder.rmdir()


def default_uds_path() -> Path:
    """Where a model server that runs alone listens, and a router that runs alone looks."""
    base = _base()
    private = base.stat().st_uid == os.geteuid() and not base.stat().st_mode & 0o077
    return base / ("tgi" if private else f"tgi-{os.geteuid()}") / SOCKET


def _base() -> Path:
    for name in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()):
        if name and len(os.fsencode(name)) <= _MAX_BASE and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    return Path("/tmp")


def _sweep(base: Path) -> None:
    """Remove folders whose server is gone: nobody holds their lock."""
    for folder in base.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # in use, somebody else's, or gone by now
            if time.time() - folder.stat().st_mtime < _YOUNG_SECONDS:
                continue
            lock = os.open(folder, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(folder.parent)
            finally:
                os.close(lock)
