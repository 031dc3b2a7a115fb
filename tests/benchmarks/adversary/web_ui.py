"""Requests for the web UI's page and files: paths, methods and headers that no browser sends."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

from tests.benchmarks.adversary.client import Client, Response
from tests.benchmarks.adversary.protocol import Attack, pipeline
from tgi_cli.router.api.web_ui import assets
from tgi_cli.router.http.protocol import HEAD_BYTES

_ROOM = HEAD_BYTES - 1000
"""Bytes of a path or a header that the server still reads."""
_HTML = b"accept: text/html\r\n"
_SCRIPT = "/web-ui/app.js"

TRAVERSALS = (
    "/web-ui/../api/web_ui.py",
    "/web-ui/..%2f..%2fapp.py",
    "/web-ui/%2e%2e/%2e%2e/app.py",
    "/web-ui/%2e%2e%2f%2e%2e%2fapp.py",
    "/web-ui/%252e%252e%252fapp.py",
    "/web-ui/..%5c..%5capp.py",
    "/web-ui/..\\..\\app.py",
    "/web-ui/..;/app.py",
    "/web-ui/%c0%ae%c0%ae/app.py",
    "/web-ui/%ff%fe",
    "/web-ui//etc/passwd",
    "/web-ui/%2fetc%2fpasswd",
    "/web-ui/file:///etc/passwd",
    "/web-ui/vendor/../app.js",
    "/web-ui/app.js%00.html",
    "/web-ui/app.js/",
    "/web-ui/./app.js",
    "/web-ui//app.js",
    "/web-ui/APP.JS",
    "/web-ui/app.js%20",
    "/web-ui/vendor",
    "/web-ui/vendor/",
    "/web-ui/",
    "/web-ui/index.html",
    "/web-ui/" + "../" * (_ROOM // 3) + "etc/passwd",
    "/web-ui/" + "%2e%2e%2f" * (_ROOM // 9) + "etc/passwd",
    "/web-ui/" + "/" * _ROOM,
    "/web-ui/" + "%00" * (_ROOM // 3),
)
"""Paths that name none of the page's files, or not in the only way that the server knows."""


def _request(
    path: str, header: bytes = b"", method: str = "GET", body: bytes | None = None
) -> Attack:
    """A request that the server may answer in any way but by an error of its own."""
    shown = header.decode(errors="backslashreplace").replace("\r\n", " ")[:40]
    name = f"{method} {path[:30]} {shown}".rstrip()
    size = len(path) + len(header) + len(body or b"")
    return Attack(
        name + (f" ({size:,} bytes)" if size > 100 else ""),
        lambda c: c.request(method, path, body, header),
        closes=size > _ROOM + 500,
    )


def _unread(client: Client) -> Response:
    """Request every file again and again on some connections, and read nothing."""
    requests = _every_file(client, "GET") * 20
    connections = []
    try:
        for _ in range(20):
            connection = socket.create_connection(client.address, 10)
            connections.append(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            connection.send(requests)  # as much as fits
        time.sleep(1.0)
        return client.request("GET", _SCRIPT, None)
    finally:
        for connection in connections:
            connection.close()


def _every_file(client: Client, method: str, header: bytes = b"") -> bytes:
    """A pipeline of one request for each file, on a connection that stays open."""
    requests = (
        client.build_request(method, f"/web-ui/{name}", None, header) for name in sorted(assets())
    )
    return b"".join(requests).replace(b"connection: close", b"connection: keep-alive")


def _pipelined_files(client: Client, method: str, header: bytes, count: int) -> Response:
    end = client.build_request("GET", _SCRIPT, None)
    return client.send([*[_every_file(client, method, header)] * count, end])


def attacks(limit: int) -> Iterator[Attack]:
    """Yield all attacks on a server that accepts bodies of ``limit`` bytes."""
    for path in TRAVERSALS:
        yield Attack(
            f"GET {path[:60]} ({len(path):,} bytes)" if len(path) > 60 else f"GET {path}",
            lambda c, p=path: c.request("GET", p, None),
            statuses=(400, 404),
        )
    etags = b", ".join(asset.etag.encode() for asset in assets().values())
    for name, value in (
        ("accept", b"," * _ROOM),
        ("accept", b"text/html" + b";" * _ROOM),
        ("accept", b"text/html;q=" + b"9" * _ROOM),
        ("accept", b"text/html;" + b"q=0;" * (_ROOM // 4)),
        ("accept", b"text/html," * (_ROOM // 10)),
        ("accept", b"text/html;q=nan"),
        ("accept", b"\xff\xfetext/html"),
        ("if-none-match", b"," * _ROOM),
        ("if-none-match", b"W/" * (_ROOM // 2)),
        ("if-none-match", b'"a",' * (_ROOM // 4)),
        ("if-none-match", b'"' * _ROOM),
        ("if-none-match", etags),
        ("if-none-match", b"*"),
        ("if-none-match", b'"a",' * 500_000),
        ("if-match", b'"a",' * (_ROOM // 4)),
        ("if-modified-since", b"9" * _ROOM),
        ("if-range", b"\xff" * 5000),
        ("range", b"bytes=0-0"),
        ("range", b"bytes=-" + b"9" * 5000),
        ("range", b"bytes=99999999999999999999-5"),
        ("range", b"bytes=" + b"0-," * (_ROOM // 3)),
        ("range", b"\xff" * 5000),
        ("accept-encoding", b"gzip," * (_ROOM // 5)),
        ("cookie", b"a=b;" * (_ROOM // 4)),
        ("origin", b"a" * _ROOM),
        ("host", b"a" * _ROOM),
    ):
        header = name.encode() + b": " + value + b"\r\n"
        for path in (_SCRIPT,) if name not in ("accept", "if-none-match") else (_SCRIPT, "/"):
            yield _request(path, header if name == "accept" else header + _HTML)
    for path in (_SCRIPT, "/"):
        yield _request(path, _HTML, "HEAD")
        yield _request(path, _HTML, "HEAD", b" " * limit)
        yield _request(path, _HTML, "GET", b" " * (limit + 1))
        yield _request(path + "?" + "a=%41&" * (_ROOM // 6), _HTML)
        yield _request(path + "?" + "a=%41&" * (_ROOM // 4), _HTML)
        yield _request(path + "?" + "a" * 2_000_000, _HTML)
        yield _request(path + "#" + "a" * 5000, _HTML)
        yield _request("http://a" + path, _HTML)
        yield _request(path, _HTML + b"content-length: 99999999999\r\n")
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
        yield _request(_SCRIPT, _HTML, method)
        yield _request(_SCRIPT, _HTML, method, b" " * limit)
    for method, header, count in (
        ("GET", b"", 40),
        ("HEAD", b"", 40),
        ("GET", b"if-none-match: *\r\n", 40),
        ("GET", b"range: bytes=0-0\r\n", 40),
        ("DELETE", b"", 40),
    ):
        name = f"{count} times every file, pipelined: {method} {header.decode().strip()}"
        yield Attack(
            name.rstrip(),
            lambda c, m=method, h=header, n=count: _pipelined_files(c, m, h, n),
        )
    for method, path, count in (
        ("GET", "/", 5_000),
        ("HEAD", "/", 5_000),
        ("GET", "/web-ui/no/such/file", 20_000),
    ):
        yield Attack(
            f"{count:,} pipelined {method} {path} of a browser",
            lambda c, m=method, p=path, n=count: pipeline(c, m, p, n, _HTML),
        )
    yield Attack("files that are requested and not read", _unread)
