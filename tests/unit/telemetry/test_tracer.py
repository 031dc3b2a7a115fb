"""Spans as a collector receives them, and their contexts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tools.otlp_collector import Collector, attributes, collecting
from tgi_cli.errors import ConfigError
from tgi_cli.telemetry.context import TraceContext
from tgi_cli.telemetry.tracer import (
    Tracer,
    check_endpoint,
    fail,
    is_sampled,
    service_name,
    trace_id,
)

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def tracer(collector: Collector) -> Iterator[Tracer]:
    tracer = Tracer(collector.endpoint, "mine", "tgi_cli.test", {"tgi.replica": 1})
    yield tracer
    tracer.close()


def test_spans_have_their_parents_and_their_resource(tracer: Tracer, collector: Collector) -> None:
    whole = tracer.start("whole", "server", TraceContext(f"00-{TRACE}-{PARENT}-01", "a=b"), 1000)
    part = tracer.start("part", "internal", whole, 2000, {"number": 3})
    fail(part, "timeout")
    part.end(3000)
    whole.end(4000)
    context = tracer.context_of(whole)
    tracer.close()
    (resource, first), (_, second) = collector.take(2)
    assert resource["service.name"] == "mine"
    assert resource["tgi.replica"] == 1
    assert (first.name, first.start_time_unix_nano, first.end_time_unix_nano) == (
        "part",
        2000,
        3000,
    )
    assert attributes(first) == {"number": 3, "error.type": "timeout"}
    assert first.status.code == 2
    assert first.parent_span_id == second.span_id
    assert second.parent_span_id.hex() == PARENT
    assert context == TraceContext(f"00-{TRACE}-{second.span_id.hex()}-01", "a=b")
    assert trace_id(whole) == TRACE


@pytest.mark.parametrize(
    "parent", ["", "nonsense", f"00-{TRACE}-{PARENT}", f"ff-{TRACE}-{PARENT}-01"]
)
def test_an_invalid_parent_begins_a_trace(tracer: Tracer, parent: str) -> None:
    span = tracer.start("x", "server", TraceContext(parent))
    assert is_sampled(span)
    assert trace_id(span) not in ("", TRACE)


def test_what_is_not_sampled_is_not_recorded(tracer: Tracer) -> None:
    span = tracer.start("x", "server", TraceContext(f"00-{TRACE}-{PARENT}-00"))
    assert not is_sampled(span)
    assert not span.is_recording()
    child = tracer.start("y", "internal", span)
    assert not child.is_recording()
    context = tracer.context_of(child)
    assert context is not None
    assert context.traceparent.endswith("-00"), "others do not sample it either"


def test_sampling_obeys_the_environment(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracer = Tracer(collector.endpoint, "mine", "tgi_cli.test")
    assert not is_sampled(tracer.start("x", "server", None))
    assert is_sampled(tracer.start("x", "server", TraceContext(f"00-{TRACE}-{PARENT}-01")))
    tracer.close()


def test_a_disabled_sdk_has_no_contexts(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracer = Tracer(collector.endpoint, "mine", "tgi_cli.test")
    span = tracer.start("x", "server", None)
    assert (tracer.context_of(span), trace_id(span)) == (None, "")
    tracer.close()


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://c:4317", "http://", ""])
def test_endpoints_are_urls(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL"):
        check_endpoint(endpoint)


def test_the_default_name_has_the_role() -> None:
    default = "text-generation-inference.router"
    assert service_name(default, "server") == "text-generation-inference.server"
    assert service_name(default, "router") == default
    assert service_name("mine", "server") == "mine"
