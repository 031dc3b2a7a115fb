"""Resolves URLs of object stores and web servers to folders in a cache beside the hub's.

The cache has the hub's layout (:mod:`tgi_cli.hub.cache`): an object's identity, which changes with
its ETag, is in place of a checksum, so an object that has been replaced is another file, and no
part of one is continued with another. Only safetensors, GGUF, configuration and tokenizer files
are taken, and code if it is trusted.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tgi_cli.errors import CorruptFileError, ModelError, OfflineError
from tgi_cli.hub import client, gguf_model, model_files
from tgi_cli.hub.cache import RepoCache
from tgi_cli.hub.derived_folders import beside_cache
from tgi_cli.hub.gguf_files import GGUF, is_model_file
from tgi_cli.hub.model_urls import split_url
from tgi_cli.hub.open_remote import open_folder
from tgi_cli.hub.remote_folder import (
    ObjectChangedError,
    RangeRefusedError,
    RemoteFile,
    RemoteFolder,
    call_with_retries,
    digest_of,
    receive,
)
from tgi_cli.hub.repository import RepoFile, Repository
from tgi_cli.hub.transfers import (
    CacheWriter,
    DownloadStopped,
    Fetch,
    download_files,
    resume_partial,
)
from tgi_cli.process.progress import ProgressReporter

logger = logging.getLogger(__name__)

SAFETENSORS = ".safetensors"
CACHE = "tgi-remote"
"""Name of the cache's folder."""


@dataclass(frozen=True, slots=True)
class RemoteListing:
    """What a URL has.

    Attributes:
        folder: to read from.
        files: by name.
        tag: the GGUF file or quantization that the URL names, or None.
        commit: changes with the files.
    """

    folder: RemoteFolder
    files: dict[str, RemoteFile]
    tag: str | None
    commit: str

    @property
    def names(self) -> list[str]:
        """Names of the files."""
        return list(self.files)

    @property
    def is_gguf(self) -> bool:
        """Whether the weights are GGUF files, and no others are there."""
        others = model_files.weight_files(self.names, SAFETENSORS)[0]
        return self.tag is not None or (not others and any(map(is_model_file, self.names)))

    @property
    def repository(self) -> Repository:
        """The same, as the cache takes it."""
        files = {name: RepoFile(name, file.size, file.key) for name, file in self.files.items()}
        return Repository(self.folder.url, "main", self.commit, files)


@contextmanager
def open_listing(model_id: str) -> Iterator[RemoteListing]:
    """List the files behind a URL.

    Raises:
        ConfigError: it is not one that can be read.
        HubError: the server cannot be reached, or refuses.
    """
    url, tag = split_url(model_id)
    is_file = tag is not None and tag.lower().endswith(".gguf")
    with closing(open_folder(url, tag if is_file else None)) as folder:
        files = call_with_retries(folder)
        keys = "\n".join(f"{name} {files[name].key}" for name in sorted(files))
        yield RemoteListing(folder, files, tag, hashlib.sha256(keys.encode()).hexdigest()[:40])


def fetch_remote(
    model_id: str,
    *,
    trust_remote_code: bool,
    weights: bool,
    tokenizer: Path | None,
    progress: ProgressReporter,
) -> tuple[Path, str]:
    """The folder with the model behind a URL, which is downloaded, and its version.

    An earlier download is used if the server cannot be reached.

    Args:
        model_id: the URL.
        trust_remote_code: download code, too.
        weights: require weights, not only the configuration and the tokenizer.
        tokenizer: a folder with the tokenizer to use instead of a GGUF file's.
        progress: progress of the download.

    Raises:
        ConfigError: the URL is not one that can be read.
        HubError: the model is unavailable, changes meanwhile, or has a wrong checksum.
        ModelError: the model cannot be served.
    """
    cache = cache_of(split_url(model_id)[0])
    try:
        with open_listing(model_id) as listing:
            path = _fetch(listing, cache, trust_remote_code, weights, tokenizer, progress)
            return path, listing.commit
    except OfflineError as error:
        found = _earlier(cache, weights)
        if found is None or split_url(model_id)[1] is not None:
            raise
        logger.warning("%s; using %s, downloaded earlier", error.cause, found)
        return found, found.name


def cache_of(url: str) -> RepoCache:
    """The part of the cache for a URL."""
    scheme, _, rest = url.partition("://")
    return RepoCache(beside_cache(CACHE), f"{scheme}/{rest}")


