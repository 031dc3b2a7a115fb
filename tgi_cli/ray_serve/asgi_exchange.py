"""One HTTP exchange with an ASGI application in this process, as parts of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.types import ASGIApp, Message, Scope

from tgi_cli.ray_serve.messages import ForwardedRequest, Headers, ResponseStart, WholeResponse

_running: set[asyncio.Task[None]] = set()
"""Keeps exchanges alive that no request awaits: those of clients that are gone."""


async def exchange(app: ASGIApp, request: ForwardedRequest) -> AsyncIterator[ResponseStart | bytes]:
    """Send a request to the application and yield its answer.

    What the application has sent by the time that a part is asked for is one part: parts are
    expensive, and those of a busy replica are larger.

    The application sees that the client is gone when the iterator is closed or cancelled.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    bodies = [request.body]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope(request), receive, sent.put)
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(run(), name="exchange")
    _running.add(task)
    task.add_done_callback(_ended)
    try:
        ended = False
        while not ended:
            messages = [await sent.get()]
            while not sent.empty():
                messages.append(sent.get_nowait())
            ended = messages[-1] is None
            found = [message for message in messages if message is not None]
            body = b"".join(message.get("body", b"") for message in found)
            if found and found[0]["type"] == "http.response.start":
                headers: Headers = [(bytes(k), bytes(v)) for k, v in found[0].get("headers", ())]
                yield ResponseStart(found[0]["status"], headers, body)
            elif body:
                yield body
        await task  # raises what the application did
    finally:
        gone.set()


def _ended(task: asyncio.Task[None]) -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved, even if it is not awaited


async def whole_response(app: ASGIApp, request: ForwardedRequest, replica: str) -> WholeResponse:
    """The complete answer to a request."""
    status, headers, body = 500, Headers(), []
    async for part in exchange(app, request):
        if isinstance(part, ResponseStart):
            status, headers = part.status, part.headers
            part = part.body
        body.append(part)
    return WholeResponse(replica, status, headers, b"".join(body))


def _scope(request: ForwardedRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": request.client,
        "server": None,
    }
