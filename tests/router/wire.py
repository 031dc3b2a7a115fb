"""The app behind the router's own protocol, and clients that write raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette

from tgi_cli.router.http.protocol import BoundedProtocol

Exchange = Callable[..., Awaitable[bytes]]

HEAD_SECONDS = 1.0
BODY = json.dumps({"inputs": "hello", "parameters": {"max_new_tokens": 2}}).encode()
POST = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
LAST = b"connection: close\r\n"


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[int]:
    """Serve an application with little patience; the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    protocol = partial(BoundedProtocol, head_seconds=HEAD_SECONDS, body_seconds=-4.0)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=protocol,  # type: ignore[arg-type]
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
    )
    serving = asyncio.ensure_future(server._serve([listener]))
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving


@pytest.fixture
async def port(app: Starlette) -> AsyncIterator[int]:
    """Where the app is served."""
    async with served(app) as number:
        yield number


@pytest.fixture
def exchange(port: int) -> Exchange:
    """Send parts with pauses between them; all that comes back until the server closes."""

    async def run(*parts: bytes, pause: float = 0.0) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = asyncio.ensure_future(reader.read())
        try:
            async with asyncio.timeout(60):
                for part in parts:
                    if answer.done():
                        break
                    try:
                        writer.write(part)
                        await writer.drain()
                    except ConnectionError:
                        break
                    await asyncio.sleep(pause)
                try:
                    return await answer
                except ConnectionError:
                    return b""
        finally:
            answer.cancel()
            writer.close()

    return run


def status(answer: bytes) -> int:
    """Of the first answer; 0: none."""
    return int(answer.split(b" ")[1]) if answer else 0


def statuses(answer: bytes) -> list[int]:
    """Of all answers."""
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]
