"""HTTP/1.1 of unusual clients: pipelines, chunks, trailers, upgrades, wrong lengths."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from typing import Any

import pytest

from tests.router.fakes import FakeEngine
from tests.router.wire import (
    BODY,
    CHUNKED,
    LAST,
    POST,
    Exchange,
    exchange,
    port,
    served,
    status,
    statuses,
)
from tests.tools.event_loop_gap import loop_gap
from tgi_cli.router.http.protocol import FRAMING_BYTES, BoundedProtocol

__all__ = ["exchange", "port"]

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)


def chunked(text: bytes, size: int) -> bytes:
    """The text in chunks of so many bytes."""
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


class TestPipelines:
    async def test_pipelined_requests_are_answered_in_order(
        self, exchange: Exchange, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        queued = []

        def count(self: BoundedProtocol, *args: Any) -> None:
            done(self, *args)
            queued.append((len(self.pipeline), len(self._waiting)))

        done = BoundedProtocol.on_headers_complete
        monkeypatch.setattr(BoundedProtocol, "on_headers_complete", count)
        missing = b"GET /a HTTP/1.1\r\n\r\n"
        async with loop_gap() as gap:
            answer = await exchange(missing * 5000, GET + LAST + b"\r\n")
        assert statuses(answer) == [404] * 5000 + [200]
        # A kilobyte is parsed ahead; uvicorn itself queues whatever it reads.
        assert max(pending for pending, _ in queued) < 64
        assert max(waiting for _, waiting in queued) < 512 * 1024
        assert gap.turns > 100
        assert gap.work < 0.5

    async def test_reading_pauses_while_a_pipeline_waits(
        self, port: int, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = []
        parse = BoundedProtocol._parse

        def watch(self: BoundedProtocol) -> None:
            parse(self)
            held.append((self.flow.held, self.flow.read_paused, len(self._waiting)))

        monkeypatch.setattr(BoundedProtocol, "_parse", watch)
        engine.gate = gate = asyncio.Semaphore(0)
        first = POST + LENGTH + b"\r\n" + BODY
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first)
        async with asyncio.timeout(60):
            while not engine.requests:  # noqa: ASYNC110 (until the router has read it)
                await asyncio.sleep(0.01)
            writer.write(b"GET /a HTTP/1.1\r\n\r\n" * 100_000)
            while held[-1][:2] != (True, True):  # noqa: ASYNC110 (until it has read enough)
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert held[-1][:2] == (True, True)
        assert held[-1][2] < 600_000, "the rest stays in the sockets"
        for _ in range(100):
            gate.release()
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 200")
        writer.transport.abort()

    async def test_pipelined_requests_may_have_bodies(self, exchange: Exchange) -> None:
        parts = [POST + LENGTH + b"\r\n" + BODY, CHUNKED + chunked(BODY, 7) + b"0\r\n\r\n"] * 3
        answer = await exchange(b"".join(parts), GET + LAST + b"\r\n")
        assert statuses(answer) == [200] * 7
        assert answer.count(b"generated_text") == 6

    async def test_invalid_request_is_answered_after_the_previous(
        self, exchange: Exchange, engine: FakeEngine
    ) -> None:
        engine.pause = 0.05
        good = POST + LENGTH + b"\r\n" + BODY
        for bad in (b"NONSENSE\r\n\r\n", CHUNKED + b"zz\r\n", GET.replace(b"1.1", b"7.7")):
            assert statuses(await exchange(good + good + bad + good)) == [200, 200, 400]

    def test_disconnecting_within_a_pipeline_logs_no_error(self, model_path: Any) -> None:
        """uvloop, unlike asyncio, does not forgive whoever reads on from a closed connection."""
        done = subprocess.run(
            [sys.executable, "-m", "tests.router.leave_pipeline", str(model_path)],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert done.stdout.split() == ["left", "200"]
        assert "Traceback" not in done.stderr, done.stderr


async def test_unread_body_is_not_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = []
    on_body = BoundedProtocol.on_body

    def watch(self: BoundedProtocol, body: bytes) -> None:
        on_body(self, body)
        gathered.append(len(self.cycle.body))

    done = asyncio.Event()

    async def busy(scope: Any, receive: Any, send: Any) -> None:
        await done.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    monkeypatch.setattr(BoundedProtocol, "on_body", watch)
    async with served(busy) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 20000000\r\n\r\n")
        writer.write(b"x" * 20_000_000)
        async with asyncio.timeout(60):
            while not gathered:  # noqa: ASYNC110 (until it reads the body)
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert 0 < max(gathered) < 1_000_000, "the rest stays with the client"
        writer.transport.abort()
        done.set()


class TestChunks:
    async def test_trailers_are_not_headers(self, exchange: Exchange) -> None:
        head = CHUNKED.replace(b"\r\n\r\n", b"\r\n" + LAST + b"\r\n")
        trailer = b"x-request-id: from-a-trailer\r\nx-request-timeout: none\r\n"
        answer = await exchange(head + chunked(BODY, 10) + b"0\r\n" + trailer + b"\r\n")
        assert status(answer) == 200
        assert b"from-a-trailer" not in answer

    @pytest.mark.parametrize("size", [1, 3])
    async def test_number_of_small_chunks_is_bounded(self, exchange: Exchange, size: int) -> None:
        text = b" " * 100_000 + BODY
        async with loop_gap() as gap:
            answer = await exchange(CHUNKED + chunked(text, size) + b"0\r\n\r\n")
        assert status(answer) == 400
        assert b"connection: close" in answer
        assert gap.work < 0.5

    @pytest.mark.parametrize("size", [16, 1000, 65536])
    async def test_chunks_of_clients_are_accepted(self, exchange: Exchange, size: int) -> None:
        head = CHUNKED.replace(b"\r\n\r\n", b"\r\n" + LAST + b"\r\n")
        text = b" " * 200_000 + BODY
        assert status(await exchange(head + chunked(text, size) + b"0\r\n\r\n")) == 200

    async def test_extensions_count_as_framing(self, exchange: Exchange) -> None:
        extended = b"1;" + b"a=b;" * 2000 + b"\r\n{\r\n"
        assert status(await exchange(CHUNKED + extended * 20)) in (400, 431)
        assert 20 * len(extended) > FRAMING_BYTES

    @pytest.mark.parametrize(
        "broken", [b"zz\r\n", b"3\r\nabcd\r\n", b"-1\r\n", b"1\r\n{\r\n\r\n\r\n"]
    )
    async def test_broken_chunks_are_400(self, exchange: Exchange, broken: bytes) -> None:
        answer = await exchange(CHUNKED + broken, pause=0.05)
        assert statuses(answer) == [400]
        assert b"connection: close" in answer


class TestTrailersBringNoKey:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_key": "secret"}

    async def test_key_in_a_trailer_is_ignored(self, exchange: Exchange) -> None:
        key = b"authorization: Bearer secret\r\n"
        head = CHUNKED.replace(b"\r\n\r\n", b"\r\n" + LAST + b"\r\n")
        body = chunked(BODY, 10) + b"0\r\n"
        assert status(await exchange(head + body + key + b"\r\n")) == 401
        head = head.replace(LAST, LAST + key)
        assert status(await exchange(head + body + b"\r\n")) == 200


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (b"transfer-encoding: gzip\r\n", 400),
        (b"transfer-encoding: xchunked\r\n", 400),
        (b"transfer-encoding: gzip, chunked\r\n", 501),
        (b"transfer-encoding: chunked, identity\r\n", 400),
        (b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n", 400),
        (b"transfer-encoding: chunked\r\ncontent-length: 3\r\n", 400),
        (b"content-length: 3\r\ntransfer-encoding: chunked\r\n", 400),
        (b"content-length: 3\r\ncontent-length: 4\r\n", 400),
        (b"content-length: +3\r\n", 400),
        (b"content-length: -3\r\n", 400),
        (b"content-length: 0x3\r\n", 400),
        (b"content-length: " + b"9" * 30 + b"\r\n", 400),
        (b"content-length:\r\n", 400),
        (b"host: y\r\n", 400),
        (b"a b: c\r\n", 400),
        (b"a : c\r\n", 400),
        (b"a: b\0c\r\n", 400),
        (b"\xff: b\r\n", 400),
        (b"a: b\r\n c\r\n", 400),
        (b"a: b\nc: d\r\n", 400),
    ],
)
async def test_ambiguous_heads_are_refused(exchange: Exchange, lines: bytes, expected: int) -> None:
    answer = await exchange(POST + lines + b"\r\n" + b"3\r\nabc\r\n0\r\n\r\n", GET + b"\r\n")
    assert statuses(answer) == [expected], "and nothing behind it is taken for a request"
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"GET http://x/health HTTP/1.1", 200),
        (b"GET http://x HTTP/1.1", 200),
        (b"GET http://x?a=b HTTP/1.1", 200),
        (b"GET //health HTTP/1.1", 404),
        (b"GET /health%00 HTTP/1.1", 404),
        (b"GET /health HTTP/1.0", 200),
        (b"GET /health?" + b"a=b&" * 7000 + b" HTTP/1.1", 200),
        (b"OPTIONS * HTTP/1.1", 404),
        (b"TRACE /health HTTP/1.1", 405),
        (b"CONNECT example.com:443 HTTP/1.1", 400),
        (b"GET /health HTTP/2.0", 505),
        (b"GET /health HTTP/1.9", 400),
        (b"GET /health", 505),
        (b"PRI * HTTP/2.0", 400),
        (b"GET /health\0 HTTP/1.1", 400),
        (b"GET /\xff HTTP/1.1", 400),
        (b"get /health HTTP/1.1", 400),
    ],
)
async def test_forms_of_request_lines(exchange: Exchange, line: bytes, expected: int) -> None:
    answer = await exchange(line + b"\r\nhost: x\r\n" + LAST + b"\r\n")
    assert status(answer) == expected


async def test_chunks_are_refused_in_http_1_0(exchange: Exchange) -> None:
    head = CHUNKED.replace(b"1.1", b"1.0")
    assert statuses(await exchange(head + chunked(BODY, 10) + b"0\r\n\r\n")) == [400]


async def test_expect_100_continue_is_honoured(exchange: Exchange) -> None:
    head = POST + LAST + b"expect: 100-continue\r\n"
    answer = await exchange(head + LENGTH + b"\r\n", BODY, pause=0.05)
    assert statuses(answer) == [100, 200]
    answer = await exchange(head + b"content-length: 3000000\r\n\r\n")
    assert statuses(answer) == [413], "a body that is refused is not asked for"


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"TLS/1.0"])
async def test_upgrades_are_ignored(
    exchange: Exchange, caplog: pytest.LogCaptureFixture, protocol: bytes
) -> None:
    """The request is served as it is, its body too, and so is what follows it."""
    asking = b"connection: upgrade, http2-settings\r\nhttp2-settings: AAMAAABk\r\n"
    asking += b"upgrade: " + protocol + b"\r\n"
    with caplog.at_level(logging.INFO, "uvicorn.error"):
        answer = await exchange(
            GET + asking + b"\r\n",
            POST + asking + LENGTH + b"\r\n" + BODY[:9],
            BODY[9:] + CHUNKED.replace(b"\r\n\r\n", b"\r\n" + asking + b"\r\n"),
            chunked(BODY, 20) + b"0\r\n\r\n" + GET + LAST + b"\r\n",
            pause=0.02,
        )
    assert statuses(answer) == [200, 200, 200, 200]
    assert answer.count(b"generated_text") == 2
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
