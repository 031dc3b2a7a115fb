"""Traces to an OpenTelemetry collector: a span for each request, and one for each of its stages.

The SDK is an extra (``otlp``) and is loaded only when there is a collector. A ``traceparent``
header (https://www.w3.org/TR/trace-context/) makes the span a child of the client's and decides
whether it is sampled; else OTEL_TRACES_SAMPLER does, and by default all are. Attributes are TGI's
(times as text, ``1.5s``), those of OpenTelemetry for HTTP, and its tokens of generative models.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterable
from typing import Any

import tgi_cli
from tgi_cli.errors import ConfigError
from tgi_cli.router.observability import access_log
from tgi_cli.router.observability.access_log import AccessRecord

_CLOSE_SECONDS = 2.0
_HEADERS = (b"traceparent", b"tracestate")


def check(endpoint: str) -> None:
    """Raise ConfigError when traces cannot be sent there: no URL, or no SDK to send them with."""
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
            "pip install 'tgi-cli[otlp]'",
        ) from error


class Tracing:
    """Makes the spans of requests and sends them in batches, from a thread of its own."""

    def __init__(self, endpoint: str, service_name: str) -> None:
        """Raises ConfigError as :func:`check`."""
        check(endpoint)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation import tracecontext

        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
        resource = Resource.create(
            {SERVICE_NAME: service_name, SERVICE_VERSION: tgi_cli.__version__}
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tgi_cli.router", tgi_cli.__version__)
        self._propagator = tracecontext.TraceContextTextMapPropagator()

    def begin(self, record: AccessRecord, headers: Iterable[tuple[bytes, bytes]]) -> RequestSpan:
        """The span of a request that has just come; its trace's id goes into the record."""
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
        """Send what is left, for two seconds at most."""
        # The SDK's own bounds are longer than a server may take to end.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


class RequestSpan:
    """One request's span, until it ends."""

    def __init__(self, tracer: Any, span: Any, record: AccessRecord) -> None:
        self._tracer = tracer
        self._span = span
        self._record = record

    def end(self) -> None:
        """Say what became of the request, and of each of its sequences."""
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
            self._stages(generation.index, generation.timings)
        span.end(self._at(time.perf_counter()))

    def _at(self, moment: float) -> int:
        """The time of day, in nanoseconds, of a moment of ``time.perf_counter()``."""
        return self._record.began_ns + int((moment - self._record.began) * 1e9)

    def _stages(self, index: int, timings: Any) -> None:
        """What a sequence's time went into, as children beside each other."""
        from opentelemetry.trace import set_span_in_context

        parent = set_span_in_context(self._span)
        begin = self._at(timings.arrived)
        for name, seconds in (
            ("validate", timings.validation),
            ("queue", timings.queue),
            ("infer", timings.inference),
        ):
            child = self._tracer.start_span(
                name, context=parent, start_time=begin, attributes={"sequence": index}
            )
            if name == "infer" and timings.first_token:
                child.add_event("first token", timestamp=self._at(timings.first_token))
            begin += int(seconds * 1e9)
            child.end(begin)


def _attributes(record: AccessRecord) -> dict[str, Any]:
    """TGI's, and where OpenTelemetry has a name for it, that.

    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
    """
    told = access_log.usage(record)
    found: dict[str, Any] = {
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "request_id": record.request_id,
        **{name: text_of(seconds) for name, seconds in access_log.times(record).items()},
    }
    if told:
        found["gen_ai.usage.input_tokens"] = told["prompt_tokens"]
        found["gen_ai.usage.output_tokens"] = told["generated_tokens"]
    if "finish_reason" in told:
        found["gen_ai.response.finish_reasons"] = told["finish_reason"].split(",")
    if "seed" in told:
        found["seed"] = str(told["seed"])  # 64 bits without a sign, which attributes lack
    if "adapter" in told:
        found["adapter"] = told["adapter"]
    if record.error is not None:
        found["error.type"] = record.error.error_type
    elif record.dropped:
        found["error.type"] = "dropped"
    return found


def text_of(seconds: float) -> str:
    """A duration as TGI writes it: ``1.5s``, ``20.25ms``, ``7µs``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.6f}".rstrip("0").rstrip(".") + unit
    return f"{max(round(seconds * 1e9), 0)}ns"
