"""Folders of web servers, whose files are asked for by name, as nothing lists them.

Credentials come from ``~/.netrc`` (or NETRC). httpx does not send them to other hosts to which it
is redirected; a redirection from https to http is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from netrc import NetrcParseError
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from tgi_cli.errors import ConfigError, CorruptFileError, GatedModelError, HubError
from tgi_cli.files import INDEX_BYTES, FileRefusedError, decode_json
from tgi_cli.gguf.reader import SHARD
from tgi_cli.hub import client, model_files
from tgi_cli.hub.remote_folder import (
    CHECKSUM_BYTES,
    CHECKSUMS,
    RangeRefusedError,
    RemoteFile,
    TransferError,
    changed_error,
    not_found_error,
    read_small,
    with_checksums,
)
from tgi_cli.version import __version__

if TYPE_CHECKING:
    import httpx

_TIMEOUT = 30.0
_INDEX = model_files.index_name(".safetensors")
_ASKED = (
    *sorted(model_files.SMALL_FILES),
    "tokenizer.model",
    "model.safetensors",
    "adapter_config.json",
    "adapter_model.safetensors",
    _INDEX,
    CHECKSUMS,
)
"""Names that are asked for."""

_ABSENT = (403, 404, 410)
"""Statuses of files that are not there: buckets behind web servers answer 403."""

_MD5 = re.compile(r'"([0-9a-f]{32})"')


class WebFolder:
    """Implements :class:`tgi_cli.hub.remote_folder.RemoteFolder` by HTTP.

    Args:
        url: URL of the folder.
        gguf: name of a GGUF file in it, which is asked for in place of safetensors.

    Raises:
        ConfigError: ``~/.netrc`` cannot be read.
    """

    def __init__(self, url: str, gguf: str | None = None) -> None:
        import httpx

        self.url = url
        self._gguf = gguf
        self._denied = False
        secure = url.lower().startswith("https://")

        def check(request: httpx.Request) -> None:
            if secure and request.url.scheme != "https":
                raise HubError(f"{url} redirects to a URL without https, which is refused")

        netrc = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
        auth: httpx.Auth | None = None
        if netrc.is_file():
            try:
                auth = httpx.NetRCAuth(str(netrc))
            except (OSError, NetrcParseError) as error:
                raise ConfigError(f"{netrc} cannot be read: {type(error).__name__}") from None
        self._http = httpx.Client(
            headers={"accept-encoding": "identity", "user-agent": f"tgi/{__version__}"},
            follow_redirects=True,
            timeout=httpx.Timeout(_TIMEOUT, connect=10.0),
            event_hooks={"request": [check]},
            auth=auth,
        )

    def files(self) -> dict[str, RemoteFile]:
        if self._gguf is not None:
            found = self._ask([*_parts(self._gguf), CHECKSUMS])
        else:
            found = self._ask(_ASKED)
        if _INDEX in found:
            found |= self._ask(_shards(self.url, self._read(found[_INDEX], INDEX_BYTES)))
        if not set(found) - {CHECKSUMS}:
            raise self._denied_error(403) if self._denied else not_found_error(self.url)
        if CHECKSUMS in found:
            text = self._read(found[CHECKSUMS], CHECKSUM_BYTES).decode("utf-8", "replace")
            found = with_checksums(found, text)
        for file in found.values():
            if not (file.sha256 or file.validator):
                raise HubError(
                    f"{self.url} gives neither an ETag nor a date of {file.name}",
                    f"put a file {CHECKSUMS} there: (cd FOLDER && sha256sum *) > {CHECKSUMS}",
                )
        return found

    def _read(self, file: RemoteFile, limit: int) -> bytes:
        return read_small(self, file, limit)

    def _ask(self, names: Iterable[str]) -> dict[str, RemoteFile]:
        with ThreadPoolExecutor(8, thread_name_prefix="web-folder") as pool:
            found = list(pool.map(self._about, names))
        return {file.name: file for file in found if file is not None}

    def _about(self, name: str) -> RemoteFile | None:
        """Size and validator of a file, or None if it is not there."""
        import httpx

        try:
            answer = self._http.head(self._address(name))
        except httpx.TransportError as error:
            raise TransferError(_reason(error)) from error
        if answer.status_code in _ABSENT:
            self._denied |= answer.status_code == 403
            return None
        self._check(answer)
        length = answer.headers.get("content-length", "")
        if not length.isdigit():
            raise HubError(f"{self.url} does not give the size of {name}")
        tag = answer.headers.get("etag", "")
        return RemoteFile(name, int(length), tag or answer.headers.get("last-modified", ""))

    def _address(self, name: str) -> str:
        return f"{self.url}/{quote(name)}"

    def _check(self, answer: httpx.Response) -> None:
        status = answer.status_code
        if status in client.RETRYABLE_STATUSES:
            requested = client.retry_after(answer.headers)
            raise TransferError(f"the server answered {status}", requested)
        if status in (401, 403, 407):
            raise self._denied_error(status)
        if status >= 400:
            raise HubError(f"{self.url}: the server answered {status}")

    def _denied_error(self, status: int) -> GatedModelError:
        return GatedModelError(
            f"{self.url}: access is denied (the server answered {status})",
            "put the host's credentials into ~/.netrc",
        )

    def stream(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        import httpx

        if start >= end:
            return
        headers = {"range": f"bytes={start}-{end - 1}"} if (start, end) != (0, file.size) else {}
        tag = file.validator
        if tag.startswith('"'):
            headers["if-match"] = tag
        try:
            with self._http.stream("GET", self._address(file.name), headers=headers) as answer:
                if answer.status_code in (404, 410, 412):
                    raise changed_error(self.url, file.name)
                self._check(answer)
                now = answer.headers.get("etag", "") or answer.headers.get("last-modified", "")
                if tag and now and now != tag:
                    raise changed_error(self.url, file.name)
                given = answer.headers.get("content-range", "")
                if start and not (
                    answer.status_code == 206 and given.startswith(f"bytes {start}-")
                ):
                    raise RangeRefusedError
                yield from answer.iter_raw()
        except httpx.TransportError as error:
            raise TransferError(_reason(error)) from error

    def checks_md5(self, file: RemoteFile) -> bool:
        """Never: what an ETag is made of is the server's affair."""
        return False

    def close(self) -> None:
        self._http.close()


def _parts(name: str) -> list[str]:
    """The parts of a GGUF file that is split, or itself."""
    match = SHARD.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    suffix = name[-len(".gguf") :]
    return [f"{match['prefix']}-{i:05}-of-{count:05}{suffix}" for i in range(1, count + 1)]


def _shards(url: str, index: bytes) -> list[str]:
    """The files that an index names, which are in its folder."""
    try:
        parsed = decode_json(index)
        names = set(map(str, parsed["weight_map"].values()))
    except (ValueError, FileRefusedError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"{_INDEX} of {url} cannot be read") from error
    if not all(model_files.is_weight_file(name, ".safetensors") for name in names):
        raise CorruptFileError(f"{_INDEX} of {url} names files that are not safetensors beside it")
    return sorted(names)


def _reason(error: Exception) -> str:
    return str(error).strip() or type(error).__name__
