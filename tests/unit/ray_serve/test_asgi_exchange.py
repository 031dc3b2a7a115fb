"""An exchange with an application in this process."""

from __future__ import annotations

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tgi_cli.ray_serve.asgi_exchange import exchange, whole_response
from tgi_cli.ray_serve.messages import ForwardedRequest, ResponseStart
from tgi_cli.router.replicas.policy import RoutingKey


def request(path: str, body: bytes = b"") -> ForwardedRequest:
    return ForwardedRequest(
        method="POST",
        path=path,
        query=b"a=1",
        headers=[(b"x-name", b"value")],
        body=body,
        client=("127.0.0.1", 5),
        key=RoutingKey((), 0),
    )


async def echo(request: Request) -> Response:
    body = (await request.body()).decode()
    text = f"{body} {request.query_params['a']} {request.headers['x-name']} {request.client}"
    return PlainTextResponse(text, 201, {"x-answer": "yes"})


async def count(request: Request) -> Response:
    async def numbers():  # type: ignore[no-untyped-def]
        for number in range(3):
            yield b"%d " % number
            await asyncio.sleep(0.01)

    return StreamingResponse(numbers())


async def fail(request: Request) -> Response:
    raise LookupError("a bug")


APP = Starlette(
    routes=[Route(f"/{each.__name__}", each, methods=["POST"]) for each in (echo, count, fail)]
)


async def test_a_short_answer_is_one_part() -> None:
    parts = [part async for part in exchange(APP, request("/echo", b"body"))]
    (start,) = parts
    assert isinstance(start, ResponseStart)
    assert start.status == 201
    assert start.body == b"body 1 value Address(host='127.0.0.1', port=5)"
    assert (b"x-answer", b"yes") in start.headers


async def test_a_stream_comes_in_parts() -> None:
    start, *parts = [part async for part in exchange(APP, request("/count"))]
    assert isinstance(start, ResponseStart)
    texts = [part for part in parts if isinstance(part, bytes)]
    assert start.body + b"".join(texts) == b"0 1 2 "
    assert len(texts) >= 2


async def test_what_waits_is_one_part() -> None:
    parts = exchange(APP, request("/count"))
    start = await anext(parts)
    assert isinstance(start, ResponseStart)
    for _ in range(20):  # turns of the loop, however long each of them takes
        await asyncio.sleep(0.02)
    rest = [part async for part in parts]
    assert start.body + b"".join(p for p in rest if isinstance(p, bytes)) == b"0 1 2 "
    assert len(rest) == 1


async def test_errors_of_the_application_are_raised() -> None:
    with pytest.raises(LookupError, match="a bug"):
        async for _ in exchange(APP, request("/fail")):
            pass


async def test_the_application_sees_that_the_client_is_gone() -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"x"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await seen.put((await receive())["type"])

    parts = exchange(app, request("/", b"x"))
    assert isinstance(await anext(parts), ResponseStart)
    reading = asyncio.ensure_future(anext(parts))
    await asyncio.sleep(0)
    reading.cancel()
    async with asyncio.timeout(60):
        assert await seen.get() == "http.disconnect"


async def test_a_whole_response() -> None:
    answer = await whole_response(APP, request("/count"), "r1")
    assert (answer.replica, answer.status, answer.body) == ("r1", 200, b"0 1 2 ")
