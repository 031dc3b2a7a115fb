"""A stand-in for the Hugging Face hub, on a port of 127.0.0.1, with faults to order.

    with HubServer() as hub:
        commit = hub.add("org/name", {"config.json": b"{}", "model.safetensors": data})
        hub.fault("model.safetensors", Cut(after=1000))
        ...  # HF_ENDPOINT=hub.url
        assert hub.ranges("model.safetensors") == [None, "bytes=1000-"]

It speaks the part of the hub's API that downloads use: the listing of a model with sizes and
checksums, and ``resolve`` with ETag, X-Repo-Commit, X-Linked-* and Range. Large files are
redirected to a second host name, as the hub redirects them to a CDN.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LISTING = "the listing"
"""The name under which faults of the model listing are ordered."""

_LARGE = (".safetensors", ".bin", ".model", ".gguf")


@dataclass(frozen=True)
class Cut:
    """Close the connection after so many bytes of the body."""

    after: int


@dataclass(frozen=True)
class Stall:
    """Send so many bytes of the body, then nothing until the server closes."""

    after: int


@dataclass(frozen=True)
class Refuse:
    """Answer with a status, and Retry-After if given."""

    status: int
    retry_after: int | None = None


@dataclass(frozen=True)
class Alter:
    """Flip the last byte of the body."""


@dataclass(frozen=True)
class IgnoreRange:
    """Answer 200 with the whole file."""


Fault = Cut | Stall | Refuse | Alter | IgnoreRange


@dataclass
class Repo:
    """A model: its files, its commit, and who may see it."""

    files: dict[str, bytes]
    commit: str
    revisions: set[str] = field(default_factory=lambda: {"main"})
    private: bool = False
    gated: bool = False
    bare_listing: bool = False
    """Whether the listing leaves sizes and checksums out, as some mirrors do."""


@dataclass(frozen=True)
class Seen:
    """A request for a file's bytes."""

    name: str
    range: str | None
    authorization: str | None
    host: str


class HubServer:
    """The server; ``reader`` is a token that may read everything, ``stranger`` one that may not."""

    reader = "hf_reader"
    stranger = "hf_stranger"

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.seen: list[Seen] = []
        self.listings = 0
        self.closing = threading.Event()
        self._faults: dict[str, deque[Fault]] = defaultdict(deque)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, model_id: str, files: dict[str, bytes], **options: Any) -> str:
        """Publish a model; returns its commit. ``options`` are fields of Repo."""
        digest = hashlib.sha1()
        for name, data in sorted(files.items()):
            digest.update(name.encode() + data)
        self.repos[model_id] = Repo(files, digest.hexdigest(), **options)
        return digest.hexdigest()

    def fault(self, name: str, fault: Fault, times: int = 1) -> None:
        """Let the next ``times`` requests for a file (or LISTING) go wrong."""
        self._faults[name].extend([fault] * times)

    def clear_faults(self) -> None:
        """Forget the faults that have not occurred."""
        self._faults.clear()

    def next_fault(self, name: str) -> Fault | None:
        faults = self._faults[name]
        return faults.popleft() if faults else None

    def ranges(self, name: str) -> list[str | None]:
        """The Range headers of the requests for a file's bytes so far."""
        return [seen.range for seen in self.seen if seen.name == name]

    def fetched(self) -> set[str]:
        """The names of the files whose bytes were asked for."""
        return {seen.name for seen in self.seen}


