"""Traces as a collector receives them."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.router.fakes import FakeEngine
from tests.tools.otlp_collector import Collector, attributes, collecting
from tgi_cli.router.observability import access_log
from tgi_cli.router.observability.tracing import tgi_duration
from tgi_cli.router.state import RouterState

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
DURATION = re.compile(r"\d+(\.\d+)?(s|ms|µs|ns)")
SECRET = "hello marzipan"
SERVER, CLIENT = 2, 3
"""Kinds of spans in OTLP."""
UNSET, ERROR = 0, 2
"""Their statuses."""
OPENMETRICS = {
    "accept": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;"
    "version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
}
"""What Prometheus asks for."""
EXPECTED = {
    "gen_ai.operation.name": "text_completion",
    "gen_ai.provider.name": "tgi",
    "gen_ai.request.model": "acme/tiny",
    "gen_ai.response.model": "acme/tiny",
    "gen_ai.request.top_k": 5.0,
    "gen_ai.request.seed": None,  # more than an attribute's 63 bits
    "gen_ai.response.finish_reasons": ["stop"],
    "gen_ai.usage.cache_read.input_tokens": 4,
    "server.address": "router",
    "error.type": None,
}


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


def work_of(found: list[Any]) -> Any:
    """The span of the model's work."""
    (work,) = [span for span in found if span.kind == CLIENT]
    return work


async def points(state: RouterState, collector: Collector) -> dict[str, list[Any]]:
    """The data points of the metrics, by the last two words of their names."""
    assert state.tracing is not None
    await asyncio.to_thread(state.tracing.close)
    found = {}
    for name, (resource, metric) in collector.metrics.latest.items():
        assert resource["service.name"] == "mine"
        assert resource["service.instance.id"]
        assert metric.unit == "s"
        found[name.removeprefix("gen_ai.server.")] = list(metric.histogram.data_points)
    return found


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
async def test_the_models_work_is_a_span_below_the_request(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    state: RouterState,
    collector: Collector,
    route: str,
) -> None:
    headers = {
        "traceparent": f"00-{TRACE}-{PARENT}-01",
        "tracestate": "one=1,two=2",
        "baggage": f"user={SECRET}",
        "x-request-id": "mine-1",
    }
    parameters = {"seed": 2**63 + 5, "do_sample": True, "top_k": 5, "stop": ["marzipan"]}
    await client.post(route, json={"inputs": SECRET, "parameters": parameters}, headers=headers)
    found = await spans(state, collector, 3)
    whole, validation, work = found
    assert [span.name for span in found] == [
        f"POST {route}",
        "validate",
        "text_completion acme/tiny",
    ]
    assert {span.trace_id.hex() for span in found} == {TRACE}
    assert {span.trace_state for span in found} == {"one=1,two=2"}
    assert whole.parent_span_id.hex() == PARENT
    assert validation.parent_span_id == work.parent_span_id == whole.span_id
    assert (whole.kind, work.kind) == (SERVER, CLIENT)
    assert "marzipan" not in str(found), "baggage, prompts and stop strings are not recorded"

    reported = attributes(whole)
    for name in ("total_time", "validation_time", "queue_time", "inference_time", "time_per_token"):
        assert DURATION.fullmatch(reported[name]), name
    assert reported["queue_time"] == "2ms"
    assert reported["seed"] == str(2**63 + 5)
    assert reported["request_id"] == "mine-1"
    assert reported["http.route"] == reported["url.path"] == route
    assert reported["http.request.method"] == "POST"
    assert reported["http.response.status_code"] == 200
    assert reported["server.address"] == "router"

    tokens = len(engine.replies[0])
    streamed = route == "/generate_stream"
    of_work = attributes(work)
    expected = EXPECTED | {
        "gen_ai.request.stream": True if streamed else None,
        "gen_ai.usage.input_tokens": len(engine.requests[0].prompt_ids),
        "gen_ai.usage.output_tokens": tokens,
    }
    assert {name: of_work.get(name) for name in expected} == expected
    assert (of_work.get("gen_ai.response.time_to_first_chunk", 0.0) > 0) == streamed
    assert [event.name for event in work.events] == ["first token"]
    assert whole.start_time_unix_nano <= work.start_time_unix_nano
    assert work.start_time_unix_nano <= work.events[0].time_unix_nano <= work.end_time_unix_nano

    sent = engine.requests[0].trace
    assert sent is not None, "the model server continues the trace"
    assert sent.traceparent == f"00-{TRACE}-{work.span_id.hex()}-01"
    assert sent.tracestate == "one=1,two=2"


