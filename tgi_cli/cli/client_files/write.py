"""Writes a client's file: atomically, with a backup of what was there."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tgi_cli import files
from tgi_cli.cli.client_files import Format
from tgi_cli.cli.client_files.merging import merged
from tgi_cli.errors import ConfigError, ExitCode, TgiError

_PRIVATE = 0o600
"""The mode of new files, which may contain an API key."""


class ClientFileError(TgiError):
    """A client's file that cannot be read, edited or written."""

    exit_code = ExitCode.FAILURE


def merge_into(
    path: Path, file_format: Format, new: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Path | None:
    """Merge settings into a file, which may not exist yet.

    The file keeps its mode, and links to it stay links.

    Args:
        path: the file.
        file_format: its format.
        new: the settings.
        defaults: settings to add if the file lacks them.

    Returns:
        The backup, or None if there was no file, or nothing to change.

    Raises:
        ConfigError: the file's text is invalid, or of a layout that cannot be edited in place.
        ClientFileError: the file cannot be read or written.
    """
    path = Path(os.path.realpath(path))
    try:
        text = files.read_text(path) if path.exists() else ""
    except (OSError, ValueError) as error:
        raise ClientFileError(f"{path} cannot be read: {error}") from error
    changed = _merge(path, file_format, text, new, defaults)
    if changed == text:
        return None
    try:
        backup = _back_up(path, text) if path.exists() else None
        _replace(path, changed)
    except OSError as error:
        raise ClientFileError(f"{path} cannot be written: {error}") from error
    return backup


def _merge(
    path: Path, file_format: Format, text: str, new: Mapping[str, Any], defaults: Mapping[str, Any]
) -> str:
    if not text.strip():
        return file_format.dump({**defaults, **new})
    advice = "correct the file, or add the settings by hand: without --write they are printed"
    try:
        old = file_format.parse(text)
    except ValueError as error:
        raise ConfigError(f"{path} is invalid: {error}", advice) from error
    if not isinstance(old, dict):
        raise ConfigError(f"{path} does not hold an object", advice)
    wanted = {**{key: value for key, value in defaults.items() if key not in old}, **new}
    expected = merged(old, wanted)
    if expected == old:
        return text
    try:
        changed = file_format.merge(text, wanted)
        is_right = file_format.parse(changed) == expected
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError(f"{path} has a layout that cannot be edited in place", advice)
    return changed


def _back_up(path: Path, text: str) -> Path:
    """Copy a file beside itself, under a name that is free."""
    stem = f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}"
    count = 0
    while True:
        backup = path.with_name(f"{stem}{f'-{count}' if count else ''}.bak")
        try:
            descriptor = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
        except FileExistsError:
            count += 1
            continue
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        backup.chmod(path.stat().st_mode & 0o7777)
        return backup


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o7777 if path.exists() else _PRIVATE
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
