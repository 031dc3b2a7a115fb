"""Spans of TGI's calls, from a real client to a collector."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from tests.tools.otlp_collector import Collector, attributes, collecting
from tgi_cli.model_server.rpc_spans import RpcSpans
from tgi_cli.telemetry.tracer import Tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = ("traceparent", f"00-{TRACE}-{PARENT}-01")
SERVICE = "generate.v2.TextGenerationService"


def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
    if request == b"invalid":
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "it is")
    if request == b"broken":
        raise RuntimeError("a defect")
    return request


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def tracer(collector: Collector) -> Tracer:
    return Tracer(collector.endpoint, "mine", "tgi_cli.test")


@pytest.fixture
def channel(tracer: Tracer) -> Iterator[grpc.Channel]:
    server = grpc.server(ThreadPoolExecutor(1), interceptors=(RpcSpans(tracer),))
    handlers = {"Prefill": grpc.unary_unary_rpc_method_handler(answer)}
    for service in (SERVICE, "tgi.engine.v1.Engine"):
        generic = grpc.method_handlers_generic_handler(service, handlers)
        server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    server.stop(None)


def test_calls_that_are_traced_have_spans(
    channel: grpc.Channel, tracer: Tracer, collector: Collector
) -> None:
    call: Any = channel.unary_unary(f"/{SERVICE}/Prefill")
    other: Any = channel.unary_unary("/tgi.engine.v1.Engine/Prefill")
    unsampled = ("traceparent", f"00-{TRACE}-{PARENT}-00")
    assert call(b"x") == call(b"x", metadata=(unsampled,)) == other(b"x", metadata=(SAMPLED,))
    assert call(b"x", metadata=(SAMPLED, ("tracestate", "a=b"))) == b"x"
    for request in (b"invalid", b"broken"):
        with pytest.raises(grpc.RpcError):
            call(request, metadata=(SAMPLED,))
    tracer.close()
    well, invalid, broken = (span for _, span in collector.take(3))
    for span in (well, invalid, broken):
        assert (span.name, span.kind) == (f"{SERVICE}/Prefill", 2)
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert well.trace_state == "a=b"
    assert attributes(well) == {
        "rpc.system": "grpc",
        "rpc.service": SERVICE,
        "rpc.method": "Prefill",
    }
    assert (attributes(invalid)["error.type"], invalid.status.code) == ("INVALID_ARGUMENT", 0)
    assert (attributes(broken)["error.type"], broken.status.code) == ("UNKNOWN", 2)
