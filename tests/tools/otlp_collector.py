"""A fake OpenTelemetry collector, which records what it receives over gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_messages
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_services
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services


class Collector(services.TraceServiceServicer):
    """Spans in the order they come, each with the resource that sent it.

    Attributes:
        metrics: what has come of metrics.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.metrics = MetricsCollector()
        self._arrived: SimpleQueue[tuple[dict[str, Any], Any]] = SimpleQueue()

    def Export(
        self, request: messages.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> messages.ExportTraceServiceResponse:
        for group in request.resource_spans:
            resource = attributes(group.resource)
            for scope in group.scope_spans:
                for span in scope.spans:
                    self._arrived.put((resource, span))
        return messages.ExportTraceServiceResponse()

    def take(self, count: int) -> list[tuple[dict[str, Any], Any]]:
        """The next spans; waits for them."""
        return [self._arrived.get(timeout=30) for _ in range(count)]

    def trace(self, trace_id: str, *names: str) -> dict[str, tuple[dict[str, Any], Any]]:
        """The spans of a trace by name, each with its resource, once all of these are there."""
        found: dict[str, tuple[dict[str, Any], Any]] = {}
        while not found.keys() >= set(names):
            ((resource, span),) = self.take(1)
            if span.trace_id.hex() == trace_id:
                found[span.name] = resource, span
        return found


class MetricsCollector(metrics_services.MetricsServiceServicer):
    """Metrics by name, each with the resource that sent it; the latest of each."""

    def __init__(self) -> None:
        self.latest: dict[str, tuple[dict[str, Any], Any]] = {}

    def Export(
        self, request: metrics_messages.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_messages.ExportMetricsServiceResponse:
        for group in request.resource_metrics:
            resource = attributes(group.resource)
            for scope in group.scope_metrics:
                self.latest |= {metric.name: (resource, metric) for metric in scope.metrics}
        return metrics_messages.ExportMetricsServiceResponse()


def attributes(holder: Any) -> dict[str, Any]:
    """The attributes of a span or a resource, as Python has them."""
    found = {}
    for entry in holder.attributes:
        kind = entry.value.WhichOneof("value")
        value = getattr(entry.value, kind)
        if kind == "array_value":
            value = [getattr(one, one.WhichOneof("value")) for one in value.values]
        found[entry.key] = value
    return found


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of this machine."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    services.add_TraceServiceServicer_to_server(collector, server)
    metrics_services.add_MetricsServiceServicer_to_server(collector.metrics, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)
