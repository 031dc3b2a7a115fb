"""Limits of time and memory that a client can cost, on real sockets, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.wire import BODY, HEAD_SECONDS, POST, Exchange, exchange, port, status
from tgi_cli.router.http import bodies
from tgi_cli.router.http.protocol import body_seconds

__all__ = ["exchange", "port"]


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"payload_limit": 1000}


async def test_request_in_fragments_is_answered(exchange: Exchange) -> None:
    head = POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    answer = await exchange(head[:20], head[20:], BODY[:10], BODY[10:], pause=0.02)
    assert status(answer) == 200
    assert b"generated_text" in answer


async def test_consecutive_requests_are_answered(exchange: Exchange) -> None:
    request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = await exchange(request, request + request, last, pause=0.05)
    assert answer.count(b"HTTP/1.1 200 OK") == 4


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 101 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: " + b"b" * 40_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a" * 40_000 + b": b\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + (b"a: " + b"b" * 1000 + b"\r\n") * 40 + b"\r\n", 431),
        (b"\x16\x03\x01 this is no HTTP\r\n\r\n", 400),
    ],
    ids=["line", "many", "one", "name", "sum", "garbage"],
)
async def test_heads_have_bounds(exchange: Exchange, head: bytes, expected: int) -> None:
    answer = await exchange(*(head[i : i + 8192] for i in range(0, len(head), 8192)))
    assert status(answer) == expected
    assert b"connection: close" in answer


async def test_endless_headers_are_not_buffered(exchange: Exchange) -> None:
    head = b"GET / HTTP/1.1\r\nhost: x\r\na: "
    # The client that goes on writing may lose the answer.
    assert status(await exchange(head, *[b"b" * 8192] * 500)) in (0, 431)


async def test_large_heads_within_the_bounds_are_accepted(exchange: Exchange) -> None:
    headers = (b"a: " + b"b" * 1000 + b"\r\n") * 25 + b"c: d\r\n" * 70
    answer = await exchange(
        b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + headers + b"\r\n"
    )
    assert status(answer) == 200


@pytest.mark.parametrize("start", [b"GET /", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
async def test_slow_heads_time_out(exchange: Exchange, start: bytes) -> None:
    drops = [b"x"] * 40 if start == b"GET /" else [b"a: b\r\n"] * 40
    assert status(await exchange(start, *drops, pause=HEAD_SECONDS / 5)) == 408


async def test_idle_connections_are_closed(exchange: Exchange) -> None:
    assert await exchange() == b""
    assert await exchange(b"\r\n") == b""


async def test_missing_body_is_408(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "body_seconds", lambda _: 0.3)
    head = POST + b"content-length: 900\r\n\r\n"
    answer = await exchange(head)
    assert status(answer) == 408
    assert b"did not arrive in time" in answer
    assert b"x-request-id" in answer, "a route's answer, with all that these have"
    # Nor does a trickle hold it up, though who writes on may lose the answer.
    assert status(await exchange(head, *[b" "] * 400, pause=0.1)) in (0, 408)


async def test_unread_body_does_not_occupy_the_connection(exchange: Exchange) -> None:
    head = b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
    assert status(await exchange(head, *[b" "] * 30, pause=0.1)) == 404


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("route", [b"/generate", b"/v1/chat/completions", b"/tokenize"])
async def test_bodies_have_bounds(exchange: Exchange, chunked: bool, route: bytes) -> None:
    head = POST.replace(b"/generate", route)
    text = b'{"inputs": "' + b"x" * 2000
    if chunked:
        sent = head + b"transfer-encoding: chunked\r\n\r\n" + b"7d0\r\n" + text[:2000] + b"\r\n"
    else:
        sent = head + b"content-length: 2014\r\n\r\n" + text
    answer = await exchange(sent)
    assert status(answer) == 413
    assert b"1000 bytes" in answer


async def test_trailers_have_bounds(exchange: Exchange) -> None:
    head = POST + b"transfer-encoding: chunked\r\n\r\n0\r\n"
    assert status(await exchange(head + b"a: b\r\n" * 200 + b"\r\n")) in (0, 400, 431)
    endless = head + b"a: " + b"b" * 400_000
    assert status(await exchange(endless)) in (0, 400, 431)


def test_larger_bodies_have_a_longer_timeout() -> None:
    assert body_seconds(2_000_000) == pytest.approx(60.5, abs=0.1)
