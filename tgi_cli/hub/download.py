"""One file from the hub into the cache: resumed where it was cut, checked while it comes.

The bytes come over plain HTTP with ``Range``: that is what can go on inside a file after a cut,
in this process or the next. (huggingface_hub starts a cut file anew.) hf-xet takes over for
files that the hub does not give out over HTTP, and where the user prefers it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tgi_cli import __version__
from tgi_cli.errors import CorruptFileError, HubError
from tgi_cli.hub import client
from tgi_cli.hub.cache import RepoCache, disk_error, file_lock, human_bytes, require_space
from tgi_cli.hub.client import HubEnvironment
from tgi_cli.hub.progress import Progress
from tgi_cli.hub.repository import LIBRARY_NAME, RepoFile, Repository, error_translator

if TYPE_CHECKING:
    import httpx


logger = logging.getLogger(__name__)

CHUNK = 1 << 20
HTTP_LIMIT = 50_000_000_000
"""Bytes; the hub serves larger files through xet only."""
_SHA256_LENGTH = 64


class DownloadStopped(Exception):
    """The download was given up by the user or because another file failed."""


def _http_client(hub: HubEnvironment) -> httpx.Client:
    """The HTTP client of one download; it takes its proxies from the environment."""
    import httpx
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers = build_hf_headers(
        token=hub.token or False, library_name=LIBRARY_NAME, library_version=__version__
    )
    return httpx.Client(
        headers={**headers, "accept-encoding": "identity"},
        follow_redirects=True,
        timeout=httpx.Timeout(hub.timeout, connect=10.0),
    )


class FileDownloader:
    """Fetches the files of one repository; its methods may run in several threads."""

    def __init__(
        self,
        repository: Repository,
        cache: RepoCache,
        hub: HubEnvironment,
        http: httpx.Client,
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        self._repository = repository
        self._cache = cache
        self._hub = hub
        self._http = http
        self._progress = progress
        self._stop = stop
        self._to_error = error_translator(repository.model_id, repository.revision, hub)

    def fetch(self, file: RepoFile) -> Path:
        """Make ``file`` complete in the cache and return its path in the snapshot.

        Raises:
            CorruptFileError: what came has the wrong checksum, twice.
            DiskFullError, HubError, OfflineError: as their names say.
            Stopped: ``stop`` was set; what came is kept.
        """
        try:
            self._cache.blob(file).parent.mkdir(parents=True, exist_ok=True)
            if not self._cache.has(file) and self._through_xet(file):
                return self._fetch_xet(file)  # huggingface_hub takes the lock itself
            with file_lock(self._cache.lock(file)):
                if self._cache.has(file):
                    logger.debug("%s: already in the cache", file.name)
                else:
                    self._fetch_http(file)
                return self._cache.link(file, self._repository.commit)
        except OSError as error:
            raise disk_error(error, self._cache.root) from error
        finally:
            self._progress.file_done(file.name)

    def _fetch_http(self, file: RepoFile) -> None:
        partial = self._cache.partial(file)
        for attempt in (1, 2):
            if self._receive(file, partial) == file.checksum or not _known(file.checksum):
                partial.replace(self._cache.blob(file))
                return
            partial.unlink()
            if attempt == 1:
                logger.warning("%s: wrong checksum; fetching it again", file.name)
                self._progress.advance(-file.size)
        raise CorruptFileError(
            f"{file.name} of {self._repository.model_id} arrived twice with a wrong checksum",
            "a proxy or mirror may alter it; check HF_ENDPOINT, or try again later",
        )

    def _receive(self, file: RepoFile, partial: Path) -> str:
        """Bring ``partial`` to its full size; return its checksum. Tries again after cuts."""
        digest = _digest_for(file)
        size = _resume(file, partial, digest)
        transient: tuple[type[Exception], ...] = (_RetryableStatus, *client.transport_errors())
        attempt = 0
        # Unbuffered: what has arrived survives however this process ends.
        with partial.open("ab", buffering=0) as sink:
            while size < file.size:
                failure: Exception = ConnectionError("the connection was closed early")
                try:
                    self._stream(file, sink, size, digest)
                except _NotResumable:
                    logger.info("%s: the hub sends it from the start again", file.name)
                    self._progress.advance(-size)
                    digest, size = _digest_for(file), 0
                    sink.truncate(0)
                    sink.seek(0)
                    continue
                except transient as error:
                    failure = error
                # Bytes that came make it a new cut, not another try at the old one.
                attempt = 1 if sink.tell() > size else attempt + 1
                size = sink.tell()
                if size < file.size:
                    self._wait(file, attempt, failure)
        return str(digest.hexdigest())

    def _wait(self, file: RepoFile, attempt: int, failure: Exception) -> None:
        """Sleep before the next try, or raise what ``failure`` comes to after the last."""
        refused = failure if isinstance(failure, _RetryableStatus) else None
        asked = refused.retry_after if refused else None
        if attempt >= client.MAX_ATTEMPTS or (asked or 0) > client.MAX_DELAY:
            if refused:
                raise client.retries_exhausted(self._hub, refused.status, asked)
            raise client.unreachable_error(self._hub, failure) from failure
        seconds = client.retry_delay(attempt, asked)
        logger.warning("%s: %s; trying again in %.0f s", file.name, failure, seconds)
        if self._stop.wait(seconds):
            raise DownloadStopped

    def _stream(self, file: RepoFile, sink: FileIO, start: int, digest: Any) -> None:
        """One GET from byte ``start`` on.

        Raises:
            _Refused: the hub answered with a status that may pass.
            _NotResumable: it sends the file from its first byte although ``start`` > 0.
        """
        path = f"{self._repository.model_id}/resolve/{self._repository.commit}/{quote(file.name)}"
        headers = {"range": f"bytes={start}-"} if start else {}
        with self._http.stream("GET", f"{self._hub.endpoint}/{path}", headers=headers) as reply:
            status = reply.status_code
            if status >= 400 and not (status == 416 and start):
                told = self._to_error(*client.error_fields(status, reply.headers))
                if told is not None:
                    raise told
                raise _RetryableStatus(status, client.retry_after(reply.headers))
            resumed = reply.headers.get("content-range", "").startswith(f"bytes {start}-")
            if start and not (status == 206 and resumed):
                raise _NotResumable
            room = file.size - start
            for block in reply.iter_bytes():
                if self._stop.is_set():
                    raise DownloadStopped
                # More than was announced cannot be right: the checksum will tell.
                block = block[:room]
                room -= len(block)
                view = memoryview(block)
                while view:
                    view = view[sink.write(view) :]
                digest.update(block)
                self._progress.advance(len(block))

    def _through_xet(self, file: RepoFile) -> bool:
        large = file.size > HTTP_LIMIT
        wanted = self._hub.prefer_xet and not self._cache.partial(file).exists()
        return (large or wanted) and find_spec("hf_xet") is not None

    def _fetch_xet(self, file: RepoFile) -> Path:
        """Let huggingface_hub do it: hf-xet checks every chunk's hash as it writes."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        def ask() -> str:
            return hf_hub_download(
                self._repository.model_id,
                file.name,
                revision=self._repository.commit,
                cache_dir=self._cache.root,
                endpoint=self._hub.endpoint,
                token=self._hub.token or False,
                tqdm_class=self._progress.as_tqdm(),
                library_name=LIBRARY_NAME,
                library_version=__version__,
            )

        try:
            path = Path(
                client.call_with_retries(ask, self._hub, file.name, self._to_error, self._stop)
            )
        except LocalEntryNotFoundError as error:
            raise client.unreachable_error(self._hub, error.__cause__ or error) from error
        except RuntimeError as error:
            # hf-xet is native code: this is how all of its failures arrive.
            raise HubError(
                f"hf-xet could not fetch {file.name}: {error}",
                "run the same again, or set HF_HUB_DISABLE_XET=1 to use plain HTTP",
            ) from error
        if path.stat().st_size != file.size:
            path.resolve().unlink()
            raise CorruptFileError(
                f"{file.name} has {path.stat().st_size} bytes instead of {file.size}",
                "run the same again",
            )
        return path


class _NotResumable(Exception):
    """The server ignores Range, or what is here does not fit what it has."""


class _RetryableStatus(Exception):
    """The hub answered with a status that may pass."""

    def __init__(self, status: int, retry_after: float | None) -> None:
        super().__init__(f"the hub answered {status}")
        self.status = status
        self.retry_after = retry_after


def _resume(file: RepoFile, partial: Path, digest: Any) -> int:
    """Bytes of ``file`` that an earlier run left in ``partial``, fed to ``digest``."""
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


def _known(checksum: str) -> bool:
    """Whether a blob's name is a checksum: a mirror may call it anything."""
    return len(checksum) in (40, _SHA256_LENGTH) and not set(checksum) - set("0123456789abcdef")


def _digest_for(file: RepoFile) -> Any:
    """A running checksum of the kind the hub gives: sha256, or sha1 of a git blob."""
    if len(file.checksum) == _SHA256_LENGTH:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)


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
    with _http_client(hub) as http:
        transfer = FileDownloader(repository, cache, hub, http, progress, stop)
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
        raise disk_error(error, hub.cache) from error
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
            except (IndexError, DownloadStopped):
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
