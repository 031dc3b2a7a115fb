"""A folder of KV blocks, one file each, which several processes may share.

A file's name is a hash of the content and of the identity of all that determines its bytes: the
weights, data types, layout and versions. It begins with a magic number, the payload's size and a
checksum. Files appear under their names when they are complete (rename(2)), and are not changed
again but for the time of the last change, which says when a block was last used. A file that is not
as it should be is removed, and counts as missing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from tgi_cli.engine.block_store import StoreEvent
from tgi_cli.files import FileRefusedError, read_bytes

log = logging.getLogger(__name__)

SUFFIX = ".kv"
_MAGIC = b"tgi-kv\0\1"
_HEADER = struct.Struct("<8sQ16s")
HEADER_BYTES = _HEADER.size

_KEPT_SHARE = 0.95
"""Of the limit, to which the folder shrinks when it exceeds it."""

_STALE_SECONDS = 3600.0
"""Age of unfinished files that no process is taken to write any more."""

_BETWEEN_SCANS = 30.0
"""Seconds between looks at what other processes have written; more if a look takes long."""


class BlockFiles:
    """Reads and writes the blocks of one model in a folder bounded in bytes.

    Methods may be called from any thread; :meth:`has` alone does not touch the disk.

    Args:
        folder: created, for its owner alone, if it is not there.
        limit: bytes of all files, of other models, too.
        identity: of all that determines the bytes of a block, apart from its content's hash.

    Attributes:
        counts: files written, evicted and found damaged, by this process.

    Raises:
        OSError: the folder cannot be created, read or written.
    """

    def __init__(self, folder: Path, limit: int, identity: bytes) -> None:
        self.counts = dict.fromkeys(StoreEvent, 0)
        self._folder = folder
        self._limit = limit
        self._identity = identity
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._bytes = 0
        self._scanned = -1.0
        self._scan_seconds = 0.0
        self._folder_time = -1
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_mode & stat.S_IWOTH or found.st_uid not in (os.geteuid(), 0):
            log.warning(
                "other users may write into --kv-cache-dir %s, and so change answers: give it the "
                "server's user as its owner, and mode 0700",
                folder,
            )
        _try_to_write(folder)
        self.scan()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, as far as they are known."""
        return self._bytes

    @property
    def num_known(self) -> int:
        """Files of all models, as far as they are known."""
        return len(self._known)

    def name_of(self, content: bytes) -> str:
        """The name of a block's file."""
        return blake2b(self._identity + content, digest_size=20).hexdigest() + SUFFIX

    def has(self, name: str) -> bool:
        """Whether a file is there, as far as it is known."""
        return name in self._known

    def write(self, name: str, payload: bytes) -> None:
        """Write a file unless it is there; drop the least recently used ones for it.

        Raises:
            OSError: the file cannot be written.
        """
        size = HEADER_BYTES + len(payload)
        if self.has(name) or size > self._limit:
            return
        if self._bytes + size > self._limit:
            self.shrink(int(self._limit * _KEPT_SHARE) - size)
        path = self._folder / name
        # A name that no one else can have made a link of.
        scratch = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_HEADER.pack(_MAGIC, len(payload), _checksum(name, payload)))
                file.write(payload)
            scratch.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise
        with self._lock:
            self._known.add(name)
            self._bytes += size
            self.counts[StoreEvent.WRITTEN] += 1

    def read(self, name: str, size: int) -> bytes | None:
        """The payload of a file; None if it is not there, or is not as it should be.

        Args:
            size: bytes of a payload at most; of a larger file, no more are read.
        """
        path = self._folder / name
        try:
            found = path.lstat().st_size
            data = read_bytes(path, HEADER_BYTES + size)
        except FileRefusedError:
            self._remove_damaged(name, found)
            return None
        except OSError:
            self._forget(name, 0)
            return None
        payload = data[HEADER_BYTES:]
        if len(data) >= HEADER_BYTES:
            magic, length, checksum = _HEADER.unpack_from(data)
            whole = magic == _MAGIC and length == len(payload)
            if whole and checksum == _checksum(name, payload):
                return payload
        self._remove_damaged(name, len(data))
        return None

    def touch(self, names: Iterable[str]) -> None:
        """Mark files as used now; of those of one sequence, the first is dropped last."""
        now = time.time()
        for depth, name in enumerate(names):
            with contextlib.suppress(OSError):
                used = now - depth * 1e-3
                os.utime(self._folder / name, (used, used), follow_symlinks=False)

    def scan_if_due(self) -> None:
        """Look for files that other processes have written or removed, now and then."""
        waited = time.monotonic() - self._scanned
        if waited < max(_BETWEEN_SCANS, 50 * self._scan_seconds):
            return
        if self._folder.stat().st_mtime_ns == self._folder_time:
            self._scanned = time.monotonic()
        else:
            self.scan()

    def scan(self) -> list[tuple[float, int, str]]:
        """List the files; return when each was last used, its bytes and its name. Raises OSError.

        Unfinished files of processes that have ended are removed.
        """
        began = time.monotonic()
        folder_time = self._folder.stat().st_mtime_ns
        found = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(OSError):  # removed by another process, or not to be removed
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if entry.name.endswith(SUFFIX):
                    found.append((status.st_mtime, status.st_size, entry.name))
                elif entry.name.endswith(".tmp") and _is_stale(status):
                    Path(entry.path).unlink()
        with self._lock:
            self._known = {name for _, _, name in found}
            self._bytes = sum(size for _, size, _ in found)
        self._folder_time = folder_time
        self._scanned = time.monotonic()
        self._scan_seconds = self._scanned - began
        return found

    def shrink(self, limit: int) -> None:
        """Remove the least recently used files until all have at most ``limit`` bytes."""
        for _, size, name in sorted(self.scan()):
            if self._bytes <= limit:
                return
            self._remove(name, size, StoreEvent.EVICTED)

    def _remove_damaged(self, name: str, size: int) -> None:
        log.warning("%s is torn or damaged: removed", self._folder / name)
        self._remove(name, size, StoreEvent.DAMAGED)

    def _remove(self, name: str, size: int, why: StoreEvent) -> None:
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()
            with self._lock:
                self.counts[why] += 1
        self._forget(name, size)

    def _forget(self, name: str, size: int) -> None:
        with self._lock:
            if name in self._known:
                self._known.discard(name)
                self._bytes -= size


def _try_to_write(folder: Path) -> None:
    """Raise OSError unless files can be created in a folder; one that is full is not refused."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _is_stale(status: os.stat_result) -> bool:
    return time.time() - status.st_mtime > _STALE_SECONDS


def _checksum(name: str, payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16, key=name.encode()[:40]).digest()
