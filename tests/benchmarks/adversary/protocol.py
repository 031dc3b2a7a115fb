"""Malformed and excessive HTTP: connections, request heads, body framing."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tests.benchmarks.adversary.client import Client, Response


@dataclass(frozen=True)
class Attack:
    """An attack that is run once.

    Attributes:
        name: describes it in the report.
        run: runs it and returns the response to its last request.
        closes: the server may close the connection without a response.
        statuses: of which the response must have one; empty for any that a client may cause.
        unloads: the processes of a model may end.
    """

    name: str
    run: Callable[[Client], Response]
    closes: bool = False
    statuses: tuple[int, ...] = ()
    unloads: bool = False


def pipeline(client: Client, method: str, path: str, count: int, more: bytes = b"") -> Response:
    """Pipeline ``count`` requests on one connection before reading the first response."""
    request = client.build_request(method, path, None, more).replace(b"close", b"keep-alive")
    pieces = [request * 500] * (count // 500 - 1) + [request * 499]
    return client.send([*pieces, client.build_request(method, path, None, more)])


def _chunked(client: Client, pieces: Iterable[bytes], more: bytes = b"") -> Response:
    head = client.build_request(
        "POST",
        "/generate",
        None,
        b"content-type: application/json\r\ntransfer-encoding: chunked\r\n",
    )
    return client.send([head, *pieces, b"0\r\n" + more + b"\r\n"])


def _chunks(body: bytes, size: int) -> bytes:
    return b"".join(
        b"%x\r\n%b\r\n" % (len(part := body[at : at + size]), part)
        for at in range(0, len(body), size)
    )


def _slow(client: Client) -> Response:
    body = b'{"inputs":"a","parameters":{"max_new_tokens":2}}'
    head = client.build_request("POST", "/generate", None)[:-2]
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return client.send([head, *(bytes([one]) for one in body)], pause=0.02)


def _abandon(client: Client, pieces: list[bytes], count: int) -> Response:
    """Connect, send and close without reading, ``count`` times."""
    for _ in range(count):
        response = client.send(pieces, read=False)
    return response


def _idle(client: Client, count: int) -> Response:
    """Open ``count`` connections that send the beginning of a request and wait."""
    connections = []
    try:
        for _ in range(count):
            connections.append(socket.create_connection(client.address, 10))
            connections[-1].sendall(b"POST /generate HTTP/1.1\r\nhost: a\r\n")
        return client.request("GET", "/info", None)
    finally:
        for connection in connections:
            connection.close()


def _headers(client: Client, count: int, size: int, method: str = "GET") -> Response:
    lines = b"".join(b"x-%d: %b\r\n" % (n, b"a" * size) for n in range(count))
    body = b'{"inputs":"a","parameters":{"max_new_tokens":2}}' if method == "POST" else None
    return client.request(method, "/generate" if body else "/info", body, lines)


def _unread(client: Client) -> Response:
    """Request streams and never read them."""
    body = b'{"inputs":"a","parameters":{"max_new_tokens":300}}'
    request = client.build_request("POST", "/generate_stream", body)
    connections = []
    try:
        for _ in range(20):
            connections.append(socket.create_connection(client.address, 10))
            connections[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connections[-1].sendall(request)
        time.sleep(1.0)
        return client.request("GET", "/info", None)
    finally:
        for connection in connections:
            connection.close()


def attacks(limit: int) -> Iterator[Attack]:
    """Yield all attacks on a server that accepts bodies of ``limit`` bytes."""
    for method, path, count in (
        ("GET", "/no/such/path", 20_000),
        ("GET", "/health", 20_000),
        ("GET", "/info", 5_000),
        ("GET", "/v1/models", 5_000),
        ("PUT", "/generate", 5_000),
        ("GET", "/metrics", 500),
        ("GET", "/api-doc/openapi.json", 500),
    ):
        yield Attack(
            f"{count:,} pipelined {method} {path}",
            lambda c, m=method, p=path, n=count: pipeline(c, m, p, n),
        )
    valid = b'{"inputs":"a","parameters":{"max_new_tokens":2}}'
    yield Attack(
        f"{limit:,} one-byte chunks",
        lambda c: _chunked(c, [_chunks(valid + b" " * (limit - 100 - len(valid)), 1)]),
    )
    yield Attack(
        "a chunk extension of 1 MB",
        lambda c: _chunked(c, [b"1;" + b"a" * 1_000_000 + b"\r\n{\r\n"]),
        closes=True,
    )
    yield Attack(
        "10,000 trailers",
        lambda c: _chunked(c, [_chunks(valid, 9)], b"x-a: b\r\n" * 10_000),
        closes=True,
    )
    for name, chunk in (
        ("a chunk of 2**64 bytes", b"10000000000000000\r\n"),
        ("a chunk of -1 bytes", b"-1\r\n"),
        ("a chunk without a size", b"\r\n\r\n"),
        ("invalid chunks", b"zzzz\r\n" * 10_000),
    ):
        yield Attack(name, lambda c, x=chunk: _chunked(c, [x]), closes=True)
    yield Attack("a slow body", _slow)
    yield Attack(
        "clients that disconnect in the body",
        lambda c: _abandon(
            c, [c.build_request("POST", "/generate", b" " * 100_000)[:-50_000]], 200
        ),
    )
    yield Attack(
        "clients that disconnect in a pipeline",
        lambda c: _abandon(c, [b"GET /info HTTP/1.1\r\nhost: a\r\n\r\n" * 100], 50),
    )
    yield Attack(
        "clients that disconnect before the response",
        lambda c: _abandon(c, [c.build_request("POST", "/generate", valid)], 200),
    )
    yield Attack("unread streams", _unread)
    yield Attack("500 incomplete request heads", lambda c: _idle(c, 500))
    for count, size in ((100, 50), (10_000, 1), (5, 10_000), (1, 60_000), (1, 1_500_000)):
        for method in ("GET", "POST"):
            yield Attack(
                f"{method} with {count:,} headers of {size:,}",
                lambda c, n=count, s=size, m=method: _headers(c, n, s, m),
                closes=True,
            )
    for size in (8_000, 60_000, 1_500_000):
        yield Attack(
            f"a path of {size:,}",
            lambda c, s=size: c.request("GET", "/" + "a" * s, None),
            closes=True,
        )
        yield Attack(
            f"a path of {size:,} bytes in short segments",
            lambda c, s=size: c.request("GET", "/v1/models" + "/a" * (s // 2), None),
            closes=True,
        )
        yield Attack(
            f"a query of {size:,}",
            lambda c, s=size: c.request("GET", "/info?" + "a=%41&" * (s // 6), None),
            closes=True,
        )
        yield Attack(
            f"a method of {size:,}", lambda c, s=size: c.request("A" * s, "/", None), closes=True
        )
    noise = random.Random(0).randbytes(1_000_000)
    for name, data in (
        ("random bytes", noise),
        ("TLS", b"\x16\x03\x01" + noise[:500]),
        ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 9),
        ("HTTP/0.9", b"GET /\r\n\r\n"),
        ("newlines", b"\r\n" * 500_000),
        ("an endless head", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200_000),
        ("an endless line", b"a" * 2_000_000),
    ):
        yield Attack(name, lambda c, d=data: c.send([d], half_close=True), closes=True)
    for line in (
        b"upgrade: websocket\r\nconnection: upgrade\r\n",
        b"expect: 100-continue\r\n",
        b"content-encoding: gzip\r\n",
        b"transfer-encoding: gzip\r\n",
        b"content-length: 5\r\n",
        b"content-length: 99999999999999999999\r\n",
        b"x-request-timeout: 1e308\r\n",
        b"x-request-timeout: " + b"9" * 5000 + b"\r\n",
        b"traceparent: 00-" + b"f" * 5000 + b"\r\n",
        b"accept: " + b"a/b," * 2000 + b"\r\n",
        b"authorization: Bearer b\r\n",
        b"cookie: " + b"a=b;" * 2000 + b"\r\n",
        b"origin: " + b"a" * 5000 + b"\r\n",
        b"content-type: " + b"application/" + b"a." * 3000 + b"json\r\n",
    ):
        yield Attack(
            line.decode()[:60].replace("\r\n", " ").strip(),
            lambda c, x=line: c.request("POST", "/generate", valid, x),
            closes=True,
        )
    yield Attack("a body of 100 MB", lambda c: c.send(
        [c.build_request("POST", "/generate", b"").replace(b"length: 0", b"length: 100000000"),
         *([b" " * 1_000_000] * 100)]), closes=True)  # fmt: skip


BODIES: dict[str, Callable[[int], bytes]] = {
    "no body": lambda limit: b"",
    "spaces": lambda limit: b" " * limit,
    "invalid UTF-8": lambda limit: b'{"a":"' + b"\xff" * (limit - 10) + b'"}',
    "unknown keys": lambda limit: b"{" + b",".join(
        b'"k%d":[1,{"a":"b"}]' % n for n in range(limit // 26)) + b"}",
    "the same unknown key": lambda limit: b'{"a":1' + b',"a":1' * (limit // 6 - 2) + b"}",
    "brackets": lambda limit: b"[" * limit,
    "deep": lambda limit: b"[" * (limit // 2) + b"]" * (limit // 2),
    "deep unknown key": lambda limit: b'{"a":' * (limit // 6 - 1) + b"1" + b"}" * (limit // 6 - 1),
    "digits": lambda limit: b"1" * limit,
    "one byte too long": lambda limit: b'"' + b"a" * (limit - 1) + b'"',
    "an array": lambda limit: b"[" + b"1," * (limit // 2 - 2) + b"1]",
    "truncated": lambda limit: b'{"inputs":"' + b"a" * (limit - 20),
    "zero bytes": lambda limit: b"\0" * limit,
}  # fmt: skip
"""Bodies that no schema defines, as functions of the payload limit."""
