"""The application in front of several models, whose servers are small applications."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from tests.tools.otlp_collector import Collector, attributes, collecting
from tgi_cli.errors import ShardError
from tgi_cli.multi_model.config import ModelSpec, MultiModelConfig
from tgi_cli.multi_model.model_manager import ModelManager
from tgi_cli.multi_model.model_process import ModelProcess
from tgi_cli.multi_model.model_scheduler import LoadState, SwitchPolicy
from tgi_cli.multi_model.server import create_app
from tgi_cli.router.http.http_server import HttpServer, http_server_config

MAX_SECONDS = 60.0
KEY = {"authorization": "Bearer secret"}


class FakeProcess:
    """A model's server in this process, with an answer that tells what it got."""

    def __init__(self, spec: ModelSpec, servers: Servers) -> None:
        self.spec = spec
        self.url = f"http://{spec.name}"
        self.own_headers: dict[str, str] = {}
        self._servers = servers
        self._ended = asyncio.Event()
        routes = [
            Route("/v1/models", self._models),
            Route("/metrics", self._metrics),
            Route("/v1/responses/{id}", self._stored),
            Route("/{path:path}", self._echo, methods=["GET", "POST"]),
        ]
        transport = httpx.ASGITransport(Starlette(routes=routes))
        self.client = httpx.AsyncClient(transport=transport, base_url=self.url)

    async def ready(self) -> float:
        await self._servers.gate.wait()
        if self.spec.name in self._servers.broken:
            raise ShardError("its weights are damaged")
        return 2.0

    async def wait(self) -> None:
        await self._ended.wait()

    def failure(self) -> ShardError:
        return ShardError("it was killed")

    async def memory(self) -> int:
        return 10

    async def stop(self) -> None:
        self._servers.stopped.append(self.spec.name)
        self._ended.set()
        await self.client.aclose()

    def die(self) -> None:
        self._ended.set()

    async def _echo(self, request: Request) -> JSONResponse:
        await self._servers.answer.wait()
        return JSONResponse(
            {
                "server": self.spec.name,
                "path": request.url.path,
                "query": request.url.query,
                "headers": dict(request.headers),
                "body": (await request.body()).decode(),
            },
            status_code=207,
            headers={"x-compute-type": "cpu", "x-request-id": "of the model"},
        )

    async def _models(self, request: Request) -> JSONResponse:
        names = [*self.spec.names, f"{self.spec.name}-lora"]
        return JSONResponse({"data": [{"id": name, "max_model_len": 64} for name in names]})

    async def _metrics(self, request: Request) -> PlainTextResponse:
        if "openmetrics" in request.headers["accept"]:
            mark = ' # {trace_id="a}b"} 0.5 17'
            return PlainTextResponse(
                f'# TYPE t histogram\nt_bucket{{le="1.0"}} 2{mark}\nt_bucket{{le="+Inf"}} 2\n'
                "t_count 2\nt_sum 1\n# EOF\n"
            )
        name = self.spec.name
        return PlainTextResponse(
            "# HELP tgi_queue_size Requests.\n# TYPE tgi_queue_size gauge\ntgi_queue_size 3\n"
            f'# HELP t Times of {name}.\n# TYPE t histogram\nt_bucket{{le="1"}} 2\nt_count 2\n'
        )

    async def _stored(self, request: Request) -> JSONResponse:
        known = request.path_params["id"] == f"resp_{self.spec.name}"
        return JSONResponse({"server": self.spec.name}, status_code=200 if known else 404)


class Servers:
    """Starts them, and holds what tests change."""

    def __init__(self) -> None:
        self.gate, self.answer = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.answer.set()
        self.broken: set[str] = set()
        self.started: list[FakeProcess] = []
        self.stopped: list[str] = []

    def start(self, spec: ModelSpec) -> ModelProcess:
        self.started.append(FakeProcess(spec, self))
        return cast(ModelProcess, self.started[-1])

    @property
    def names(self) -> list[str]:
        return [each.spec.name for each in self.started]


