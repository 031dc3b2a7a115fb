"""Spans of requests in the model server, as a collector receives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.tools.otlp_collector import Collector, attributes, collecting
from tgi_cli.config import ServeConfig
from tgi_cli.engine.messages import (
    Finished,
    FinishReason,
    GenerationRequest,
    Started,
    StepOutputs,
)
from tgi_cli.model_server.request_spans import RequestSpans, open_request_spans
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.telemetry.context import TraceContext

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, INTERNAL = 2, 1


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def spans(collector: Collector) -> RequestSpans:
    found = open_request_spans(ServeConfig(model_id="m", otlp_endpoint=collector.endpoint), 1)
    assert found is not None
    return found


def begin(spans: RequestSpans, request_id: int, traced: bool = True) -> None:
    context = TraceContext(f"00-{TRACE}-{PARENT}-01", "a=b") if traced else None
    sampling = SamplingParams()
    spans.begin(
        request_id,
        GenerationRequest(
            request_id=99, prompt_ids=(5, 6, 7), sampling=sampling, max_new_tokens=9, trace=context
        ),
    )


def ended(request_id: int, reason: FinishReason = FinishReason.LENGTH) -> StepOutputs:
    return StepOutputs(finished=[Finished(request_id, reason)])


def received(spans: RequestSpans, collector: Collector, count: int) -> dict[str, Any]:
    """The spans by their names."""
    spans.close()
    taken = collector.take(count)
    assert {resource["service.name"] for resource, _ in taken} == {
        "text-generation-inference.server"
    }
    assert {resource["tgi.replica"] for resource, _ in taken} == {1}
    return {span.name: span for _, span in taken}


def test_a_request_has_a_span_for_each_stage(spans: RequestSpans, collector: Collector) -> None:
    begin(spans, 1)
    begin(spans, 2, traced=False)
    queued_ns = 1000
    spans.take(
        StepOutputs(request_ids=[2, 1], started=[Started(1, queued_ns, 2), Started(2, 5, 0)])
    )
    spans.take(StepOutputs(request_ids=[1, 2, 1]))
    spans.take(ended(2))
    spans.take(ended(1))
    found = received(spans, collector, 4)
    assert found.keys() == {"queue", "prefill", "decode", "generate"}
    whole = found.pop("generate")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    assert (whole.kind, whole.trace_state) == (SERVER, "a=b")
    assert attributes(whole) == {
        "finish_reason": "length",
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "generated_tokens": 3,
    }
    moment = whole.start_time_unix_nano
    for name in ("queue", "prefill", "decode"):
        stage = found[name]
        assert (stage.kind, stage.parent_span_id) == (INTERNAL, whole.span_id)
        assert stage.start_time_unix_nano == moment <= stage.end_time_unix_nano
        moment = stage.end_time_unix_nano
    assert moment == whole.end_time_unix_nano
    queue = found["queue"]
    assert queue.end_time_unix_nano - queue.start_time_unix_nano == queued_ns


@pytest.mark.parametrize(
    ("reason", "error", "status"),
    [
        (FinishReason.CANCELLED, None, 0),
        (FinishReason.DRAINING, None, 0),
        (FinishReason.OVERLOADED, "overloaded", 0),
        (FinishReason.TIMEOUT, "timeout", 0),
        (FinishReason.ERROR, "error", 2),
    ],
)
def test_a_request_that_never_starts_was_queued(
    spans: RequestSpans,
    collector: Collector,
    reason: FinishReason,
    error: str | None,
    status: int,
) -> None:
    begin(spans, 1)
    spans.take(ended(1, reason))
    found = received(spans, collector, 2)
    assert found.keys() == {"queue", "generate"}
    whole = found["generate"]
    assert attributes(whole).get("error.type") == error
    assert whole.status.code == status


def test_the_end_of_the_engine_ends_all(spans: RequestSpans, collector: Collector) -> None:
    begin(spans, 1)
    spans.take(StepOutputs(request_ids=[1], started=[Started(1, 0, 0)]))
    found = received(spans, collector, 4)
    assert attributes(found["generate"])["error.type"] == "error"


def test_there_are_none_without_a_collector() -> None:
    assert open_request_spans(ServeConfig(model_id="m"), None) is None