async def test_chats_and_samples(
    client: httpx.AsyncClient, engine: FakeEngine, state: RouterState, collector: Collector
) -> None:
    body = {
        "model": "mine",
        "messages": [{"role": "user", "content": SECRET}],
        "n": 2,
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 1.0,
        "seed": 7,
    }
    engine.play([10, 11, 12, 13], [10, 1])
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    found = await spans(state, collector, 4)
    work = work_of(found)
    assert work.name == "chat mine"
    reported = attributes(work)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "mine",
        "gen_ai.response.model": "acme/tiny",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.presence_penalty": 1.0,
        "gen_ai.request.seed": 7,
        "gen_ai.response.finish_reasons": ["length", "stop"],
        "gen_ai.usage.input_tokens": len(engine.requests[0].prompt_ids),
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.output_tokens": 5,
    }
    assert {name: reported.get(name) for name in expected} == expected
    assert len({request.trace for request in engine.requests}) == 1, "samples share their parent"


async def test_a_client_that_leaves_ends_the_spans(
    url: str,
    engine: FakeEngine,
    state: RouterState,
    collector: Collector,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, access_log.__name__)
    engine.gate = asyncio.Semaphore(2)
    body = {"inputs": SECRET}
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("POST", "/generate_stream", json=body) as answer,
    ):
        await anext(answer.aiter_lines())
    async with asyncio.timeout(60):
        # The spans end when it is logged.
        while access_log.__name__ not in {each.name for each in caplog.records}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert engine.cancelled
    found = await spans(state, collector, 3)
    for span in (found[0], work_of(found)):
        assert attributes(span)["error.type"] == "dropped"
        assert span.status.code == UNSET, "the client's choice"


async def test_work_in_the_background_outlives_its_request(
    client: httpx.AsyncClient, engine: FakeEngine, state: RouterState, collector: Collector
) -> None:
    engine.gate = asyncio.Semaphore(0)
    body = {"input": SECRET, "background": True}
    begun = (await client.post("/v1/responses", json=body)).json()
    assert begun["status"] == "queued"
    for _ in range(50):
        engine.gate.release()
    async with asyncio.timeout(30):
        while state.admission.in_flight:  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(0.01)
    whole, _, work = await spans(state, collector, 3)
    assert whole.name == "POST /v1/responses"
    assert attributes(work)["gen_ai.usage.output_tokens"] == len(engine.replies[0])
    assert whole.end_time_unix_nano < work.end_time_unix_nano


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
    client: httpx.AsyncClient, engine: FakeEngine, state: RouterState, collector: Collector
) -> None:
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    await client.post("/generate", json={"inputs": SECRET}, headers=unsampled)
    assert engine.requests[0].trace is None, "the model server has no work with it"
    assert TRACE not in (await client.get("/metrics", headers=OPENMETRICS)).text
    await client.get("/v1/models")
    _, only = await spans(state, collector, 2)
    assert only.name == "GET /v1/models"


