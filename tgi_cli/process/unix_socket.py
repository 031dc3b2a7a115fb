"""Where a model server listens: a unix socket that no other user can reach."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from tgi_cli.errors import AddressInUseError, ConfigError

MAX_PATH_BYTES = 103
"""Of ``sun_path``: 108 on Linux, 104 on macOS, both with the final zero."""


def make_folder(path: Path) -> None:
    """Make the folder of the socket ``path`` (mode 0700) if it is missing.

    Not for a folder that somebody else made: who has removed it since does not want it back.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error


def claim(path: Path) -> None:
    """Make ``path`` ready to be bound: a private folder, nobody listening, no stale file.

    Raises:
        ConfigError: the path is too long, its folder is missing, or other users may enter it.
        AddressInUseError: something listens there already.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} is longer than {MAX_PATH_BYTES} bytes", "choose a shorter one"
        )
    folder = path.parent
    try:
        private = is_private(folder)
    except OSError as error:
        raise _unusable(path, error) from error
    if not private:
        raise ConfigError(
            f"other users may enter the socket's folder {folder}",
            "use a folder of your own with mode 0700: who reaches the socket commands the model",
        )
    if not path.exists():
        return
    if is_listening(path):
        raise AddressInUseError(
            f"a model server listens on {path} already", "stop it, or choose another --uds-path"
        )
    path.unlink(missing_ok=True)


def is_private(folder: Path) -> bool:
    """Whether this user alone may enter a folder. Raises OSError."""
    status = folder.stat()
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


def remove_stale(path: Path) -> None:
    """Remove a socket that a killed server left behind, unless another listens there by now."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(path.lstat().st_mode) and not is_listening(path):
            path.unlink(missing_ok=True)


def is_listening(path: Path) -> bool:
    """Whether a connection to the socket is accepted."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the socket's folder {path.parent} cannot be used: {error.strerror}")
