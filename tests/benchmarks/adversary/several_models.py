"""Requests for the process in front of several models: names, paths, headers, loads and unloads."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.benchmarks.adversary.client import Client, Response
from tests.benchmarks.adversary.protocol import BODIES, Attack, pipeline
from tgi_cli import demo
from tgi_cli.router.http.protocol import HEAD_BYTES

FIRST, SECOND = "first", "second"
_ROOM = HEAD_BYTES - 1000
"""Bytes of a path or a header that the server still reads."""
_PROMPT = b'"prompt":"a","max_tokens":2'
_ROUTES = ("/v1/completions", "/models/load", "/models/unload", f"/upstream/{SECOND}/generate")


def flags(folder: Path, limit: int) -> list[str]:
    """Flags of a server of two models, which are both loaded; ``folder`` gets their files."""
    copy = folder / SECOND
    if not copy.exists():
        shutil.copytree(demo.model_path(), copy)
    listed = {FIRST: {"model": str(demo.model_path())}, SECOND: {"model": str(copy)}}
    file = folder / "models.yaml"
    file.write_text(json.dumps(listed), encoding="utf-8")
    return [f"--models={file}", "--models-max=2", f"--payload-limit={limit}"]


def load(client: Client, seconds: float = 120.0) -> None:
    """Load the second model and wait until it responds."""
    body = b'{"model":"%b",%b}' % (SECOND.encode(), _PROMPT)
    end = time.monotonic() + seconds
    while client.request("POST", "/v1/completions", body).status != 200:
        if time.monotonic() > end:
            raise SystemExit("the second model was not loaded")
        time.sleep(0.1)


def _named(model: str) -> bytes:
    return json.dumps({"model": model}).encode()


def _one(
    name: str,
    method: str,
    path: str,
    body: bytes | None = None,
    more: bytes = b"",
    statuses: tuple[int, ...] = (),
) -> Attack:
    return Attack(name, lambda c: c.request(method, path, body, more), statuses=statuses)


def _several(count: int, send: Callable[[int], Response]) -> Response:
    """The worst of several responses: one that blames the server, or the last."""
    found = [send(number) for number in range(count)]
    return next((each for each in found if each.blames_server), found[-1])


def _abandon(client: Client, body: bytes, count: int) -> Response:
    """Ask for a model and leave before the response."""
    request = client.build_request("POST", "/v1/completions", body)
    for _ in range(count):
        client.send([request], read=False)
    return client.request("GET", "/v1/models", None)


def _abandon_a_load(client: Client) -> Response:
    client.request("POST", "/models/unload", _named(SECOND))
    return _abandon(client, b'{"model":"%b",%b}' % (SECOND.encode(), _PROMPT), 300)


def _unread(client: Client, count: int = 20) -> Response:
    """Request streams and never read them."""
    body = b'{"inputs":"a","parameters":{"max_new_tokens":300}}'
    request = client.build_request("POST", "/generate_stream", body)
    connections = []
    try:
        for _ in range(count):
            connections.append(socket.create_connection(client.address, 10))
            connections[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connections[-1].sendall(request)
        time.sleep(1.0)
        return client.request("GET", "/v1/models", None)
    finally:
        for connection in connections:
            connection.close()


def _half_bodies(client: Client, count: int, size: int) -> Response:
    """Send the first halves of many bodies, and wait."""
    head = client.build_request("POST", "/v1/completions", b"")[:-2]
    head = head.replace(b"length: 0", b"length: %d" % (2 * size)) + b"\r\n"
    connections = []
    try:
        for _ in range(count):
            connections.append(socket.create_connection(client.address, 10))
            connections[-1].sendall(head + b" " * size)
        return client.request("GET", "/v1/models", None)
    finally:
        for connection in connections:
            connection.close()


def attacks(limit: int) -> Iterator[Attack]:
    """Yield all attacks on a server that accepts bodies of ``limit`` bytes; the last ones unload
    its second model."""
    for method, path, count in (
        ("GET", "/health", 20_000),
        ("GET", "/v1/models", 2_000),
        ("GET", f"/v1/models/{SECOND}", 2_000),
        ("PUT", "/models/load", 2_000),
        ("GET", "/info", 1_000),
        ("GET", f"/upstream/{SECOND}/info", 1_000),
        ("GET", "/upstream/none/info", 2_000),
        ("GET", "/v1/responses/resp_none", 500),
        ("GET", "/metrics", 500),
        ("GET", "/api-doc/openapi.json", 500),
    ):
        yield Attack(
            f"{count:,} pipelined {method} {path}",
            lambda c, m=method, p=path, n=count: pipeline(c, m, p, n),
        )
    yield from _bodies(limit)
    yield from _paths()
    yield from _headers()
    yield Attack("clients that leave before the response", lambda c: _abandon(
        c, b'{"model":"%b",%b}' % (SECOND.encode(), _PROMPT), 100))  # fmt: skip
    yield Attack("unread streams", _unread)
    yield Attack("100 halves of bodies of 50 KB", lambda c: _half_bodies(c, 100, 25_000))
    yield Attack("20 halves of bodies of the limit", lambda c: _half_bodies(c, 20, limit // 2))
    yield from _loads()


def _bodies(limit: int) -> Iterator[Attack]:
    for path in _ROUTES:
        for kind, make in BODIES.items():
            yield Attack(
                f"POST {path}, {kind}",
                lambda c, p=path, m=make: c.request("POST", p, m(limit)),
            )
    filler = b'"a":"%b"' % (b"a" * (limit - 1000))
    names: dict[str, Callable[[], bytes]] = {
        "a name of the limit": lambda: b'"%b"' % (b"a" * (limit - 1000)),
        "a name of 513 characters": lambda: b'"%b"' % (b"a" * 513),
        "escapes": lambda: b'"%b"' % (rb"\u0061" * ((limit - 1000) // 6)),
        "invalid UTF-8": lambda: b'"\xff\xfe"',
        "half a surrogate": lambda: rb'"\ud800"',
        "digits": lambda: b"1" * (limit - 1000),
        "deep": lambda: b"[" * 100_000 + b"]" * 100_000,
        "an array of names": lambda: b"[" + b'"first",' * 50_000 + b'"first"]',
        "null": lambda: b"null",
        "zero": lambda: rb'"\u0000"',
    }
    for kind, make in names.items():
        for path in ("/v1/completions", "/models/load"):
            yield Attack(
                f"POST {path}, model: {kind}",
                lambda c, p=path, m=make: c.request("POST", p, b'{"model":%b,%b}' % (m(), _PROMPT)),
            )
    twice = b'"model":"none",' * ((limit - 1000) // 15)
    for kind, body in (
        ("model behind 2 MB", b'{%b,"model":"second",%b}' % (filler, _PROMPT)),
        ("model again and again", b'{%b"model":"second",%b}' % (twice, _PROMPT)),
        ("no object", b'["second"]'),
        ("a byte order mark", b'\xef\xbb\xbf{"model":"second"}'),
        ("spaces in front", b" " * (limit - 1000) + b'{"model":"second",%b}' % _PROMPT),
    ):
        yield _one(f"POST /v1/completions, {kind}", "POST", "/v1/completions", body)


def _paths() -> Iterator[Attack]:
    for path in (
        "*",
        "//other.example/info",
        "http://other.example:99/info",
        "/upstream/",
        "/upstream//info",
        "/upstream/second",
        "/upstream/second/../../info",
        "/upstream/second//info",
        "/upstream/%2e%2e/info",
        "/upstream/%73econd/info",
        "/upstream/second%2finfo",
        "/upstream/%ff%00/info",
        "/upstream/second/http://other.example/",
        '/upstream/second/"<>{}|^`\\',
        "/v1/responses/",
        "/v1/responses/..",
        "/v1/responses/../models",
        "/v1/responses/%2e%2e%2fmodels",
        "/v1/responses/%ff%00",
        "/models/load/",
        "/info?%zz&=&#a",
    ):
        for method in ("GET", "DELETE", "OPTIONS"):
            yield _one(f"{method} {path}", method, path)
    for front in ("/upstream/", "/v1/models/", "/v1/responses/", "/"):
        for kind, unit in (("letters", "a"), ("escapes", "%ff"), ("slashes", "/"), ("dots", "../")):
            path = front + unit * ((_ROOM - len(front)) // len(unit))
            yield _one(f"GET {front} and {_ROOM:,} bytes of {kind}", "GET", path)
    query = "a=%41&" * (_ROOM // 6)
    for path in ("/v1/models", "/health", "/metrics", f"/upstream/{SECOND}/info"):
        yield _one(f"GET {path} with a query of {_ROOM:,}", "GET", f"{path}?{query}")


def _headers() -> Iterator[Attack]:
    for name, value in (
        ("x-model", b"a" * _ROOM),
        ("x-model", b"\xff\xfe"),
        ("x-model", b""),
        ("x-odd", b"a\t"),
        ("x-odd", b"\xff" * 5000),
        ("connection", b"x-a, " * (_ROOM // 5)),
        ("te", b"trailers, deflate"),
        ("upgrade", b"websocket"),
        ("expect", b"100-continue"),
        ("traceparent", b"00-" + b"f" * (_ROOM - 3)),
        ("traceparent", b"00-%b-%b-01" % (b"a" * 32, b"b" * 16)),
        ("tracestate", b"a=b," * (_ROOM // 4)),
        ("baggage", b"a=b," * (_ROOM // 4)),
        ("cookie", b"a=b;" * (_ROOM // 4)),
        ("x-request-id", b"a" * _ROOM),
        ("x-request-timeout", b"9" * 5000),
        ("authorization", b"Bearer b"),
    ):
        line = name.encode() + b": " + value + b"\r\n"
        for path in ("/info", "/v1/models"):
            shown = value[:20].decode("latin-1").encode("ascii", "backslashreplace").decode()
            title = f"GET {path} with {name}: {shown} ({len(value):,})"
            passed_on = (200,) if name == "x-odd" else ()
            yield _one(title, "GET", path, None, line, passed_on)
    for accept in (b"," * _ROOM, b"application/openmetrics-text," * (_ROOM // 29)):
        line = b"accept: " + accept + b"\r\n"
        yield _one(
            f"GET /metrics with accept: {accept[:20].decode()}", "GET", "/metrics", None, line
        )
    for count in (90, 96, 97):
        lines = b"".join(b"x-%d: a\r\n" % number for number in range(count))
        yield _one(f"GET /info with {count} headers", "GET", "/info", None, lines, (200,))


def _loads() -> Iterator[Attack]:
    """Calls that load and unload, each cheap, and many."""
    yield Attack(
        "500 times /models/load of a loaded model",
        lambda c: _several(500, lambda _: c.request("POST", "/models/load", _named(SECOND))),
    )
    yield Attack(
        "300 times /models/load and /models/unload in turns",
        lambda c: _several(
            300,
            lambda n: c.request("POST", f"/models/{'load' if n % 2 else 'unload'}", _named(SECOND)),
        ),
        unloads=True,
    )
    yield Attack(
        "clients that leave while their model is loaded",
        _abandon_a_load,
        unloads=True,
    )