@pytest.fixture
async def servers() -> Servers:
    return Servers()


@pytest.fixture
async def manager(servers: Servers) -> AsyncIterator[ModelManager]:
    specs = [
        ModelSpec(
            name=name,
            model_id=f"org/{name}",
            path=Path(name),
            names=(name, f"org/{name}"),
            memory=10,
        )
        for name in ("one", "two", "three")
    ]
    policy = SwitchPolicy(budget=25, residence=0.0, queue_size=4)
    manager = ModelManager(specs, policy, servers.start)
    yield manager
    servers.gate.set()
    await manager.close()


@pytest.fixture
def settings() -> dict[str, Any]:
    """Override to change the configuration."""
    return {}


@pytest.fixture
def app(manager: ModelManager, settings: dict[str, Any]) -> Starlette:
    config = MultiModelConfig(
        models=(),
        policy=manager.scheduler.policy,
        hostname="",
        port=0,
        payload_limit=10_000,
        graceful_termination_timeout=1,
        api_key="secret",
        **settings,
    )
    return create_app(manager, config)


@pytest.fixture
async def client(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://front", headers=KEY, timeout=MAX_SECONDS
    ) as client:
        yield client


async def ask(client: httpx.AsyncClient, model: str | None, path: str = "/v1/x") -> dict[str, Any]:
    answer = await client.post(path, json={"prompt": "p"} | ({"model": model} if model else {}))
    assert answer.status_code == 207, answer.text
    return dict(answer.json())


async def until(condition: Any) -> None:
    async with asyncio.timeout(MAX_SECONDS):
        while not condition():  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(0)


async def statuses(client: httpx.AsyncClient) -> dict[str, str]:
    listed = (await client.get("/v1/models")).json()["data"]
    return {card["id"]: card["status"]["value"] for card in listed}


async def test_requests_go_to_the_model_that_they_name(client: httpx.AsyncClient) -> None:
    for name, server in (
        ("one", "one"),
        ("org/two", "two"),
        ("two-lora", "two"),
        ("tgi", "one"),
        (None, "one"),
    ):
        assert (await ask(client, name))["server"] == server
    found = await ask(client, None, "/upstream/three/generate?a=1")
    assert (found["server"], found["path"], found["query"]) == ("three", "/generate", "a=1")
    answer = await client.get("/info", headers={"x-model": "two"})
    assert answer.json()["server"] == "two"


