"""A web site that answers with prepared bytes, and counts who connects."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

Handler = Callable[[asyncio.StreamWriter], Awaitable[None]]
"""Writes an answer; the connection is closed behind it."""


@dataclass
class Site:
    """What a site has seen.

    Attributes:
        port: that it listens on.
        requests: the heads of all requests.
        connections: how many there were.
        open, most_open: how many there are, and the most that there were at once.
    """

    port: int = 0
    requests: list[str] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    most_open: int = 0


def answer(body: bytes = b"", status: str = "200 OK", **headers: str | int) -> bytes:
    """An HTTP answer; underscores in names of headers are dashes."""
    lines = {"content_length": len(body), "connection": "close", **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def redirect(location: str, status: str = "302 Found", **headers: str) -> bytes:
    """An HTTP answer that redirects."""
    return answer(status=status, location=location, **headers)


@contextlib.asynccontextmanager
async def web_site(
    *answers: bytes | Handler,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Site]:
    """Serve on ``host``: each request gets the next answer, and all further ones the last."""
    site = Site()
    running: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        site.open += 1
        site.most_open = max(site.most_open, site.open)
        site.connections += 1
        number = site.connections
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            site.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            chosen = answers[min(number, len(answers)) - 1]
            if isinstance(chosen, bytes):
                writer.write(chosen)
            else:
                await chosen(writer)
            await writer.drain()
        site.open -= 1
        writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(handle(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    server = await asyncio.start_server(accept, host, port, ssl=tls)
    site.port = server.sockets[0].getsockname()[1]
    try:
        yield site
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
