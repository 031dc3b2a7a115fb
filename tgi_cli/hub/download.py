"""The files of one repository into the cache: several at a time, small ones first."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from tgi_cli.hub.cache import RepoCache, human_bytes, require_space, write_error
from tgi_cli.hub.environment import HubEnvironment
from tgi_cli.hub.progress import Progress
from tgi_cli.hub.repository import RepoFile, Repository
from tgi_cli.hub.transfer import Stopped, Transfer, new_client

logger = logging.getLogger(__name__)

WORKERS = 8
_PATIENCE = 2.0
"""Seconds that threads get to notice that all is over, before they are left behind."""


def download(
    repository: Repository,
    names: Sequence[Sequence[str]],
    hub: HubEnvironment,
    progress: Progress,
) -> Path:
    """Make the named files complete in the cache; return the snapshot's folder.

    ``names`` are groups of file names; a group starts when the one before it is complete, so
    that weights are there only if everything that must be beside them is.

    Raises:
        DiskFullError: before the first byte, if it is known by then.
        HubError and its kind: the first file that failed; the others are stopped.
    """
    cache = RepoCache(hub.cache, repository.model_id)
    groups = [[repository.files[name] for name in group] for group in names]
    for file in (file for group in groups for file in group):
        cache.place(file.name, repository.commit)  # refuses names that lead elsewhere
    distinct = {file.checksum: file for group in groups for file in group}
    total = sum(file.size for file in distinct.values())
    missing = sum(cache.missing_bytes(file) for file in distinct.values())
    if missing:
        require_space(hub.cache, missing, repository.model_id)
        wanted = sum(not cache.has(file) for file in distinct.values())
        logger.info(
            "%s: fetching %s in %d files (of %s)",
            repository.model_id,
            human_bytes(missing),
            wanted,
            human_bytes(total),
        )
    else:
        # Nothing will be shown, so nothing is counted.
        progress = Progress()
    stop = threading.Event()
    began = time.monotonic()
    with new_client(hub) as client:
        transfer = Transfer(repository, cache, hub, client, progress, stop)
        files = sum(len(group) for group in groups)
        progress.start(repository.model_id, total, total - missing, files)
        try:
            for group in groups:
                _in_parallel(group, transfer.fetch, stop)
        finally:
            progress.finish()
    if missing:
        seconds = time.monotonic() - began
        logger.info("%s: complete after %.1f s", repository.model_id, seconds)
    try:
        cache.remember(repository.revision, repository.commit)
    except OSError as error:
        raise write_error(error, hub.cache) from error
    return cache.snapshot(repository.commit)


def _in_parallel(
    files: Sequence[RepoFile], work: Callable[[RepoFile], object], stop: threading.Event
) -> None:
    """``work`` on each of ``files``; the first error stops the rest and is raised here.

    The threads are daemons and not an executor's: nobody waits at exit for a connection that
    says nothing, and nothing is lost, as every byte that came is in its file.
    """
    pending = deque(files)
    errors: list[BaseException] = []

    def worker() -> None:
        while pending and not stop.is_set():
            try:
                work(pending.popleft())
            except (IndexError, Stopped):
                return
            except BaseException as error:  # whatever it is, it belongs to the caller's thread
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
                thread.join(_PATIENCE / len(threads))
    if errors:
        raise errors[0]