async def test_unknown_models_are_404(client: httpx.AsyncClient, servers: Servers) -> None:
    answer = await client.post("/v1/x", json={"model": "gpt-4"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert (await client.get("/upstream/none/info")).status_code == 404
    assert not servers.started


async def test_heads_and_bodies_are_passed_on(client: httpx.AsyncClient) -> None:
    headers = {
        "x-request-id": "mine",
        "traceparent": "00-1-2-3",
        "connection": "keep-alive",
        "x-model": "one",
        "origin": "https://page.example",
    }
    answer = await client.post("/generate?q=%20", json={"inputs": "x"}, headers=headers)
    found = answer.json()
    assert found["body"] == '{"inputs":"x"}'
    assert found["query"] == "q=%20"
    assert found["headers"]["x-request-id"] == "mine"
    assert found["headers"]["traceparent"] == "00-1-2-3"
    assert found["headers"]["authorization"] == "Bearer secret"
    assert "origin" not in found["headers"]
    assert "x-model" not in found["headers"]
    assert answer.headers["x-compute-type"] == "cpu"
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert answer.headers["access-control-allow-origin"] == "*"


async def test_keys_are_required(client: httpx.AsyncClient, servers: Servers) -> None:
    del client.headers["authorization"]
    for path in ("/health", "/metrics"):
        assert (await client.get(path)).status_code == 200
    for path in ("/v1/models", "/info", "/upstream/one/info"):
        assert (await client.get(path)).status_code == 401
    assert (await client.post("/models/load", json={"model": "one"})).status_code == 401
    assert not servers.started


@asynccontextmanager
async def listening(app: Starlette) -> AsyncIterator[str]:
    """An application on a real socket; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(http_server_config(app, 10_000, None, None))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving


@asynccontextmanager
async def streaming(
    servers: Servers, manager: ModelManager, events: Callable[[], AsyncIterator[bytes]]
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the front, before a server whose answers are these events."""

    async def stream(request: Request) -> StreamingResponse:
        return StreamingResponse(events(), media_type="text/event-stream")

    config = MultiModelConfig(
        models=(),
        policy=manager.scheduler.policy,
        hostname="",
        port=0,
        payload_limit=10_000,
        graceful_termination_timeout=1,
    )
    routes = [Route("/{path:path}", stream)]
    async with (
        asyncio.timeout(MAX_SECONDS),
        listening(Starlette(routes=routes)) as model,
        listening(create_app(manager, config)) as front,
        httpx.AsyncClient(base_url=front, timeout=MAX_SECONDS) as client,
    ):
        await manager.until_loaded("one")
        await servers.started[0].client.aclose()
        servers.started[0].url = model
        servers.started[0].client = httpx.AsyncClient(timeout=MAX_SECONDS)
        yield client


async def test_streams_are_passed_on_as_they_come_and_end_with_their_client(
    servers: Servers, manager: ModelManager
) -> None:
    ended = asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        try:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with streaming(servers, manager, events) as client:
        async with client.stream("GET", "/stream") as answer:
            assert await anext(answer.aiter_lines()) == "data: 1", "the rest never comes"
            assert manager.scheduler.models["one"].running == 1
        await ended.wait()
        await until(lambda: manager.scheduler.models["one"].running == 0)


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/generate_stream", b'"error_type":"generation"}\n\n'),
        ("/upstream/one/v1/chat/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", b"event: error\ndata: {"),
        ("/v1/responses", b'"sequence_number":0}\n\n'),
    ],
)
async def test_a_stream_whose_server_is_lost_ends_with_an_error(
    servers: Servers, manager: ModelManager, path: str, last: bytes
) -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        raise ConnectionAbortedError

    async with streaming(servers, manager, events) as client:
        answer = await client.get(path)
    first, _, rest = answer.content.partition(b"\n\n")
    assert first == b"data: 1"
    assert b"the model server is gone" in rest
    assert last in rest
    assert manager.scheduler.models["one"].running == 0


async def test_a_stream_that_ends_within_an_event_is_torn(
    servers: Servers, manager: ModelManager
) -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b'data: {"half'
        raise ConnectionAbortedError

    async with streaming(servers, manager, events) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/generate_stream")


async def test_a_switch_waits_for_what_runs(
    client: httpx.AsyncClient, servers: Servers, manager: ModelManager
) -> None:
    await ask(client, "one")
    await ask(client, "two")
    servers.answer.clear()
    running = [asyncio.create_task(ask(client, name)) for name in ("one", "two")]
    await until(lambda: manager.scheduler.models["two"].running == 1)
    waiting = asyncio.create_task(ask(client, "three"))
    await until(lambda: manager.scheduler.models["one"].state is LoadState.DRAINING)
    late = asyncio.create_task(ask(client, "one"))
    await until(lambda: manager.scheduler.queued == 2)
    assert not servers.stopped
    servers.answer.set()
    found = await asyncio.gather(*running, waiting, late)
    assert [each["server"] for each in found] == ["one", "two", "three", "one"]
    assert manager.scheduler.switches == 2
    shown = (await client.get("/metrics")).text
    assert "tgi_model_switches_total 2" in shown


