"""Images from ``file:`` URLs below a folder that the operator allows."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tgi_cli.vision.errors import bad_url, not_fetched, too_many_bytes, unreadable

_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER = _ROOT | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def read_file_url(url: str, root: Path, most: int) -> bytes:
    """The bytes of a regular file below ``root`` that a ``file:`` URL (RFC 8089) names.

    Each folder is opened within the one before it and no symbolic link is followed, so that nothing
    outside of ``root`` is read, whatever happens to the folders meanwhile.

    Raises:
        MediaError: There is no such file below ``root``, or it is empty or too large.
    """
    try:
        parts = urlsplit(url)
        path = unquote(parts.path, errors="strict")
    except ValueError:
        raise bad_url("the URL is invalid") from None
    first, *names = path.split("/")
    if parts.netloc not in ("", "localhost") or parts.query or first or "\0" in path:
        raise bad_url("a file: URL must have the form file:///PATH")
    try:
        return _read(names, root.absolute(), most)
    except (OSError, UnicodeError):  # one text for all: it must not reveal what exists
        raise not_fetched("there is no such file below the allowed folder") from None


def _read(names: list[str], root: Path, most: int) -> bytes:
    above = list(root.parts[1:])
    below = names[len(above) :]
    if names[: len(above)] != above or not below or not {"", ".", ".."}.isdisjoint(below):
        raise FileNotFoundError
    *folders, name = below
    folder = os.open(root, _ROOT)
    try:
        for each in folders:
            inner = os.open(each, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        file = os.open(name, _FILE, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError
        data = b""
        if found.st_size <= most:
            with os.fdopen(file, "rb", closefd=False) as stream:
                data = stream.read(most + 1)
    finally:
        os.close(file)
    if found.st_size > most or len(data) > most:
        raise too_many_bytes(max(found.st_size, len(data)), most)
    if not data:
        raise unreadable("it is empty", "empty_image_file")
    return data
