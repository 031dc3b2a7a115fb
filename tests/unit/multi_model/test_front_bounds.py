"""What a small request may cost the application in front of several models, and what it may ask."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.unit.multi_model.test_front import MAX_SECONDS, Servers, ask, listening, until
from tgi_cli.multi_model import routes
from tgi_cli.multi_model.config import ModelSpec, MultiModelConfig
from tgi_cli.multi_model.model_manager import ModelManager
from tgi_cli.multi_model.model_scheduler import LoadState, SwitchPolicy
from tgi_cli.multi_model.server import create_app
from tgi_cli.router.bounds import NAME_CHARACTERS
from tgi_cli.router.observability.prometheus import by_label

JSON = {"content-type": "application/json"}


@pytest.fixture
async def servers() -> Servers:
    return Servers()


@pytest.fixture
async def manager(servers: Servers) -> AsyncIterator[ModelManager]:
    specs = [
        ModelSpec(name=name, model_id=name, path=Path(name), names=(name,), memory=10)
        for name in ("one", "two")
    ]
    manager = ModelManager(
        specs, SwitchPolicy(budget=15, residence=0.0, queue_size=4), servers.start
    )
    yield manager
    servers.gate.set()
    servers.answer.set()
    await manager.close()


@pytest.fixture
def app(manager: ModelManager) -> Starlette:
    config = MultiModelConfig(
        models=(),
        policy=manager.scheduler.policy,
        hostname="",
        port=0,
        payload_limit=10_000,
        graceful_termination_timeout=1,
    )
    return create_app(manager, config)


@pytest.fixture
async def client(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://front", timeout=MAX_SECONDS
    ) as client:
        yield client


async def loaded_at(manager: ModelManager, servers: Servers, url: str) -> None:
    """Load the first model, with a server at this address."""
    await manager.until_loaded("one")
    (process,) = servers.started
    await process.client.aclose()
    process.url = url
    process.client = httpx.AsyncClient(base_url=url, timeout=MAX_SECONDS)


async def exchange(url: str, sent: bytes) -> bytes:
    """All that comes back for what is sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    try:
        writer.write(sent)
        async with asyncio.timeout(MAX_SECONDS):
            return await reader.read()
    finally:
        writer.close()


async def count_headers(request: Request) -> JSONResponse:
    own = [value for name, value in request.headers.items() if name.startswith("x-own")]
    return JSONResponse({"own": own})