async def test_a_full_queue_is_a_503_with_the_time_of_a_load(
    client: httpx.AsyncClient, servers: Servers, manager: ModelManager
) -> None:
    servers.gate.clear()
    waiting = [asyncio.create_task(ask(client, "one")) for _ in range(4)]
    await until(lambda: manager.scheduler.queued == 4)
    refused = await client.post("/v1/x", json={"model": "two"})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert "4 requests wait" in refused.json()["error"]["message"]
    servers.gate.set()
    await asyncio.gather(*waiting)


async def test_a_failed_load_ends_its_requests_with_the_cause(
    client: httpx.AsyncClient, servers: Servers
) -> None:
    servers.broken = {"two"}
    answer = await client.post("/v1/x", json={"model": "two"})
    assert answer.status_code == 503
    assert "its weights are damaged" in answer.json()["error"]["message"]
    card = (await client.get("/v1/models/two")).json()
    assert card["status"]["failed"] is True
    assert "damaged" in card["status"]["cause"]
    servers.broken = set()
    assert (await ask(client, "two"))["server"] == "two"
    assert "failed" not in (await client.get("/v1/models/two")).json()["status"]


async def test_a_model_that_ends_is_loaded_again(
    client: httpx.AsyncClient, servers: Servers, manager: ModelManager
) -> None:
    await ask(client, "one")
    servers.started[0].die()
    await until(lambda: manager.scheduler.models["one"].state is LoadState.UNLOADED)
    assert (await statuses(client))["one"] == "unloaded"
    assert (await ask(client, "one"))["server"] == "one"
    assert servers.names == ["one", "one"]


async def test_clients_that_go_leave_the_queue(
    client: httpx.AsyncClient, servers: Servers, manager: ModelManager
) -> None:
    servers.gate.clear()
    waiting = asyncio.create_task(ask(client, "one"))
    await until(lambda: manager.scheduler.queued == 1)
    waiting.cancel()
    await until(lambda: manager.scheduler.queued == 0)
    servers.gate.set()
    await until(lambda: manager.scheduler.models["one"].state is LoadState.LOADED)
    assert manager.scheduler.models["one"].running == 0


async def test_load_and_unload(
    client: httpx.AsyncClient, servers: Servers, manager: ModelManager
) -> None:
    assert (await statuses(client)) == {"one": "unloaded", "two": "unloaded", "three": "unloaded"}
    servers.gate.clear()
    loaded = await client.post("/models/load", json={"model": "two"})
    assert loaded.json() == {"success": True}
    assert (await statuses(client))["two"] == "loading"
    servers.gate.set()
    await until(lambda: manager.scheduler.models["two"].state is LoadState.LOADED)
    card = (await client.get("/v1/models/two")).json()
    assert card["max_model_len"] == 64
    assert card["status"]["load_seconds"] == 2.0
    assert "two-lora" in await statuses(client)
    assert "org/two" not in await statuses(client), "each model once"
    assert (await client.post("/models/unload", json={"model": "two"})).json() == {"success": True}
    await until(lambda: manager.scheduler.models["two"].state is LoadState.UNLOADED)
    assert servers.stopped == ["two"]
    assert (await client.post("/models/load", json={"model": "x"})).status_code == 404


async def test_stored_responses_are_found_where_they_are(client: httpx.AsyncClient) -> None:
    await ask(client, "one")
    await ask(client, "two")
    for name in ("one", "two"):
        found = await client.get(f"/v1/responses/resp_{name}")
        assert found.json() == {"server": name}
    assert (await client.get("/v1/responses/resp_none")).status_code == 404


