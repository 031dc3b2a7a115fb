"""A stand-in for S3, and for a plain web server, on a port of 127.0.0.1, with faults to order.

    with StoreServer() as store:
        store.put("bucket", "model/config.json", b"{}")
        store.fault("model/config.json", Cut(after=1000))
        ...  # AWS_ENDPOINT_URL=store.url, or {store.url}/bucket/model
        assert store.ranges("model/config.json") == [None, "bytes=1000-1999"]

It lists objects (ListObjectsV2) and sends them, with ETag, Range and If-Match. Signatures are not
verified, only the access key in them.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from email.utils import formatdate
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.tools.hub_server import Alter, Cut, Fault, IgnoreRange, Refuse

LISTING = "the listing"
_CHANGED = 1_700_000_000


@dataclass(frozen=True)
class Redirect:
    """Answer 302 with another address."""

    location: str


@dataclass
class StoredObject:
    """An object. ``encrypted``: with a key of the store's, so that its ETag is no checksum."""

    data: bytes
    encrypted: bool = False
    etag: str | None = None

    @cached_property
    def tag(self) -> str:
        if self.etag is not None:
            return self.etag
        salt = b"key" if self.encrypted else b""
        return f'"{hashlib.md5(salt + self.data).hexdigest()}"'


@dataclass(frozen=True)
class StoreRequest:
    """A request for an object's bytes, and how many of them were sent."""

    key: str
    range: str | None
    authorization: str | None
    sent: int


class StoreServer:
    """The server; ``access_key``, if set, is the only one that may read."""

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, StoredObject]] = defaultdict(dict)
        self.access_key: str | None = None
        self.seen: list[StoreRequest] = []
        self.listings: list[str] = []
        self.closing = threading.Event()
        self._faults: dict[str, deque[Fault | Redirect]] = defaultdict(deque)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._server.store = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> StoreServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put(self, bucket: str, key: str, data: bytes, **options: Any) -> None:
        """Store an object; ``options`` are fields of StoredObject."""
        self.buckets[bucket][key] = StoredObject(data, **options)

    def put_folder(self, bucket: str, prefix: str, files: dict[str, bytes]) -> None:
        """Store the files of a model below a prefix."""
        for name, data in files.items():
            self.put(bucket, f"{prefix}/{name}", data)

    def fault(self, key: str, fault: Fault | Redirect, times: int = 1) -> None:
        """Let the next ``times`` requests for an object's bytes (or LISTING) go wrong."""
        self._faults[key].extend([fault] * times)

    def next_fault(self, key: str) -> Fault | Redirect | None:
        faults = self._faults[key]
        return faults.popleft() if faults else None

    def requests(self, key: str) -> list[StoreRequest]:
        """The requests for an object's bytes so far."""
        return [seen for seen in self.seen if seen.key == key]

    def ranges(self, key: str) -> list[str | None]:
        """Their Range headers."""
        return [seen.range for seen in self.requests(key)]

    def fetched(self) -> set[str]:
        """The keys of the objects whose bytes were asked for."""
        return {seen.key for seen in self.seen}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def store(self) -> StoreServer:
        return self.server.store  # type: ignore[attr-defined, no-any-return]

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the tests' output clean."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = parse_qs(parts.query)
        allowed = self.store.access_key
        signed = self.headers.get("authorization", "") + parts.query
        if allowed is not None and f"Credential={allowed}" not in unquote(signed):
            self._error(403, "InvalidAccessKeyId", f"<AWSAccessKeyId>{escape(signed)}")
        elif not key and "list-type" in query:
            self._list(bucket, query.get("prefix", [""])[0])
        elif key not in self.store.buckets[bucket]:
            self._error(404, "NoSuchKey")
        else:
            self._object(key, self.store.buckets[bucket][key])

    def _list(self, bucket: str, prefix: str) -> None:
        self.store.listings.append(prefix)
        fault = self.store.next_fault(LISTING)
        if isinstance(fault, Refuse):
            self._error(fault.status, "SlowDown")
            return
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(found.data)}</Size>"
            f"<ETag>{escape(found.tag)}</ETag><LastModified>2026-01-01T00:00:00.000Z"
            "</LastModified></Contents>"
            for key, found in sorted(self.store.buckets[bucket].items())
            if key.startswith(prefix)
        )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _object(self, key: str, found: StoredObject) -> None:
        about = {"Accept-Ranges": "bytes", "Last-Modified": formatdate(_CHANGED, usegmt=True)}
        if found.tag:
            about["ETag"] = found.tag
        if found.encrypted:
            about["x-amz-server-side-encryption"] = "aws:kms"
        wanted = self.headers.get("if-match")
        if wanted is not None and wanted != found.tag:
            self._error(412, "PreconditionFailed")
            return
        if self.command == "HEAD":
            self._answer(200, found.data, about)
            return
        asked = self.headers.get("range")
        fault = self.store.next_fault(key)
        data, status = memoryview(found.data), 200
        if isinstance(fault, Alter):
            data = memoryview(found.data[:-1] + bytes([found.data[-1] ^ 1]))
        if asked and not isinstance(fault, IgnoreRange):
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
            assert match is not None
            start, end = int(match[1]), int(match[2] or len(data) - 1)
            about["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            data, status = data[start : end + 1], 206
        sent = len(data)
        if isinstance(fault, Refuse | Redirect):
            sent = 0
        elif isinstance(fault, Cut):
            sent = fault.after
        # Recorded first: the client may have read the whole answer before this thread goes on.
        header = self.headers.get("authorization")
        self.store.seen.append(StoreRequest(key, asked, header, sent))
        if isinstance(fault, Refuse):
            self._error(fault.status, "SlowDown")
        elif isinstance(fault, Redirect):
            self._answer(302, b"", {"Location": fault.location})
        else:
            self._answer(status, data[:sent], about, announced=len(data))
            self.close_connection |= isinstance(fault, Cut)

    def _error(self, status: int, code: str, detail: str = "") -> None:
        text = f"<Error><Code>{code}</Code><Message>refused</Message>{detail}</Error>"
        self._answer(status, text.encode(), {"Content-Type": "application/xml"})

    def _answer(
        self,
        status: int,
        body: bytes | memoryview,
        headers: dict[str, str],
        announced: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if announced is None else announced))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.wfile.flush()
