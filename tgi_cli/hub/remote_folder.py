"""Folders of files behind a URL: what object stores and web servers have in common."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tgi_cli.errors import HubError, ModelNotFoundError, OfflineError
from tgi_cli.hub import client
from tgi_cli.hub.parts_checksum import PartsDigest

logger = logging.getLogger(__name__)

CHECKSUMS = "SHA256SUMS"
"""A folder's checksums: the output of ``sha256sum``, which takes precedence over a store's own."""

CHECKSUM_BYTES = 1 << 20
"""Limit of its size."""

_LINE = re.compile(r"(?P<sum>[0-9a-f]{64})  ?[ *]?(?P<name>\S.*)")


class TransferError(Exception):
    """The connection was lost, or the server asks to try again. The message has no URL.

    Attributes:
        retry_after: seconds that the server asks to wait, or None.
    """

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class ObjectChangedError(HubError):
    """A file that has been replaced since it was listed."""


class RangeRefusedError(Exception):
    """The server sends whole files only."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file behind a URL.

    Attributes:
        name: path in the folder.
        size: in bytes.
        validator: changes with the content: an ETag, or a date of the last change.
        sha256, md5: checksums in hexadecimal digits; empty if unknown.
        parts_md5: checksum of the parts in which it was uploaded
            (:mod:`tgi_cli.hub.parts_checksum`); empty if unknown.
    """

    name: str
    size: int
    validator: str
    sha256: str = ""
    md5: str = ""
    parts_md5: str = ""

    @property
    def has_checksum(self) -> bool:
        """Whether its content can be verified for certain."""
        return bool(self.sha256 or self.md5)

    @property
    def key(self) -> str:
        """Changes with the content, and names it in a cache."""
        if self.sha256:
            return self.sha256
        stamp = f"{self.name}\0{self.size}\0{self.validator}"
        return hashlib.sha256(stamp.encode()).hexdigest()[:40]


class RemoteFolder(Protocol):
    """Files behind a URL.

    Attributes:
        url: without credentials; for messages.
    """

    url: str

    def files(self) -> dict[str, RemoteFile]:
        """The files by name, once asked for.

        Raises:
            TransferError: the server cannot be reached, or asks to try again.
            HubError: it refuses.
        """
        ...

    def stream(self, file: RemoteFile, start: int, end: int) -> Iterator[Any]:
        """The bytes ``start`` to ``end`` of a file in buffers, as they arrive; perhaps fewer.

        Raises:
            TransferError: as :meth:`files`.
            RangeRefusedError: the server sends the file from its first byte although ``start`` > 0.
            HubError: it refuses, or the file has changed since it was listed.
        """
        ...

    def checks_md5(self, file: RemoteFile) -> bool:
        """Whether ``file.md5`` is that of the content: ETags may only look like it."""
        ...

    def close(self) -> None:
        """Close connections. May be called twice."""
        ...


def receive(
    folder: RemoteFolder,
    file: RemoteFile,
    start: int,
    end: int,
    write: Callable[[memoryview], object],
    stop: threading.Event,
) -> int:
    """Pass the bytes ``start`` to ``end`` of a file to ``write``; after a cut, continue from there.

    Returns:
        The position reached: ``end``, or less if ``stop`` was set.

    Raises:
        OfflineError: several attempts in a row have brought nothing.
        RangeRefusedError, HubError: as :meth:`RemoteFolder.stream`.
    """
    position, attempt = start, 0
    while position < end and not stop.is_set():
        before = position
        try:
            for block in folder.stream(file, position, end):
                if stop.is_set():
                    return position
                # Bytes beyond the size that was listed are dropped: the checksum decides.
                view = memoryview(block).cast("B")[: end - position]
                write(view)
                position += len(view)
            failure = TransferError("the connection was closed early")
        except TransferError as error:
            failure = error
        if position < end:
            attempt = 1 if position > before else attempt + 1
            wait_to_retry(folder, file.name, failure, attempt, stop)
    return position


def call_with_retries(folder: RemoteFolder) -> dict[str, RemoteFile]:
    """:meth:`RemoteFolder.files`, tried several times. Raises OfflineError and HubError."""
    attempt = 0
    while True:
        attempt += 1
        try:
            return folder.files()
        except TransferError as error:
            wait_to_retry(folder, "the list of files", error, attempt, threading.Event())


def wait_to_retry(
    folder: RemoteFolder, what: str, failure: TransferError, attempt: int, stop: threading.Event
) -> None:
    """Sleep before the next attempt. Raises OfflineError if there is none."""
    requested = failure.retry_after
    if attempt >= client.MAX_ATTEMPTS or (requested or 0) > client.MAX_DELAY:
        raise OfflineError(
            f"cannot read {what} of {folder.url}: {failure}",
            "check the address and the network, and run the same again: the download resumes",
        ) from failure
    seconds = client.retry_delay(attempt, requested)
    logger.warning("%s: %s; trying again in %.0f s", what, failure, seconds)
    stop.wait(seconds)


def with_checksums(files: Mapping[str, RemoteFile], text: str) -> dict[str, RemoteFile]:
    """The files with the checksums of a :data:`CHECKSUMS` file."""
    sums = {
        match["name"].removeprefix("./"): match["sum"]
        for line in text.splitlines()
        if (match := _LINE.fullmatch(line.strip()))
    }
    return {name: replace(file, sha256=sums.get(name, "")) for name, file in files.items()}


def read_small(folder: RemoteFolder, file: RemoteFile, limit: int) -> bytes:
    """A small file as a whole. Raises HubError and OfflineError."""
    if file.size > limit:
        raise HubError(f"{file.name} of {folder.url} has more than {limit >> 10} KiB")
    data = bytearray()
    receive(folder, file, 0, file.size, data.extend, threading.Event())
    return bytes(data)


def changed_error(url: str, name: str) -> ObjectChangedError:
    """The error for a file that has been replaced since it was listed."""
    return ObjectChangedError(
        f"{name} of {url} has changed during the download",
        "run the same again when nothing writes there",
    )


def not_found_error(url: str) -> ModelNotFoundError:
    """The error for a URL without a model."""
    return ModelNotFoundError(
        f"there is no model at {url}",
        "the URL is that of the folder with config.json and model.safetensors, or of a GGUF file",
    )


def names_below(names: Iterable[str]) -> list[str]:
    """Names that are safe as paths below a folder, of those that a server has given."""
    return [
        name
        for name in names
        if name and not name.startswith("/") and ".." not in name.split("/") and "\\" not in name
    ]


def digest_of(file: RemoteFile) -> Any:
    """A running checksum of the kind that is known of a file."""
    if file.md5 and not file.sha256:
        return hashlib.md5(usedforsecurity=False)
    if file.parts_md5 and not file.sha256:
        return PartsDigest(file.size, file.parts_md5)
    return hashlib.sha256()
