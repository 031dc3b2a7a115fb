"""Traces as a collector receives them."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tests.tools.otlp_collector import Collector, attributes, collecting
from tgi_cli.router.observability.tracing import tgi_duration
from tgi_cli.router.state import RouterState

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
DURATION = re.compile(r"\d+(\.\d+)?(s|ms|µs|ns)")
SECRET = "hello marzipan"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def settings(collector: Collector) -> dict[str, Any]:
    return {"otlp_endpoint": collector.endpoint, "otlp_service_name": "mine"}


async def spans(state: RouterState, collector: Collector, count: int) -> list[Any]:
    assert state.tracing is not None
    await asyncio.to_thread(state.tracing.close)
    taken = collector.take(count)
    assert {resource["service.name"] for resource, _ in taken} == {"mine"}
    return [span for _, span in taken]


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
async def test_request_is_a_span_with_its_stages(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    state: RouterState,
    collector: Collector,
    route: str,
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine-1"}
    parameters = {"seed": 2**63 + 5, "do_sample": True}
    await client.post(route, json={"inputs": SECRET, "parameters": parameters}, headers=headers)
    found = await spans(state, collector, 4)
    assert [span.name for span in found] == ["validate", "queue", "infer", f"POST {route}"]
    *stages, whole = found
    assert {span.trace_id.hex() for span in found} == {TRACE}
    assert whole.parent_span_id.hex() == PARENT
    assert whole.kind == 2, "a server's"
    reported = attributes(whole)
    for name in ("total_time", "validation_time", "queue_time", "inference_time", "time_per_token"):
        assert DURATION.fullmatch(reported[name]), name
    assert reported["queue_time"] == "2ms"
    assert reported["seed"] == str(2**63 + 5)
    assert reported["request_id"] == "mine-1"
    assert reported["http.route"] == route
    assert reported["http.response.status_code"] == 200
    assert reported["gen_ai.usage.input_tokens"] == len(engine.requests[0].prompt_ids)
    assert reported["gen_ai.usage.output_tokens"] == len(engine.replies[0])
    assert reported["gen_ai.response.finish_reasons"] == ["eos_token"]
    assert "marzipan" not in str(found)
    time = whole.start_time_unix_nano
    for stage in stages:
        assert stage.parent_span_id == whole.span_id
        assert time <= stage.start_time_unix_nano <= stage.end_time_unix_nano
        time = stage.end_time_unix_nano
    # The stand-in for an engine claims 2 ms in a queue that it has not.
    assert time <= whole.end_time_unix_nano + 2_000_000
    assert [event.name for event in stages[2].events] == ["first token"]


async def test_request_without_parent_starts_a_trace(
    client: httpx.AsyncClient, state: RouterState, collector: Collector
) -> None:
    for given in ({}, {"traceparent": "00-nonsense-01"}):
        await client.get("/info", headers=given)
    one, other = await spans(state, collector, 2)
    assert not one.parent_span_id
    assert not other.parent_span_id
    assert one.trace_id != other.trace_id
    assert (one.name, other.name) == ("GET /info", "GET /info")


async def test_unsampled_parent_is_not_sent(
    client: httpx.AsyncClient, state: RouterState, collector: Collector
) -> None:
    await client.get("/info", headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    await client.get("/v1/models")
    (only,) = await spans(state, collector, 1)
    assert only.name == "GET /v1/models"


async def test_failures_are_marked(
    client: httpx.AsyncClient, engine: FakeEngine, state: RouterState, collector: Collector
) -> None:
    engine.failure = "the device is lost"
    await client.post("/generate_stream", json={"inputs": SECRET})
    await client.post("/generate", json={"inputs": SECRET, "parameters": {"top_k": 0}})
    await client.get("/nothing")
    found = [span for span in await spans(state, collector, 6) if span.kind == 2]
    lost, refused, unknown = found
    assert attributes(lost)["error.type"] == "generation"
    assert lost.status.code == 2
    assert attributes(refused)["error.type"] == "validation"
    assert refused.status.code == 0, "the client's fault"
    assert (unknown.name, attributes(unknown)["http.response.status_code"]) == ("GET", 404)


class TestNobodyCollects:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"otlp_endpoint": "http://127.0.0.1:1"}

    async def test_unreachable_collector_does_not_affect_requests(
        self, client: httpx.AsyncClient, state: RouterState
    ) -> None:
        for _ in range(3):
            assert (await client.post("/generate", json={"inputs": "hi"})).status_code == 200
        assert state.tracing is not None
        await asyncio.wait_for(asyncio.to_thread(state.tracing.close), 30)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.5, "1.5s"), (75, "75s"), (0.02025, "20.25ms"), (7e-6, "7µs"), (3e-8, "30ns"), (0, "0ns")],
)
def test_durations_are_formatted_as_in_tgi(seconds: float, text: str) -> None:
    assert tgi_duration(seconds) == text


def test_the_sdk_is_not_loaded_without_a_collector() -> None:
    script = (
        "import sys, tgi_cli.router.server\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
