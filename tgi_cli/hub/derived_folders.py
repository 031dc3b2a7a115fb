"""Folders beside the hub's cache that are made from other files, once."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tgi_cli.hub.cache import disk_error, file_lock
from tgi_cli.hub.client import cache_folder

logger = logging.getLogger(__name__)


def beside_cache(name: str) -> Path:
    """A folder of ours next to the hub's cache, on the disk that the user chose for models."""
    return cache_folder().absolute().parent / name


def files_key(paths: Iterable[Path], *words: str) -> str:
    """A key that changes with the files, and with ``words``."""
    stamp = "".join(f"{path}{path.stat().st_size}{path.stat().st_mtime_ns}" for path in paths)
    return hashlib.sha256("\0".join((stamp, *words)).encode()).hexdigest()[:12]


def create_once(
    target: Path, fill: Callable[[Path], None], check: Callable[[Path], object]
) -> Path:
    """Create ``target`` with ``fill``, atomically; an existing one is used as it is.

    Args:
        check: raises if the folder is incomplete.
    """
    try:
        with file_lock(target.parent / f".{target.name}.lock"):
            if target.is_dir():
                logger.info("using %s, created earlier", target)
            else:
                scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
                try:
                    fill(scratch)
                    check(scratch)
                    scratch.chmod(0o755)
                    scratch.rename(target)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise disk_error(error, target.parent) from error
    return target


def keep_last_used(used: Path, count: int) -> None:
    """Note that the folder ``used`` is in use, and remove others beside it.

    Those are removed whose links lead nowhere, and of the rest all but the ``count`` that were used
    last. A folder that cannot be removed stays.
    """
    with suppress(OSError):  # a folder that this user may not write
        os.utime(used)
    ages: dict[Path, int] = {}
    unused: list[Path] = []
    for folder in used.parent.iterdir():
        if folder == used or folder.name.startswith(".") or not folder.is_dir():
            continue
        with suppress(OSError):  # another process may remove it, too
            ages[folder] = folder.stat().st_mtime_ns
            if any(path.is_symlink() and not path.exists() for path in folder.iterdir()):
                unused.append(folder)
    whole = sorted(ages.keys() - set(unused), key=ages.__getitem__, reverse=True)
    for folder in (*unused, *whole[count - 1 :]):
        logger.debug("removing %s", folder)
        shutil.rmtree(folder, ignore_errors=True)
