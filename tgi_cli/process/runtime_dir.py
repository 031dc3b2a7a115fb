"""The private folder of a running server, with its socket and a lock while it is in use."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "tgi-"
_LOCK = "lock"
SOCKET = "engine.sock"
"""Name of the model server's socket in the folder."""

_NODE_SECRET = "node-secret"

VARIABLE = "TGI_RUNTIME_FOLDER"
"""Environment variable with the folder."""

_MAX_BASE = 70
"""Length of the parent folder's path: that of a socket may have about 100 bytes."""
_YOUNG_SECONDS = 60.0
"""Age below which a folder is in use even if its lock is free."""


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """Make a folder of mode 0700 and remove it afterwards.

    It is in XDG_RUNTIME_DIR if that is set, otherwise in the folder for temporary files. Folders
    that killed servers left there are removed.
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


def write_secret(folder: Path, secret: str) -> Path:
    """Write what nodes authenticate each other by into a runtime folder; returns the file."""
    path = folder / _NODE_SECRET
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(secret)
    return path


def remove_folder(folder: Path) -> None:
    """Remove a runtime folder and its server's files; several processes may do so concurrently.

    The folder stays if it has other files.
    """
    with contextlib.suppress(OSError):  # another process may have removed a file
        for path in folder.iterdir():
            if path.name in (_LOCK, SOCKET, _NODE_SECRET) or path.is_socket():
                path.unlink(missing_ok=True)
        folder.rmdir()


def default_uds_path() -> Path:
    """Return the default socket of a model server and a router that are started separately."""
    base = _base()
    private = base.stat().st_uid == os.geteuid() and not base.stat().st_mode & 0o077
    return base / ("tgi" if private else f"tgi-{os.geteuid()}") / SOCKET


def _base() -> Path:
    for name in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()):
        if name and len(os.fsencode(name)) <= _MAX_BASE and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    return Path("/tmp")


def _sweep(base: Path) -> None:
    """Remove folders whose server is gone: their lock is free."""
    for folder in base.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # in use, of another user, or gone by now
            about = folder.parent.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
                continue  # a link may lead into any folder of this user
            if time.time() - folder.stat().st_mtime < _YOUNG_SECONDS:
                continue
            lock = os.open(folder, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(folder.parent)
            finally:
                os.close(lock)
