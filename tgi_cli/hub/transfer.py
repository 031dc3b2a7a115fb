"""One file from the hub into the cache: resumed where it was cut, checked while it comes.

The bytes come over plain HTTP with ``Range``: that is what can go on inside a file after a cut,
in this process or the next. (huggingface_hub starts a cut file anew.) hf-xet takes over for
files that the hub does not give out over HTTP, and where the user prefers it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tgi_cli import __version__
from tgi_cli.errors import CorruptFileError, HubError
from tgi_cli.hub import retry
from tgi_cli.hub.cache import RepoCache, locked, write_error
from tgi_cli.hub.environment import HubEnvironment
from tgi_cli.hub.progress import Progress
from tgi_cli.hub.repository import LIBRARY, RepoFile, Repository, translate

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

CHUNK = 1 << 20
HTTP_LIMIT = 50_000_000_000
"""Bytes; the hub serves larger files through xet only."""
_SHA256_LENGTH = 64


class Stopped(Exception):
    """The download was given up by the user or because another file failed."""


def new_client(hub: HubEnvironment) -> httpx.Client:
    """The HTTP client of one download; it takes its proxies from the environment."""
    import httpx
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers = build_hf_headers(
        token=hub.token or False, library_name=LIBRARY, library_version=__version__
    )
    return httpx.Client(
        headers={**headers, "accept-encoding": "identity"},
        follow_redirects=True,
        timeout=httpx.Timeout(hub.timeout, connect=10.0),
    )


class Transfer:
    """Fetches the files of one repository; its methods may run in several threads."""

    def __init__(
        self,
        repository: Repository,
        cache: RepoCache,
        hub: HubEnvironment,
        client: httpx.Client,
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        self._repository = repository
        self._cache = cache
        self._hub = hub
        self._client = client
        self._progress = progress
        self._stop = stop
        self._to_error = translate(repository.model_id, repository.revision, hub)

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
            with locked(self._cache.lock(file)):
                if self._cache.has(file):
                    logger.debug("%s: already in the cache", file.name)
                else:
                    self._fetch_http(file)
                return self._cache.link(file, self._repository.commit)
        except OSError as error:
            raise write_error(error, self._cache.root) from error
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
        transient: tuple[type[Exception], ...] = (_Refused, *retry.transport_errors())
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
        refused = failure if isinstance(failure, _Refused) else None
        asked = refused.retry_after if refused else None
        if attempt >= retry.TRIES or (asked or 0) > retry.LONGEST_WAIT:
            if refused:
                raise retry.exhausted(self._hub, refused.status, asked)
            raise retry.unreachable(self._hub, failure) from failure
        seconds = retry.wait_before(attempt, asked)
        logger.warning("%s: %s; trying again in %.0f s", file.name, failure, seconds)
        if self._stop.wait(seconds):
            raise Stopped

    def _stream(self, file: RepoFile, sink: FileIO, start: int, digest: Any) -> None:
        """One GET from byte ``start`` on.

        Raises:
            _Refused: the hub answered with a status that may pass.
            _NotResumable: it sends the file from its first byte although ``start`` > 0.
        """
        path = f"{self._repository.model_id}/resolve/{self._repository.commit}/{quote(file.name)}"
        headers = {"range": f"bytes={start}-"} if start else {}
        with self._client.stream("GET", f"{self._hub.endpoint}/{path}", headers=headers) as reply:
            status = reply.status_code
            if status >= 400 and not (status == 416 and start):
                told = self._to_error(*retry.refusal(status, reply.headers))
                if told is not None:
                    raise told
                raise _Refused(status, retry.retry_after(reply.headers))
            resumed = reply.headers.get("content-range", "").startswith(f"bytes {start}-")
            if start and not (status == 206 and resumed):
                raise _NotResumable
            room = file.size - start
            for block in reply.iter_bytes():
                if self._stop.is_set():
                    raise Stopped
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
                library_name=LIBRARY,
                library_version=__version__,
            )

        try:
            path = Path(retry.call(ask, self._hub, file.name, self._to_error, self._stop))
        except LocalEntryNotFoundError as error:
            raise retry.unreachable(self._hub, error.__cause__ or error) from error
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


class _Refused(Exception):
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
