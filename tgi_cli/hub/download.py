"""Downloads files of a repository into the cache: several at a time, resumed and verified.

Bytes are transferred by plain HTTP with ``Range``, which can resume inside a file, in this process
or the next. (huggingface_hub restarts an interrupted file.) hf-xet is used for files that the hub
does not serve over HTTP, and where the user prefers it.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tgi_cli.errors import CorruptFileError, HubError
from tgi_cli.hub import client
from tgi_cli.hub.cache import RepoCache
from tgi_cli.hub.client import HubEnvironment
from tgi_cli.hub.repository import LIBRARY_NAME, RepoFile, Repository, error_translator
from tgi_cli.hub.transfers import (
    CacheWriter,
    DownloadStopped,
    Fetch,
    download_files,
    resume_partial,
)
from tgi_cli.process.progress import ProgressReporter
from tgi_cli.version import __version__

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

HTTP_LIMIT = 50_000_000_000
"""Bytes; the hub serves larger files through xet only."""

_SHA256_LENGTH = 64


class _NotResumable(Exception):
    """The server ignores Range, or the bytes here do not fit its file."""


def download_progress(*, quiet: bool = False, json_output: bool = False) -> ProgressReporter:
    """A reporter for downloads: silent, log lines for ``json_output``, else a bar or log lines."""
    return ProgressReporter(
        show_bar=False if quiet or json_output else sys.stderr.isatty(),
        log_interval=None if quiet else 10.0,
    )


def download(
    repository: Repository,
    names: Sequence[Sequence[str]],
    hub: HubEnvironment,
    progress: ProgressReporter,
) -> Path:
    """Complete the named files of a repository on the hub; see :func:`download_files`."""
    cache = RepoCache(hub.cache, repository.model_id)

    @contextmanager
    def connect(reporter: ProgressReporter, count: int, stop: threading.Event) -> Iterator[Fetch]:
        with _http_client(hub) as http:
            writer = CacheWriter(cache, repository.commit, reporter, count)
            yield FileDownloader(repository, writer, hub, http, reporter, stop).fetch

    return download_files(repository, names, cache, progress, connect)


def _http_client(hub: HubEnvironment) -> httpx.Client:
    """The HTTP client of one download, with proxies from the environment."""
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


@dataclass
class FileDownloader:
    """Downloads files of one repository; its methods may run in several threads."""

    repository: Repository
    writer: CacheWriter
    hub: HubEnvironment
    http: httpx.Client
    progress: ProgressReporter
    stop: threading.Event

    def __post_init__(self) -> None:
        self.cache = self.writer.cache
        self._to_error = error_translator(
            self.repository.model_id, self.repository.revision, self.hub
        )

    def fetch(self, file: RepoFile) -> Path:
        """Complete ``file`` in the cache and return its path in the snapshot.

        Raises:
            CorruptFileError: the checksum was wrong twice.
            DiskFullError, HubError, OfflineError: as their names say.
            DownloadStopped: ``stop`` was set; received bytes remain.
        """
        if not self.cache.has(file) and self._uses_xet(file):
            # huggingface_hub takes the lock itself.
            return self.writer.counted(file, partial(self._fetch_xet, file))
        return self.writer.complete(file, self._receive_checked, self._wrong)

    def _wrong(self, file: RepoFile) -> CorruptFileError:
        return CorruptFileError(
            f"{file.name} of {self.repository.model_id} arrived twice with a wrong checksum",
            "a proxy or mirror may alter it; check HF_ENDPOINT, or try again later",
        )

    def _receive_checked(self, file: RepoFile, part: Path) -> bool:
        """Download the rest of ``part``; return whether it has the checksum, if one is known."""
        return self._receive(file, part) == file.checksum or not _is_checksum(file.checksum)

    def _receive(self, file: RepoFile, part: Path) -> str:
        """Download the rest of ``part``, resuming after cuts; return its checksum."""
        digest = _digest_for(file)
        size = resume_partial(file, part, digest)
        retryable: tuple[type[Exception], ...] = (
            client.RetryableStatus,
            *client.transport_errors(),
        )
        attempt = 0
        # Unbuffered: received bytes survive however this process ends.
        with part.open("ab", buffering=0) as sink:
            while size < file.size:
                failure: Exception = ConnectionError("the connection was closed early")
                try:
                    self._stream(file, sink, size, digest)
                except _NotResumable:
                    logger.info("%s: the hub sends it from the start again", file.name)
                    self.progress.advance(-size)
                    digest, size = _digest_for(file), 0
                    sink.truncate(0)
                    sink.seek(0)
                    continue
                except retryable as error:
                    failure = error
                # After any progress, attempts are counted from 1 again.
                attempt = 1 if sink.tell() > size else attempt + 1
                size = sink.tell()
                if size < file.size and client.wait_to_retry(
                    self.hub, file.name, failure, attempt, stop=self.stop
                ):
                    raise DownloadStopped
        return str(digest.hexdigest())

    def _stream(self, file: RepoFile, sink: FileIO, start: int, digest: Any) -> None:
        """Send one GET from byte ``start`` on.

        Raises:
            RetryableStatus: the hub answered with a retryable status.
            _NotResumable: it sends the file from its first byte although ``start`` > 0.
        """
        path = f"{self.repository.model_id}/resolve/{self.repository.commit}/{quote(file.name)}"
        headers = {"range": f"bytes={start}-"} if start else {}
        with self.http.stream("GET", f"{self.hub.endpoint}/{path}", headers=headers) as response:
            status = response.status_code
            if status >= 400 and not (status == 416 and start):
                raise client.status_error(self._to_error, status, response.headers)
            resumed = response.headers.get("content-range", "").startswith(f"bytes {start}-")
            if start and not (status == 206 and resumed):
                raise _NotResumable
            remaining = file.size - start
            for block in response.iter_bytes():
                if self.stop.is_set():
                    raise DownloadStopped
                # Bytes beyond the announced size are dropped: the checksum decides.
                block = block[:remaining]
                remaining -= len(block)
                view = memoryview(block)
                while view:
                    view = view[sink.write(view) :]
                digest.update(block)
                self.progress.advance(len(block))

    def _uses_xet(self, file: RepoFile) -> bool:
        large = file.size > HTTP_LIMIT
        preferred = self.hub.prefer_xet and not self.cache.partial(file).exists()
        return (large or preferred) and find_spec("hf_xet") is not None

    def _fetch_xet(self, file: RepoFile) -> Path:
        """Let huggingface_hub download: hf-xet verifies every chunk's hash as it writes."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        def request() -> str:
            return hf_hub_download(
                self.repository.model_id,
                file.name,
                revision=self.repository.commit,
                cache_dir=self.cache.root,
                endpoint=self.hub.endpoint,
                token=self.hub.token or False,
                tqdm_class=tqdm_class(self.progress),
                library_name=LIBRARY_NAME,
                library_version=__version__,
            )

        try:
            path = Path(
                client.call_with_retries(request, self.hub, file.name, self._to_error, self.stop)
            )
        except LocalEntryNotFoundError as error:
            raise client.unreachable_error(self.hub, error.__cause__ or error) from error
        except RuntimeError as error:
            # hf-xet is native code: all its failures are RuntimeErrors.
            raise HubError(
                f"hf-xet could not fetch {file.name}: {error}",
                "run the same again, or set HF_HUB_DISABLE_XET=1 to use plain HTTP",
            ) from error
        if (size := path.stat().st_size) != file.size:
            path.resolve().unlink()
            raise CorruptFileError(
                f"{file.name} has {size} bytes instead of {file.size}", "run the same again"
            )
        return path


def tqdm_class(progress: ProgressReporter) -> type:
    """A tqdm class that feeds ``progress``, for libraries that require one."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Feed(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            progress.advance(int(n or 0))

        def update_transfer(self, n: float) -> None:
            """Ignore bytes on the wire, which xet reports beside those written."""

    return Feed


def _is_checksum(name: str) -> bool:
    """Whether a blob's name is a checksum: mirrors may use any name."""
    return len(name) in (40, _SHA256_LENGTH) and not set(name) - set("0123456789abcdef")


def _digest_for(file: RepoFile) -> Any:
    """A running checksum of the hub's kind: sha256, or sha1 of a git blob."""
    if len(file.checksum) == _SHA256_LENGTH:
        return hashlib.sha256()
    return hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