def _fetch(
    listing: RemoteListing,
    cache: RepoCache,
    trust_remote_code: bool,
    weights: bool,
    tokenizer: Path | None,
    progress: ProgressReporter,
) -> Path:
    if listing.is_gguf:

        def fetch(groups: tuple[tuple[str, ...], ...]) -> Path:
            return download_remote(listing, groups, cache, progress)

        return gguf_model.from_repository(listing.repository, listing.tag, fetch, tokenizer)
    names = listing.names
    if model_files.is_adapter(names):
        chosen = model_files.select_adapter_files(names)
        chosen = replace(
            chosen, weights=tuple(w for w in chosen.weights if w.endswith(SAFETENSORS))
        )
    else:
        chosen = model_files.select_files(names, SAFETENSORS, trust_remote_code)
    if not weights:
        return download_remote(listing, (chosen.small,), cache, progress)
    if not chosen.weights:
        if any(name.endswith(".bin") for name in names):
            raise ModelError(
                f"{listing.folder.url} has .bin weights only, and pickles are not taken from URLs",
                "convert them to safetensors, and upload those",
            )
        raise model_files.missing_weights_error(listing.folder.url, SAFETENSORS, names)
    return download_remote(listing, (chosen.small, chosen.weights), cache, progress)


def _earlier(cache: RepoCache, weights: bool) -> Path | None:
    """The latest complete download."""
    commit = cache.commit_of(None)
    if commit is None:
        return None
    folder = cache.snapshot(commit)
    whole = model_files.is_complete(folder, SAFETENSORS)
    return folder if whole or (not weights and (folder / "config.json").is_file()) else None


def download_remote(
    listing: RemoteListing,
    names: tuple[tuple[str, ...], ...],
    cache: RepoCache,
    progress: ProgressReporter,
) -> Path:
    """Complete the named files in the cache; see :func:`tgi_cli.hub.transfers.download_files`."""

    @contextmanager
    def connect(reporter: ProgressReporter, count: int, stop: threading.Event) -> Iterator[Fetch]:
        writer = CacheWriter(cache, listing.commit, reporter, count)
        yield RemoteDownloader(listing, writer, reporter, stop).fetch

    return download_files(listing.repository, names, cache, progress, connect)


@dataclass
class RemoteDownloader:
    """Downloads files of one folder; its methods may run in several threads."""

    listing: RemoteListing
    writer: CacheWriter
    progress: ProgressReporter
    stop: threading.Event

    def fetch(self, file: RepoFile) -> Path:
        """Complete ``file`` in the cache and return its path in the snapshot.

        Raises:
            CorruptFileError: the checksum was wrong twice.
            HubError: the object has changed, the disk is full, or the server refuses.
            DownloadStopped: ``stop`` was set; received bytes remain.
        """
        return self.writer.complete(file, self._receive_checked, self._wrong)

    def _wrong(self, file: RepoFile) -> CorruptFileError:
        kind = "SHA256SUMS" if self.listing.files[file.name].sha256 else "its ETag"
        return CorruptFileError(
            f"{file.name} of {self.listing.folder.url} arrived twice with another checksum than "
            f"{kind} says",
            "upload the file again, or correct the checksum",
        )

    def _receive_checked(self, file: RepoFile, partial: Path) -> bool:
        """Download the rest of ``partial``; return whether it has the checksum, if one is known."""
        remote = self.listing.files[file.name]
        try:
            found = self._receive(file, remote, partial)
        except ObjectChangedError:
            partial.unlink(missing_ok=True)
            raise
        expected = remote.sha256 or remote.md5
        wrong = expected and found != expected
        if wrong and not remote.sha256:
            wrong = self.listing.folder.checks_md5(remote)
        if not wrong and not remote.has_checksum:
            self._log_unverified(remote, found)
        return not wrong

    def _log_unverified(self, remote: RemoteFile, found: str) -> None:
        """Say which weights may have arrived damaged."""
        if not remote.name.endswith((SAFETENSORS, GGUF)) or found == remote.parts_md5:
            return
        if remote.parts_md5 and self.listing.folder.checks_md5(remote):
            logger.warning(
                "%s could not be verified: it was uploaded in parts of an unusual length, or has "
                "changed on the way; SHA256SUMS beside it would tell",
                remote.name,
            )
        else:
            logger.info("%s has no checksum: its size alone was verified", remote.name)

    def _receive(self, file: RepoFile, remote: RemoteFile, partial: Path) -> str:
        """Download the rest of ``partial``, resuming after cuts; return its checksum."""
        digest = digest_of(remote)
        size = resume_partial(file, partial, digest)
        # Unbuffered: received bytes survive however this process ends.
        with partial.open("ab", buffering=0) as sink:

            def write(block: memoryview) -> None:
                rest = block
                while rest:
                    rest = rest[sink.write(rest) :]
                digest.update(block)
                self.progress.advance(len(block))

            for attempt in range(client.MAX_ATTEMPTS):
                if attempt:
                    logger.info("%s: the server sends it from the start again", file.name)
                    self.progress.advance(-sink.tell())
                    digest, size = digest_of(remote), 0
                    sink.truncate(0)
                    sink.seek(0)
                try:
                    size = receive(self.listing.folder, remote, size, file.size, write, self.stop)
                    break
                except RangeRefusedError:
                    continue
            else:
                raise OfflineError(
                    f"{self.listing.folder.url} was cut off {client.MAX_ATTEMPTS} times within "
                    f"{file.name}, and does not resume",
                    "the server does not support ranges: use another",
                )
        if size < file.size:
            raise DownloadStopped
        return str(digest.hexdigest())
