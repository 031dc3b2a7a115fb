"""Traces for an OpenTelemetry collector: a span for each request and each of its stages.

The SDK is an extra (``otlp``), loaded only if a collector is configured. A ``traceparent`` header
(https://www.w3.org/TR/trace-context/) makes the span a child of the client's and decides whether
it is sampled; otherwise OTEL_TRACES_SAMPLER does, by default for all. Attributes are TGI's
(times as text, ``1.5s``) and OpenTelemetry's for HTTP and generative models.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterable
from typing import Any

from tgi_cli.errors import ConfigError
from tgi_cli.process.installation import install_command
from tgi_cli.router.generation.timings import Timings
from tgi_cli.router.observability import access_log
from tgi_cli.router.observability.access_log import AccessRecord
from tgi_cli.version import __version__

_CLOSE_SECONDS = 2.0
_HEADERS = (b"traceparent", b"tracestate")


def check(endpoint: str) -> None:
    """Raise ConfigError if the endpoint is not a URL or the SDK is not installed."""
    if not endpoint.startswith(("http://", "https://")) or not endpoint.partition("//")[2]:
        raise ConfigError(
            f"--otlp-endpoint {endpoint!r} is not a URL", "give the collector as http://HOST:4317"
        )
    try:
        for module in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc"):
            if importlib.util.find_spec(module) is None:
                raise ModuleNotFoundError(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--otlp-endpoint needs the OpenTelemetry SDK, which is not installed",
            install_command("otlp"),
        ) from error


class Tracing:
    """Creates the spans of requests, which a thread of the SDK sends in batches."""

    def __init__(self, endpoint: str, service_name: str) -> None:
        """Raises ConfigError as :func:`check`."""
        check(endpoint)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation import tracecontext

        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
        resource = Resource.create({SERVICE_NAME: service_name, SERVICE_VERSION: __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tgi_cli.router", __version__)
        self._propagator = tracecontext.TraceContextTextMapPropagator()

    def begin(self, record: AccessRecord, headers: Iterable[tuple[bytes, bytes]]) -> RequestSpan:
        """Start the span of a request, and set the record's trace id."""
        from opentelemetry.trace import SpanKind

        carrier = {
            str(name, "latin-1"): str(value, "latin-1")
            for name, value in headers
            if name in _HEADERS
        }
        span = self._tracer.start_span(
            record.method,
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=record.began_ns,
        )
        record.trace_id = f"{span.get_span_context().trace_id:032x}"
        return RequestSpan(self._tracer, span, record)

    def close(self) -> None:
        """Send the last spans, for two seconds at most."""
        # The SDK's own timeouts are longer than the shutdown of a server may take.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


class RequestSpan:
    """The span of one request until it ends."""

    def __init__(self, tracer: Any, span: Any, record: AccessRecord) -> None:
        self._tracer = tracer
        self._span = span
        self._record = record

    def end(self) -> None:
        """Set the attributes of the request, and add a span for each stage of its sequences."""
        from opentelemetry.trace import StatusCode

        span, record = self._span, self._record
        if not span.is_recording():
            return
        if record.route:
            span.update_name(f"{record.method} {record.route}")
            span.set_attribute("http.route", record.route)
        span.set_attributes(_attributes(record))
        if record.status >= 500 or (record.error is not None and record.error.status >= 424):
            span.set_status(StatusCode.ERROR)
        for generation in record.generations:
            self._add_stages(generation.index, generation.timings)
        span.end(self._clock_time(time.perf_counter()))

    def _clock_time(self, moment: float) -> int:
        """A moment of ``time.perf_counter()`` as nanoseconds since the epoch."""
        return self._record.began_ns + int((moment - self._record.began) * 1e9)

    def _add_stages(self, index: int, timings: Timings) -> None:
        from opentelemetry.trace import set_span_in_context

        parent = set_span_in_context(self._span)
        begin = self._clock_time(timings.arrived)
        for name, seconds in (
            ("validate", timings.validation),
            ("queue", timings.queue),
            ("infer", timings.inference),
        ):
            child = self._tracer.start_span(
                name, context=parent, start_time=begin, attributes={"sequence": index}
            )
            if name == "infer" and timings.first_token:
                child.add_event("first token", timestamp=self._clock_time(timings.first_token))
            begin += int(seconds * 1e9)
            child.end(begin)


def _attributes(record: AccessRecord) -> dict[str, Any]:
    """TGI's attributes, by OpenTelemetry's names where it has them.

    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
    """
    usage = access_log.usage(record)
    found: dict[str, Any] = {
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "request_id": record.request_id,
        **{name: tgi_duration(seconds) for name, seconds in access_log.times(record).items()},
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": usage.get("generated_tokens"),
        "drafted_tokens": usage.get("drafted_tokens"),
        "accepted_tokens": usage.get("accepted_tokens"),
        "adapter": usage.get("adapter"),
    }
    if "finish_reason" in usage:
        found["gen_ai.response.finish_reasons"] = usage["finish_reason"].split(",")
    if "seed" in usage:
        found["seed"] = str(usage["seed"])  # unsigned 64 bits, which attributes cannot hold
    if record.error is not None:
        found["error.type"] = record.error.error_type
    elif record.dropped:
        found["error.type"] = "dropped"
    return {name: value for name, value in found.items() if value is not None}


def tgi_duration(seconds: float) -> str:
    """A duration as TGI writes it: ``1.5s``, ``20.25ms``, ``7µs``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.6f}".rstrip("0").rstrip(".") + unit
    return f"{max(round(seconds * 1e9), 0)}ns"
