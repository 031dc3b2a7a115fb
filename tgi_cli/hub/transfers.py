"""Transfers of several files into a cache at once, whatever they come from."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tgi_cli.errors import CorruptFileError
from tgi_cli.hub.cache import RepoCache, disk_error, file_lock, require_space
from tgi_cli.hub.repository import RepoFile, Repository
from tgi_cli.process.progress import ProgressReporter
from tgi_cli.process.units import format_size

logger = logging.getLogger(__name__)

WORKERS = 8
CHUNK = 1 << 20

_JOIN_SECONDS = 2.0
"""Time that threads get to notice a stopped download before they are abandoned."""

Fetch = Callable[[RepoFile], object]
"""Completes a file in the cache."""


class DownloadStopped(Exception):
    """The user, or the failure of another file, stopped the download."""


@dataclass(frozen=True)
class CacheWriter:
    """Completes files in a cache, which several threads and processes may do at once.

    Attributes:
        cache: that gets the files.
        commit: the snapshot that links to them.
        progress: progress of the download; it shows how many of ``num_files`` are there.
    """

    cache: RepoCache
    commit: str
    progress: ProgressReporter
    num_files: int
    finished: list[str] = field(default_factory=list)

    def complete(
        self,
        file: RepoFile,
        receive: Callable[[RepoFile, Path], bool],
        wrong: Callable[[RepoFile], CorruptFileError],
    ) -> Path:
        """Complete ``file`` and return its path in the snapshot.

        Args:
            file: file of the repository.
            receive: downloads the rest of a partial file, and returns whether its checksum is
                right. If not, it is called once more.
            wrong: makes the error of a checksum that was wrong twice.

        Raises:
            CorruptFileError: the checksum was wrong twice.
            DiskFullError: the disk is full.
            HubError: the cache cannot be written; and whatever ``receive`` raises.
        """

        def locked() -> Path:
            with file_lock(self.cache.lock(file)):
                if self.cache.has(file):
                    logger.debug("%s: already in the cache", file.name)
                elif not any(self._received(file, receive, again) for again in (False, True)):
                    raise wrong(file)
                return self.cache.link(file, self.commit)

        return self.counted(file, locked)

    def counted(self, file: RepoFile, complete: Callable[[], Path]) -> Path:
        """Call ``complete``, which puts ``file`` into the cache, and show that it is there.

        Raises:
            DiskFullError: the disk is full.
            HubError: the cache cannot be written; and whatever ``complete`` raises.
        """
        try:
            self.cache.blob(file).parent.mkdir(parents=True, exist_ok=True)
            return complete()
        except OSError as error:
            raise disk_error(error, self.cache.root) from error
        finally:
            self.finished.append(file.name)
            self.progress.advance(0, f"{len(self.finished)} of {self.num_files} files")

    def _received(
        self, file: RepoFile, receive: Callable[[RepoFile, Path], bool], again: bool
    ) -> bool:
        partial = self.cache.partial(file)
        if again:
            logger.warning("%s: wrong checksum; fetching it again", file.name)
            self.progress.advance(-file.size)
        if not receive(file, partial):
            partial.unlink()
            return False
        partial.replace(self.cache.blob(file))
        return True


def download_files(
    repository: Repository,
    names: Sequence[Sequence[str]],
    cache: RepoCache,
    progress: ProgressReporter,
    connect: Callable[[ProgressReporter, int, threading.Event], AbstractContextManager[Fetch]],
) -> Path:
    """Complete the named files in the cache; return the snapshot's folder.

    Args:
        repository: its files with sizes and checksums.
        names: groups of file names. A group starts when the one before it is complete, so that
            weights never appear without the files that belong to them.
        cache: cache of the repository.
        progress: progress of the download.
        connect: given the progress, the number of files and an event that stops them, what
            completes a file in the cache; several threads call it at once.

    Raises:
        DiskFullError: before the first byte, if that is known by then.
        HubError: the first error of a file; it stops the others.
    """
    groups = [[repository.files[name] for name in group] for group in names]
    files = [file for group in groups for file in group]
    for file in files:
        cache.snapshot_file(file.name, repository.commit)  # raises for paths that lead elsewhere
    distinct = {file.checksum: file for file in files}
    total = sum(file.size for file in distinct.values())
    missing = sum(cache.missing_bytes(file) for file in distinct.values())
    if missing:
        require_space(cache.root, missing, repository.model_id)
        logger.info(
            "%s: fetching %s in %d files (of %s)",
            repository.model_id,
            format_size(missing),
            sum(not cache.has(file) for file in distinct.values()),
            format_size(total),
        )
    else:
        progress = ProgressReporter(show_bar=False, log_interval=None)
    stop = threading.Event()
    began = time.monotonic()
    with connect(progress, len(files), stop) as fetch, progress:
        progress.start(repository.model_id, total, total - missing)
        for group in groups:
            _in_parallel(group, fetch, stop)
    if missing:
        seconds = time.monotonic() - began
        logger.info("%s: complete after %.1f s", repository.model_id, seconds)
    try:
        cache.save_ref(repository.revision, repository.commit)
    except OSError as error:
        raise disk_error(error, cache.root) from error
    return cache.snapshot(repository.commit)


def _in_parallel(
    files: Sequence[RepoFile], work: Callable[[RepoFile], object], stop: threading.Event
) -> None:
    """Call ``work`` on each of ``files``; the first error stops the rest and is raised here.

    The threads are daemons rather than an executor's: exit does not wait for a silent connection,
    and nothing is lost, as received bytes are in their files already.
    """
    pending = deque(files)
    errors: list[BaseException] = []

    def worker() -> None:
        while not stop.is_set():
            try:
                file = pending.popleft()
            except IndexError:  # none is left
                return
            try:
                work(file)
            except DownloadStopped:
                return
            except BaseException as error:  # raised in the caller's thread below
                errors.append(error)
                stop.set()

    threads = [
        threading.Thread(target=worker, name=f"download-{number}", daemon=True)
        for number in range(min(WORKERS, len(files)))
    ]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads) and not stop.is_set():
            for thread in threads:
                thread.join(0.1)
    finally:
        if any(thread.is_alive() for thread in threads):
            stop.set()
            for thread in threads:
                thread.join(_JOIN_SECONDS / len(threads))
    if errors:
        raise errors[0]


def resume_partial(file: RepoFile, partial: Path, digest: Any) -> int:
    """Feed the bytes of an earlier run to ``digest``; return their number, or delete too many."""
    size = partial.stat().st_size if partial.exists() else 0
    if size > file.size:
        partial.unlink()
        return 0
    if size:
        logger.info("%s: resuming at %d of %d bytes", file.name, size, file.size)
        with partial.open("rb") as stream:
            while block := stream.read(CHUNK):
                digest.update(block)
    return size
