"""Folders of models whose weights stay behind a URL, for ``--load-format stream``.

Such a folder has the small files, and in place of each safetensors file a sparse one of the same
size, of which only the header has been written: all that reads headers alone works as with whole
files. A file :data:`MARKER` names the place of the weights for readers of tensors.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import struct
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from tgi_cli.errors import ConfigError, CorruptFileError, ModelError
from tgi_cli.files import CONFIG_BYTES, read_json
from tgi_cli.hub import model_files
from tgi_cli.hub.derived_folders import beside_cache, create_once
from tgi_cli.hub.model_urls import split_url
from tgi_cli.hub.open_remote import open_folder
from tgi_cli.hub.remote_folder import (
    RangeRefusedError,
    RemoteFile,
    RemoteFolder,
    receive,
)
from tgi_cli.hub.remote_model import (
    SAFETENSORS,
    RemoteListing,
    cache_of,
    download_remote,
    open_listing,
)
from tgi_cli.hub.safetensors_header import HEADER_BYTES
from tgi_cli.process.progress import ProgressReporter

logger = logging.getLogger(__name__)

MARKER = "remote-weights.json"
CACHE = "tgi-streamed"
"""Name of the folder of such folders, beside the hub's cache."""


@dataclass(frozen=True)
class RemoteWeights:
    """Where the weights of a folder are.

    Attributes:
        url: URL of the remote folder.
        files: the safetensors files in it, by name.
    """

    url: str
    files: Mapping[str, RemoteFile]


def stream_model(
    model_id: str, trust_remote_code: bool, progress: ProgressReporter
) -> tuple[Path, str]:
    """The folder for a model behind a URL without its weights, and the version.

    Raises:
        ConfigError: the URL is not one that can be read.
        HubError: the model is unavailable, or the server does not send ranges.
        ModelError: it has no safetensors weights.
    """
    with open_listing(model_id) as listing:
        url, names = listing.folder.url, listing.names
        if listing.is_gguf or model_files.is_adapter(names):
            raise ConfigError(
                f"--load-format stream reads safetensors, and {model_id} has other weights",
                "leave it off: they are downloaded",
            )
        chosen = model_files.select_files(names, SAFETENSORS, trust_remote_code)
        if not chosen.weights:
            raise model_files.missing_weights_error(url, SAFETENSORS, names)
        small = download_remote(listing, (chosen.small,), cache_of(url), progress)
        stem = re.sub(r"[^\w.-]", "-", split_url(model_id)[0].partition("://")[2])[-80:]

        def fill(scratch: Path) -> None:
            for name in chosen.small:
                (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(small / name, scratch / name)
            for name in chosen.weights:
                _write_stub(listing, name, scratch / name)
            files = {name: asdict(listing.files[name]) for name in chosen.weights}
            _write_marker(scratch, url, files)

        target = beside_cache(CACHE) / f"{stem}-{listing.commit[:12]}"
        target.parent.mkdir(parents=True, exist_ok=True)
        return create_once(target, fill, _check), listing.commit


def _write_stub(listing: RemoteListing, name: str, path: Path) -> None:
    """Write the header of a remote file into a sparse file of its size."""
    file = listing.files[name]
    prefix = _read(listing.folder, file, 0, 8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= min(HEADER_BYTES, file.size - 8):
        raise CorruptFileError(f"{name} of {listing.folder.url} is not a safetensors file")
    path.write_bytes(prefix + _read(listing.folder, file, 8, 8 + length))
    os.truncate(path, file.size)


def _read(folder: RemoteFolder, file: RemoteFile, start: int, end: int) -> bytes:
    data = bytearray()
    try:
        receive(folder, file, start, min(end, file.size), data.extend, threading.Event())
    except RangeRefusedError as error:
        raise ModelError(
            f"{folder.url} does not send ranges of files, which --load-format stream needs",
            "leave it off: the files are downloaded as wholes",
        ) from error
    return bytes(data)


def _write_marker(folder: Path, url: str, files: dict[str, dict[str, object]]) -> None:
    import msgspec

    (folder / MARKER).write_bytes(msgspec.json.encode({"url": url, "files": files}))


def _check(folder: Path) -> object:
    return model_files.check_model(folder, SAFETENSORS)


def remote_weights(folder: Path) -> RemoteWeights | None:
    """Where the weights of a model's folder are; None if they are in it."""
    path = folder / MARKER
    if not path.is_file():
        return None
    return _remote_weights(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _remote_weights(path: Path, changed: int) -> RemoteWeights:
    try:
        found = read_json(path, CONFIG_BYTES)
        files = {name: RemoteFile(**about) for name, about in found["files"].items()}
        return RemoteWeights(str(found["url"]), files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"{path} cannot be read", f"delete {path.parent}") from error


class RangeReader:
    """Reads ranges of the files of a streamed folder, from where they are; several at once.

    A connection that is cut is taken up again after what has arrived.

    Args:
        weights: weights of the folder.
    """

    def __init__(self, weights: RemoteWeights) -> None:
        self._weights = weights
        self._folder = open_folder(weights.url)
        self._stop = threading.Event()

    def read_into(self, target: memoryview, file: Path, offset: int) -> None:
        """Fill ``target`` with the bytes of a file from ``offset`` on.

        Raises:
            HubError: the server cannot be reached, or the file has changed.
            OSError: reading was ended by :meth:`close`.
        """
        remote = self._weights.files[file.name]
        position = 0

        def write(block: memoryview) -> None:
            nonlocal position
            target[position : position + len(block)] = block
            position += len(block)

        end = offset + len(target)
        if receive(self._folder, remote, offset, end, write, self._stop) < end:
            raise OSError("reading was ended")

    def close(self) -> None:
        """End what is being read, and close connections."""
        self._stop.set()
        self._folder.close()
