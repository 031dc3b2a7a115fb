"""The application in front of replicas, with scripted ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from starlette.types import Message

from tgi_cli.ray_serve import front
from tgi_cli.ray_serve.front import ATTEMPTS, FrontApp, ReplicaStream
from tgi_cli.ray_serve.messages import (
    ForwardedRequest,
    Refusal,
    ResponseStart,
    WholeResponse,
)

LIMIT = 1000
EVENTS = [(b"content-type", b"text/event-stream"), (b"x-request-id", b"the replica's")]


class Full(Exception):
    pass


class Lost(Exception):
    pass


class ScriptedStream:
    """Yields parts, raises exceptions, and waits at None."""

    def __init__(self, script: list[Any]) -> None:
        self._script = iter(script)
        self.cancelled = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            part = next(self._script)
        except StopIteration:
            raise StopAsyncIteration from None
        if part is None:
            await asyncio.Event().wait()
        if isinstance(part, Exception):
            raise part
        return part

    def cancel(self) -> None:
        self.cancelled.set()


class ScriptedReplicas:
    """A script for each request in turn."""

    full, lost = Full, Lost

    def __init__(self, *scripts: list[Any], whole: list[WholeResponse] | None = None) -> None:
        self._scripts = iter(scripts)
        self._whole = whole or []
        self.requests: list[ForwardedRequest] = []
        self.streams: list[ScriptedStream] = []

    def send(self, request: ForwardedRequest) -> ReplicaStream:
        self.requests.append(request)
        self.streams.append(ScriptedStream(next(self._scripts)))
        return self.streams[-1]

    async def send_to_all(self, request: ForwardedRequest, seconds: float) -> list[WholeResponse]:
        return self._whole


def ok(body: bytes = b"fine", headers: Any = ()) -> list[Any]:
    return [ResponseStart(200, [(b"content-type", b"text/plain"), *headers], body)]


async def ask(replicas: ScriptedReplicas, path: str = "/generate", **given: Any) -> httpx.Response:
    transport = httpx.ASGITransport(FrontApp(replicas, LIMIT))
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        return await client.request(given.pop("method", "POST"), path, **given)


async def test_a_request_and_its_answer_pass() -> None:
    replicas = ScriptedReplicas([*ok(b"one ", [(b"x-mine", b"1")]), b"two ", b"three"])
    answer = await ask(replicas, "/generate?q=1", json={"inputs": "x"}, headers={"x-a": "b"})
    assert (answer.status_code, answer.text) == (200, "one two three")
    assert answer.headers["x-mine"] == "1"
    (request,) = replicas.requests
    assert (request.method, request.path, request.query) == ("POST", "/generate", b"q=1")
    assert json.loads(request.body) == {"inputs": "x"}
    assert (b"x-a", b"b") in request.headers
    assert not replicas.streams[0].cancelled.is_set()


async def test_headers_that_rays_proxy_writes_are_left_to_it() -> None:
    answer = await ask(ScriptedReplicas(ok(headers=[(b"X-Request-Id", b"1"), (b"date", b"x")])))
    assert "x-request-id" not in answer.headers
    assert "date" not in answer.headers


async def test_a_refused_request_goes_to_another_replica() -> None:
    replicas = ScriptedReplicas([Refusal("a")], [Refusal("b")], ok())
    assert (await ask(replicas)).text == "fine"
    assert [request.avoid for request in replicas.requests] == [(), ("a",), ("a", "b")]
    assert not replicas.requests[-1].last_attempt


async def test_the_last_attempt_is_not_refused() -> None:
    gone = [ResponseStart(503, [(b"retry-after", b"5")], b"{}")]
    replicas = ScriptedReplicas(*[[Refusal(str(n))] for n in range(ATTEMPTS - 1)], gone)
    answer = await ask(replicas)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert [request.last_attempt for request in replicas.requests][-2:] == [False, True]


async def test_a_full_queue_is_an_overloaded_server() -> None:
    answer = await ask(ScriptedReplicas([Full()]))
    assert (answer.status_code, answer.json()["error_type"]) == (429, "overloaded")
    assert answer.headers["retry-after"]
    answer = await ask(ScriptedReplicas([Full()]), "/v1/messages")
    assert answer.status_code == 529


async def test_a_replica_that_dies_before_its_answer() -> None:
    answer = await ask(ScriptedReplicas([Lost()]), "/v1/completions")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "service_unavailable"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/generate_stream", b'data: {"error":"Request failed during generation: the model '),
        ("/v1/completions", b'data: {"error":{"message":"Request failed'),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"api_error"'),
        ("/v1/responses", b'event: error\ndata: {"type":"error","code":"server_error"'),
    ],
)
async def test_a_replica_that_dies_within_a_stream(path: str, expected: bytes) -> None:
    replicas = ScriptedReplicas([ResponseStart(200, EVENTS, b""), b"data: 1\n\n", Lost()])
    answer = await ask(replicas, path)
    first, last = answer.content.split(b"\n\n", 1)
    assert first == b"data: 1"
    assert last.startswith(expected)
    assert last.endswith(b"data: [DONE]\n\n") == (path == "/v1/completions")


async def test_a_broken_answer_that_is_no_stream_is_not_completed() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    app = FrontApp(ScriptedReplicas([*ok(b"half"), Lost()]), LIMIT)
    with pytest.raises(Lost):
        await app(scope("/generate"), body_of(b"{}"), send)
    assert sent[-1]["more_body"]


def scope(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [],
        "client": None,
    }


def body_of(body: bytes) -> Any:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def test_a_client_that_goes_cancels_the_request() -> None:
    replicas = ScriptedReplicas([ResponseStart(200, EVENTS, b""), None])
    begun = asyncio.Event()

    async def send(message: Message) -> None:
        begun.set()

    app = FrontApp(replicas, LIMIT)
    # Ray cancels what a request has started when its client is gone.
    answering = asyncio.ensure_future(app(scope("/generate_stream"), body_of(b"{}"), send))
    async with asyncio.timeout(60):
        await begun.wait()
        answering.cancel()
        await replicas.streams[0].cancelled.wait()
    with pytest.raises(asyncio.CancelledError):
        await answering


async def test_a_client_that_goes_within_its_body_asks_nothing() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    replicas = ScriptedReplicas()
    await FrontApp(replicas, LIMIT)(scope("/generate"), receive, send)
    assert not replicas.requests


async def test_bodies_are_read_up_to_the_limit() -> None:
    replicas = ScriptedReplicas(ok(), ok())
    await ask(replicas, content=b"x" * (LIMIT + 1))

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * LIMIT

    await ask(replicas, content=chunks())
    declared, streamed = replicas.requests
    assert declared.body == b""
    assert dict(declared.headers)[b"content-length"] == b"%d" % (LIMIT + 1)
    assert LIMIT < len(streamed.body) <= 2 * LIMIT


@pytest.mark.parametrize(
    ("headers", "is_read"),
    [
        ({}, False),
        ({"authorization": "Bearer other"}, False),
        ({"authorization": "Bearer second"}, True),
        ({"x-api-key": "first"}, True),
    ],
)
async def test_bodies_without_a_key_are_not_read(headers: dict[str, str], is_read: bool) -> None:
    """The replica, which answers that the key is missing, gets the rest."""
    replicas = ScriptedReplicas(ok())
    transport = httpx.ASGITransport(FrontApp(replicas, LIMIT, ("first", "second")))
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        assert (await client.post("/generate", content=b"x", headers=headers)).text == "fine"
    assert replicas.requests[0].body == (b"x" if is_read else b"")


async def test_bodies_of_all_requests_together_have_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front, "_MOST_HELD", 2 * LIMIT)
    replicas = ScriptedReplicas([*ok(), None], [*ok(), None], ok())
    app = FrontApp(replicas, LIMIT)
    transport = httpx.ASGITransport(app)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://front") as client,
        asyncio.timeout(60),
    ):
        running = [
            asyncio.ensure_future(client.post("/generate", content=b"x" * LIMIT)) for _ in range(2)
        ]
        while len(replicas.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        refused = await client.post("/generate", content=b"x")
        assert (refused.status_code, refused.json()["error_type"]) == (429, "overloaded")
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert (await client.post("/generate", content=b"x" * LIMIT)).text == "fine"


async def test_adapters_are_not_loaded_into_some_replicas() -> None:
    replicas = ScriptedReplicas()
    answer = await ask(replicas, "/v1/load_lora_adapter", json={})
    assert answer.status_code == 403
    assert "--lora-adapters" in answer.json()["error"]["message"]
    assert not replicas.requests


async def test_metrics_of_all_replicas() -> None:
    text = b"# HELP tgi_queue_size Waiting.\n# TYPE tgi_queue_size gauge\ntgi_queue_size %d\n"
    whole = [WholeResponse(name, 200, [], text % n) for n, name in ((3, "b"), (2, "a"))]
    answer = await ask(ScriptedReplicas(whole=whole), "/metrics", method="GET")
    assert answer.text.splitlines() == [
        "# HELP tgi_queue_size Waiting.",
        "# TYPE tgi_queue_size gauge",
        'tgi_queue_size{replica="a"} 2',
        'tgi_queue_size{replica="b"} 3',
    ]
    assert answer.headers["content-type"].startswith("text/plain")
    assert (await ask(ScriptedReplicas(), "/metrics", method="GET")).status_code == 503


async def test_metrics_of_all_replicas_keep_their_exemplars() -> None:
    """As Prometheus asks for them, which refuses exemplars in its own format."""
    text = (
        b"# TYPE tgi_request_count unknown\n# HELP tgi_request_count Sequences.\n"
        b"tgi_request_count 3\n# TYPE tgi_waits histogram\n"
        b'tgi_waits_bucket{le="1.0"} 2 # {trace_id="a}b"} 0.5 17.0\n'
        b'tgi_waits_bucket{le="+Inf"} 2\ntgi_waits_count 2\ntgi_waits_sum 1\n# EOF\n'
    )
    whole = [WholeResponse(name, 200, [], text) for name in ("a", "b")]
    accept = {"accept": "application/openmetrics-text; version=1.0.0, text/plain; q=0.5"}
    answer = await ask(ScriptedReplicas(whole=whole), "/metrics", method="GET", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = {each.name: each for each in text_string_to_metric_families(answer.text)}
    assert families["tgi_request_count"].type == "unknown"
    marked = {
        sample.labels["replica"]: sample.exemplar.labels
        for sample in families["tgi_waits"].samples
        if sample.exemplar is not None
    }
    assert marked == {"a": {"trace_id": "a}b"}, "b": {"trace_id": "a}b"}}


async def test_health_does_not_wait_for_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgi_cli.ray_serve.front._HEALTH_SECONDS", 0.05)
    replicas = ScriptedReplicas([None])
    answer = await ask(replicas, "/health", method="GET")
    assert answer.status_code == 503
    assert replicas.streams[0].cancelled.is_set()
    assert (await ask(ScriptedReplicas(ok(b"")), "/health", method="GET")).status_code == 200
