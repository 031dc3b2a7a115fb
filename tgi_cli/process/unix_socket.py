"""The path of a unix socket that no other user can reach or replace."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from tgi_cli.errors import AddressInUseError, ConfigError

MAX_PATH_BYTES = 103
"""Length of ``sun_path``: 108 on Linux, 104 on macOS, both with the final zero."""


def make_folder(path: Path) -> None:
    """Make the folder of the socket ``path`` (mode 0700) if it is missing.

    Only for folders of our own: one that another program made and has removed stays removed.

    Raises:
        ConfigError: It cannot be made.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error


def claim(path: Path, *, allow_shared: bool = False) -> None:
    """Make ``path`` ready to be bound: a safe folder, no listener, no stale file.

    Args:
        path: Path of the socket.
        allow_shared: Whether other users may enter the folder, as /tmp, as long as they can
            neither connect to the socket nor replace it.

    Raises:
        ConfigError: The path is too long, or its folder is missing or not safe.
        AddressInUseError: A server listens there already, or the file cannot be removed.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} is longer than {MAX_PATH_BYTES} bytes", "choose a shorter one"
        )
    folder = path.parent
    try:
        private, mode = is_private(folder), folder.stat().st_mode
    except OSError as error:
        raise _unusable(path, error) from error
    if not private and not allow_shared:
        raise ConfigError(
            f"other users may enter the socket's folder {folder}",
            "use a folder of your own with mode 0700: whoever reaches the socket commands the "
            "model",
        )
    if not private and mode & 0o022 and not mode & stat.S_ISVTX:
        raise ConfigError(
            f"other users may replace files in the socket's folder {folder}",
            "use a folder of your own with mode 0700: whoever answers there poses as the model",
        )
    if is_listening(path):
        flag = "--shard-uds-path" if allow_shared else "--uds-path"
        raise AddressInUseError(
            f"a model server listens on {path} already", f"stop it, or choose another {flag}"
        )
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise AddressInUseError(f"{path} cannot be replaced: {error.strerror}") from error


def is_private(folder: Path) -> bool:
    """Whether only this user may enter a folder. Raises OSError."""
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
