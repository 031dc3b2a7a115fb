"""Connections: how answers may end, and what becomes of a connection afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tgi_cli.bench.load.http import BrokenResponseError, ConnectError, ConnectionPool, request_head
from tgi_cli.errors import ConfigError

Answers = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
REQUEST = request_head("http://x", "/p", {"a": "b"}) + b"2\r\n\r\n{}"


class Kept:
    """Keeps what comes."""

    def __init__(self) -> None:
        self.status, self.type, self.data = 0, "", b""

    def head(self, status: int, content_type: str) -> None:
        self.status, self.type = status, content_type

    def body(self, data: bytes, now: float) -> None:
        self.data += data


class Sockets:
    """A server of raw bytes; ``connections`` counts."""

    def __init__(self, answer: Answers) -> None:
        self._answer = answer
        self.connections = 0

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._answer(reader, writer)
        writer.close()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[ConnectionPool]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        pool = ConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            yield pool
        finally:
            pool.close()
            server.close()


async def asked(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(2)


async def send(pool: ConnectionPool) -> Kept:
    kept = Kept()
    await pool.send(REQUEST, kept, lambda: None)
    return kept


async def test_a_connection_is_used_again() -> None:
    got = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            got.append(await asked(reader))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ncontent-length: 2\r\n\r\nhi")

    server = Sockets(answer)
    async with server.serving() as pool:
        first, second = await send(pool), await send(pool)
    assert (first.status, first.type, first.data, second.data) == (200, "a/b", b"hi", b"hi")
    assert server.connections == 1
    assert got[0].startswith(b"POST /p HTTP/1.1\r\nhost: x\r\n")
    assert b"\r\na: b\r\n" in got[0]


async def test_a_connection_that_was_closed_meanwhile_is_replaced() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        await reader.read(1)  # and hangs up when it is asked again

    server = Sockets(answer)
    async with server.serving() as pool:
        assert (await send(pool)).data == b"hi"
        assert (await send(pool)).data == b"hi"
    assert server.connections == 2


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: x\n\n")

    async with Sockets(answer).serving() as pool:
        assert (await send(pool)).data == b"data: x\n\n"


@pytest.mark.parametrize(
    ("sent", "cause"),
    [
        (b"", "closed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi", "closed"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel", "closed"),
        (b"what is HTTP?\r\n\r\n", "not HTTP"),
    ],
)
async def test_an_answer_that_is_not_whole_is_broken(sent: bytes, cause: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(sent)

    server = Sockets(answer)
    async with server.serving() as pool:
        with pytest.raises(BrokenResponseError, match=cause) as raised:
            await send(pool)
    assert raised.value.begun == bool(sent)
    assert server.connections == 1


async def test_a_refused_connection_is_a_connect_error() -> None:
    async with Sockets(None).serving() as pool:  # type: ignore[arg-type]
        pass
    with pytest.raises(ConnectError):
        await send(pool)
    with pytest.raises(ConnectError):
        await send(ConnectionPool("http://name.invalid"))


def test_addresses_and_headers_that_cannot_be_are_refused() -> None:
    for url in ("localhost:3000", "ftp://x", "http://"):
        with pytest.raises(ConfigError, match="URL"):
            ConnectionPool(url)
    with pytest.raises(ConfigError, match="Latin-1"):
        request_head("http://x", "/", {"a": "\u20ac"})
    assert request_head("https://h:1/base/", "/v1", {}).startswith(b"POST /base/v1 HTTP/1.1")