ECHO = [Route("/{path:path}", count_headers, methods=["GET", "POST", "OPTIONS"])]


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET *", 404),
        (b"OPTIONS *", 404),
        (b"CONNECT a:443", 400),
        (b"GET /a\x7f", 400),
        (b"GET /a\xff", 400),
        (b"GET //other.example/a", 200),
        (b'GET /"<>{}|^`\\', 200),
        (b"GET /%zz%", 200),
        (b"GET /../../a", 200),
        (b"GET http://other.example:99/a", 200),
        (b"GET /upstream/one", 200),
        (b"GET /upstream/%ff%00/a", 404),
        (b"GET /upstream/" + b"a" * 30_000 + b"/a", 404),
        (b"GET /" + b"%ff" * 10_000, 200),
        (b"GET /v1/responses/" + b"%ff" * 10_000, 200),
        (b"GET /v1/responses/..", 200),
    ],
    ids=lambda value: value[:30].decode("latin-1") if isinstance(value, bytes) else None,
)
async def test_odd_request_lines_are_no_failures(
    app: Starlette, manager: ModelManager, servers: Servers, line: bytes, status: int
) -> None:
    async with listening(Starlette(routes=ECHO)) as model, listening(app) as front:
        await loaded_at(manager, servers, model)
        answer = await exchange(front, line + b" HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    assert answer.split(b" ")[1] == b"%d" % status
    assert len(answer) < 2000, "names are not repeated as a whole"


@pytest.mark.parametrize(
    ("value", "passed"), [(b"a\t", "a"), (b" \ta b \t ", "a b"), (b"", ""), (b"\xc3\xa9", "Ã©")]
)
async def test_values_of_headers_are_passed_on(
    app: Starlette, manager: ModelManager, servers: Servers, value: bytes, passed: str
) -> None:
    async with listening(Starlette(routes=ECHO)) as model, listening(app) as front:
        await loaded_at(manager, servers, model)
        head = b"GET /a HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx-own: %b\r\n\r\n" % value
        answer = await exchange(front, head)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["own"] == [passed]


async def test_as_many_headers_as_are_read_are_passed_on(
    app: Starlette, manager: ModelManager, servers: Servers
) -> None:
    own = b"".join(b"x-own-%d: 1\r\n" % number for number in range(97))
    async with listening(Starlette(routes=ECHO)) as model, listening(app) as front:
        await loaded_at(manager, servers, model)
        head = b"GET /a HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx-request-id: a\r\n"
        answer = await exchange(front, head + own + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert len(msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["own"]) == 97


@pytest.mark.parametrize(
    "model", [b"5", b"null", b'"\xff"', b'"%b"' % (b"a" * (NAME_CHARACTERS + 1)), b'["one"]']
)
async def test_models_that_are_no_names_are_left_to_the_default(
    client: httpx.AsyncClient, manager: ModelManager, servers: Servers, model: bytes
) -> None:
    async with listening(Starlette(routes=ECHO)) as url:
        await loaded_at(manager, servers, url)
        answer = await client.post("/v1/x", content=b'{"model":%b}' % model, headers=JSON)
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/v1/x", "/v1/models/" + "a" * 5000])
async def test_unknown_names_are_shortened_in_the_error(
    client: httpx.AsyncClient, servers: Servers, path: str
) -> None:
    answer = await client.get(path, headers={"x-model": "a" * 5000})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert len(answer.content) < 2 * NAME_CHARACTERS
    assert not servers.started


async def test_stored_responses_are_looked_for_without_reading_them(
    app: Starlette, manager: ModelManager, servers: Servers
) -> None:
    seen: list[str] = []

    async def stored(request: Request) -> Response:
        seen.append(request.method)
        return Response(b"x" * 1_000_000)

    store = Starlette(routes=[Route("/v1/responses/{id}", stored)])
    async with listening(store) as model, listening(app) as front:
        await loaded_at(manager, servers, model)
        async with httpx.AsyncClient(base_url=front, timeout=MAX_SECONDS) as client:
            assert len((await client.get("/v1/responses/resp_1")).content) == 1_000_000
    assert seen == ["HEAD", "GET"]


async def test_the_document_is_made_once_and_off_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    make = routes._document

    def watched(guarded: bool) -> bytes:
        seen.append(threading.get_ident())
        return make(guarded)

    monkeypatch.setattr(routes, "_document", watched)
    first, second = [await client.get("/api-doc/openapi.json") for _ in range(2)]
    assert first.content == second.content
    assert first.json()["openapi"] == "3.1.0"
    assert len(seen) == 1
    assert seen[0] != threading.get_ident()


def test_values_of_labels_may_hold_what_ends_lines_elsewhere() -> None:
    odd = "a\u2028b\x1cc\x85d\re"
    text = f'# TYPE t gauge\nt{{name="{odd}"}} 1\nt{{name="b {{}}"}} 2\nt{{}} 3\n'
    assert [*by_label("model", {"one": text.split("\n")})] == [
        "# TYPE t gauge",
        f't{{model="one",name="{odd}"}} 1',
        't{model="one",name="b {}"} 2',
        't{model="one"} 3',
    ]


async def test_calls_of_load_do_not_fill_the_queue(
    client: httpx.AsyncClient, servers: Servers, manager: ModelManager
) -> None:
    servers.gate.clear()
    for _ in range(50):
        answer = await client.post("/models/load", json={"model": "two"})
        assert answer.status_code == 200
    assert manager.scheduler.queued == 1
    waiting = asyncio.create_task(ask(client, "two"))
    await until(lambda: manager.scheduler.queued == 2)
    servers.gate.set()
    assert (await waiting)["server"] == "two"
    assert (await client.post("/models/load", json={"model": "two"})).status_code == 200
    assert manager.scheduler.queued == 0
    assert manager.scheduler.models["two"].state is LoadState.LOADED


async def test_bodies_that_wait_are_bounded_together(
    client: httpx.AsyncClient, app: Starlette, servers: Servers
) -> None:
    memory = app.state.proxy.bodies
    memory.most = 1500
    servers.gate.clear()
    body = {"model": "one", "prompt": "x" * 900}
    waiting = asyncio.create_task(client.post("/v1/x", json=body))
    await until(lambda: memory.taken > 900)
    refused = await client.post("/v1/x", json=body)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["connection"] == "close"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    servers.gate.set()
    assert (await waiting).json()["body"] == httpx.Request(
        "POST", "http://a", json=body
    ).content.decode()
    assert memory.taken == 0
    assert (await client.post("/v1/x", json=body)).status_code == 207


async def test_a_body_is_freed_when_it_was_sent_on(
    app: Starlette, manager: ModelManager, servers: Servers
) -> None:
    """Not when the answer ends, which may be minutes later."""
    memory = app.state.proxy.bodies
    more = asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await more.wait()
        yield b"data: 2\n\n"

    async def stream(request: Request) -> StreamingResponse:
        assert len(await request.body()) > 9000
        assert request.headers["content-length"].isdigit()
        return StreamingResponse(events(), media_type="text/event-stream")

    model_app = Starlette(routes=[Route("/stream", stream, methods=["POST"])])
    async with (
        asyncio.timeout(MAX_SECONDS),
        listening(model_app) as model,
        listening(app) as front,
        httpx.AsyncClient(base_url=front, timeout=MAX_SECONDS) as client,
    ):
        await loaded_at(manager, servers, model)
        async with client.stream("POST", "/stream", json={"prompt": "x" * 9000}) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == "data: 1"
            assert memory.taken == 0
            more.set()
            assert [line async for line in lines if line] == ["data: 2"]