async def test_exemplars_have_the_trace(
    client: httpx.AsyncClient, state: RouterState, collector: Collector
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    await client.post("/generate", json={"inputs": SECRET}, headers=headers)
    answer = await client.get("/metrics", headers=OPENMETRICS)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    exemplars = {
        family.name: sample.exemplar
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert exemplars.keys() == {
        *("tgi_request_duration", "tgi_request_validation_duration", "tgi_request_queue_duration"),
        *("tgi_request_inference_duration", "tgi_request_mean_time_per_token_duration"),
        *("tgi_request_time_to_first_token_seconds", "tgi_request_inter_token_seconds"),
        "tgi_request_generated_tokens",
    }
    for exemplar in exemplars.values():
        assert exemplar.labels == {"trace_id": TRACE}
    assert exemplars["tgi_request_queue_duration"].value == 0.002
    moment = float(exemplars["tgi_request_queue_duration"].timestamp)
    assert moment == pytest.approx(time.time(), abs=60)
    assert TRACE not in (await client.get("/metrics")).text, "the text format has none"


async def test_failures_are_marked(
    client: httpx.AsyncClient, engine: FakeEngine, state: RouterState, collector: Collector
) -> None:
    engine.failure = "the device is lost"
    await client.post("/generate_stream", json={"inputs": SECRET})
    await client.post("/generate", json={"inputs": SECRET, "parameters": {"top_k": 0}})
    await client.get("/nothing")
    found = await spans(state, collector, 5)
    lost, refused, unknown = [span for span in found if span.kind == SERVER]
    for span in (lost, work_of(found)):
        assert attributes(span)["error.type"] == "generation"
        assert span.status.code == ERROR
    assert attributes(refused)["error.type"] == "validation"
    assert refused.status.code == UNSET, "the client's fault"
    assert (unknown.name, attributes(unknown)["http.response.status_code"]) == ("GET", 404)


async def test_metrics_have_their_conventions_names_and_bounded_attributes(
    client: httpx.AsyncClient, engine: FakeEngine, state: RouterState, collector: Collector
) -> None:
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    chat = {"messages": [{"role": "user", "content": SECRET}], "n": 2}
    engine.play([10, 11, 12, 13], [10, 11, 1])
    for name in ("one", "another"):
        answer = await client.post(
            "/v1/chat/completions", json=chat | {"model": name}, headers=unsampled
        )
        assert answer.status_code == 200
    engine.failure = "the device is lost"
    await client.post("/generate", json={"inputs": SECRET})
    await client.get("/info")
    found = await points(state, collector)
    assert found.keys() == {"request.duration", "time_to_first_token", "time_per_output_token"}
    served = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tgi",
        "gen_ai.request.model": "acme/tiny",
        "gen_ai.response.model": "acme/tiny",
        "server.address": "router",
    }
    failed = served | {"gen_ai.operation.name": "text_completion", "error.type": "generation"}
    counts = {"request.duration": 2, "time_to_first_token": 2, "time_per_output_token": 4}
    for name, count in counts.items():
        (point,) = [each for each in found[name] if "error.type" not in attributes(each)]
        assert attributes(point) == served, "whatever clients call the model"
        assert point.count == count
        assert point.sum > 0
    (point,) = [each for each in found["request.duration"] if "error.type" in attributes(each)]
    assert (attributes(point), point.count) == (failed, 1)
    assert point.explicit_bounds[:2] == [0.01, 0.02]
    assert point.explicit_bounds[-1] == 81.92


async def test_work_in_the_background_is_observed_once(
    client: httpx.AsyncClient, engine: FakeEngine, state: RouterState, collector: Collector
) -> None:
    body = {"input": SECRET, "background": True}
    assert (await client.post("/v1/responses", json=body)).status_code == 200
    async with asyncio.timeout(30):
        while not engine.requests or state.admission.in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (point,) = (await points(state, collector))["request.duration"]
    assert point.count == 1


class TestNoMetrics:
    @pytest.fixture
    def settings(self, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
        return {"otlp_endpoint": collector.endpoint, "otlp_service_name": "mine"}

    async def test_the_environment_turns_metrics_off(
        self, client: httpx.AsyncClient, state: RouterState, collector: Collector
    ) -> None:
        await client.post("/generate", json={"inputs": SECRET})
        await spans(state, collector, 3)
        assert not collector.metrics.latest


async def test_headers_beyond_their_limits_are_dropped(
    client: httpx.AsyncClient,
    state: RouterState,
    collector: Collector,
    caplog: pytest.LogCaptureFixture,
) -> None:
    parent = f"00-{TRACE}-{PARENT}-01"
    await client.get("/info", headers={"traceparent": parent + "-" + "x" * 600})
    await client.get("/info", headers={"traceparent": parent, "tracestate": "a=" + "x" * 600})
    long, stateless = await spans(state, collector, 2)
    assert long.trace_id.hex() != TRACE
    assert (stateless.trace_id.hex(), stateless.trace_state) == (TRACE, "")
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


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