def checksum(name: str, data: bytes) -> str:
    """What the hub calls the file: a sha256 for large files, a git blob's sha1 for others."""
    if name.endswith(_LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sibling(repo: Repo, name: str, data: bytes) -> dict[str, Any]:
    if repo.bare_listing:
        return {"rfilename": name}
    sibling: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": "0" * 40}
    if name.endswith(_LARGE):
        oid = checksum(name, data)
        sibling["lfs"] = {"sha256": oid, "size": len(data), "pointerSize": 130}
    else:
        sibling["blobId"] = checksum(name, data)
    return sibling


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> HubServer:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the tests' output clean."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/(.+?)(?:/revision/(.+))?", path):
            self._listing(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/(cdn/)?(.+?)/resolve/([^/]+|refs/pr/\d+)/(.+)", path):
            self._file(match[2], match[3], match[4], through_cdn=bool(match[1]))
        else:
            self._refuse(404, "")

    def _listing(self, model_id: str, revision: str) -> None:
        self.hub.listings += 1
        fault = self.hub.next_fault(LISTING)
        if isinstance(fault, Refuse):
            self._refuse(fault.status, "", retry_after=fault.retry_after)
            return
        repo = self._visible(model_id, revision)
        if repo is None:
            return
        siblings = [_sibling(repo, name, data) for name, data in repo.files.items()]
        listing = {"id": model_id, "modelId": model_id, "sha": repo.commit, "siblings": siblings}
        self._answer(200, json.dumps(listing).encode(), {"content-type": "application/json"})

    def _file(self, model_id: str, revision: str, name: str, through_cdn: bool) -> None:
        if through_cdn:
            # A signed address: whoever has it may read.
            repo = self.hub.repos[model_id]
        else:
            found = self._visible(model_id, revision)
            if found is None:
                return
            repo = found
            if repo.gated and self._token() != self.hub.reader:
                self._refuse(403 if self._token() else 401, "GatedRepo")
                return
        if name not in repo.files:
            self._refuse(404, "EntryNotFound")
            return
        data = repo.files[name]
        about = {
            "ETag": f'"{checksum(name, data)}"',
            "X-Repo-Commit": repo.commit,
            "X-Linked-Size": str(len(data)),
            "X-Linked-Etag": f'"{checksum(name, data)}"',
            "Accept-Ranges": "bytes",
        }
        if name.endswith(_LARGE) and not through_cdn:
            place = f"http://localhost:{self.hub.port}/cdn{urlsplit(self.path).path}"
            self._answer(302, b"", {**about, "Location": place})
            return
        if self.command == "HEAD":
            self._answer(200, data, about)
            return
        self._bytes(name, data, about)

    def _bytes(self, name: str, data: bytes, about: dict[str, str]) -> None:
        asked = self.headers.get("range")
        headers: Message = self.headers
        self.hub.seen.append(
            Seen(name, asked, headers.get("authorization"), headers.get("host", ""))
        )
        fault = self.hub.next_fault(name)
        if isinstance(fault, Refuse):
            self._refuse(fault.status, "", retry_after=fault.retry_after)
            return
        if isinstance(fault, Alter):
            data = data[:-1] + bytes([data[-1] ^ 1])
        status = 200
        body = data
        if asked and not isinstance(fault, IgnoreRange):
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            body = data[start:]
            status = 206
            about["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if isinstance(fault, Cut | Stall):
            self._answer(status, body[: fault.after], about, announced=len(body))
            if isinstance(fault, Stall):
                self.hub.closing.wait(30)
            self.close_connection = True
        else:
            self._answer(status, body, about)

    def _token(self) -> str | None:
        return self.headers.get("authorization", "").removeprefix("Bearer ") or None

    def _visible(self, model_id: str, revision: str) -> Repo | None:
        """The repository, or None after an answer that says why not."""
        token = self._token()
        if token not in (None, self.hub.reader, self.hub.stranger):
            self._refuse(401, "", "Invalid credentials in Authorization header")
            return None
        repo = self.hub.repos.get(model_id)
        if repo is None or (repo.private and token != self.hub.reader):
            self._refuse(404 if token else 401, "RepoNotFound")
            return None
        if revision not in repo.revisions | {repo.commit}:
            self._refuse(404, "RevisionNotFound")
            return None
        return repo

    def _refuse(
        self, status: int, code: str, message: str = "", retry_after: int | None = None
    ) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        if retry_after is not None:
            headers["Retry-After"] = str(retry_after)
        self._answer(status, b'{"error": "refused"}', {k: v for k, v in headers.items() if v})

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str], announced: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if announced is None else announced))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.wfile.flush()