async def test_a_silent_server_does_not_keep_a_look_up(
    client: httpx.AsyncClient, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tgi_cli.multi_model.proxy._LOOK_UP_SECONDS", 0.05)
    await ask(client, "one")
    await ask(client, "two")
    get = servers.started[0].client.get

    async def silent(url: str, **options: Any) -> httpx.Response:
        if options.get("timeout") == 0.05:
            raise httpx.ReadTimeout("")
        return await get(url, **options)

    monkeypatch.setattr(servers.started[0].client, "get", silent)
    assert (await client.get("/v1/responses/resp_two")).json() == {"server": "two"}


async def test_metrics_of_models_have_a_label(client: httpx.AsyncClient) -> None:
    await ask(client, "one")
    await ask(client, "two")
    lines = (await client.get("/metrics")).text.splitlines()
    assert lines.count("# TYPE tgi_queue_size gauge") == 1
    assert 'tgi_queue_size{model="one"} 3' in lines
    assert 't_bucket{model="two",le="1"} 2' in lines
    at = lines.index("# TYPE t histogram")
    assert all(line.startswith("t_") for line in lines[at + 1 : at + 5])
    assert 'tgi_model_loaded{model="three"} 0' in lines


async def test_the_document_has_the_routes(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/api-doc/openapi.json")).json()["paths"]
    assert {"/models/load", "/models/unload", "/generate", "/v1/chat/completions"} <= set(paths)


async def test_bodies_are_bounded(client: httpx.AsyncClient, servers: Servers) -> None:
    assert (await client.post("/generate", json={"inputs": "x" * 20_000})).status_code == 413
    assert (await client.post("/generate", content=b"{")).status_code == 415
    headers = {"content-type": "application/json"}
    assert (await client.post("/generate", content=b"{", headers=headers)).status_code == 400
    assert not servers.started


class TestTraces:
    @pytest.fixture
    def collector(self) -> Iterator[Collector]:
        with collecting() as collector:
            yield collector

    @pytest.fixture
    def settings(self, collector: Collector) -> dict[str, Any]:
        return {"otlp_endpoint": collector.endpoint}

    async def test_the_models_server_continues_the_trace(
        self, client: httpx.AsyncClient, app: Starlette, collector: Collector
    ) -> None:
        trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        headers = {
            "traceparent": f"00-{trace}-{parent}-01",
            "tracestate": "a=b",
            "baggage": "user=marzipan",
            "x-model": "two",
        }
        answer = await client.post("/generate", json={"inputs": "x"}, headers=headers)
        forwarded = answer.json()["headers"]
        unsampled = {"traceparent": f"00-{trace}-{parent}-00", "x-model": "two"}
        answer = await client.post("/generate", json={"inputs": "x"}, headers=unsampled)
        assert answer.json()["headers"]["traceparent"].endswith("-00")
        await asyncio.to_thread(app.state.tracing.close)
        taken = collector.take(3)
        name = "text-generation-inference.front"
        assert {resource["service.name"] for resource, _ in taken} == {name}
        by_kind = {span.kind: span for _, span in taken}
        waiting, whole, sent = (by_kind[kind] for kind in (1, 2, 3))  # internal, server, client
        assert forwarded["traceparent"] == f"00-{trace}-{sent.span_id.hex()}-01"
        assert (forwarded["tracestate"], forwarded["baggage"]) == ("a=b", "user=marzipan")
        assert whole.parent_span_id.hex() == parent
        assert waiting.parent_span_id == sent.parent_span_id == whole.span_id
        assert waiting.name == "queue"
        assert attributes(waiting)["gen_ai.request.model"] == "two"
        assert attributes(sent)["server.address"] == "two"
        assert attributes(sent)["http.response.status_code"] == 207
        assert "marzipan" not in str(taken)


async def test_metrics_of_models_keep_their_exemplars(client: httpx.AsyncClient) -> None:
    await ask(client, "one")
    await ask(client, "two")
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = await client.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = {each.name: each for each in text_string_to_metric_families(answer.text)}
    assert {"tgi_model_switches", "tgi_model_refused_requests", "t"} <= families.keys()
    marked = {
        sample.labels["model"]: sample.exemplar.labels
        for sample in families["t"].samples
        if sample.exemplar is not None
    }
    assert marked == {"one": {"trace_id": "a}b"}, "two": {"trace_id": "a}b"}}
