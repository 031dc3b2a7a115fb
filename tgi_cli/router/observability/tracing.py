"""Telemetry of requests: a span of the server, one of the model's work, and latencies.

The model server continues the latter (:mod:`tgi_cli.model_server.request_spans`), as its context
travels with the request. Both are sampled, or neither. A client's ``traceparent`` and
``tracestate`` (https://www.w3.org/TR/trace-context/) make the server's span a child of the
client's; its ``baggage`` is not recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

from starlette.types import Scope

from tgi_cli.router.generation.timings import Timings
from tgi_cli.router.observability import access_log, gen_ai
from tgi_cli.router.observability.access_log import AccessRecord
from tgi_cli.router.observability.gen_ai_metrics import GenAIMetrics
from tgi_cli.telemetry.context import TraceContext
from tgi_cli.telemetry.meter import Meter, sends_metrics
from tgi_cli.telemetry.provider import shut_down
from tgi_cli.telemetry.tracer import Tracer, fail, is_sampled, service_name, trace_id

_MOST_CHARACTERS = 512
"""Limit of the headers' length, as W3C and OpenTelemetry set it."""


class RequestTracing(Protocol):
    """Creates the spans of an HTTP server's requests."""

    def begin(self, record: AccessRecord, scope: Scope) -> ServerSpan:
        """Start the span of a request, and set the record's trace id."""
        ...


class Tracing:
    """The spans of a router's requests, and OpenTelemetry's metrics of them.

    Args:
        endpoint: of the collector.
        configured_name: the setting of the service's name.
        served: the model's name.

    Raises:
        ConfigError: as :func:`tgi_cli.telemetry.tracer.check_endpoint`.
    """

    def __init__(self, endpoint: str, configured_name: str, served: str = "") -> None:
        name = service_name(configured_name, "router")
        self._tracer = Tracer(endpoint, name, "tgi_cli.router")
        self._served = served
        self._providers: list[Any] = [self._tracer.provider]
        self._metrics: GenAIMetrics | None = None
        if sends_metrics():
            meter = Meter(endpoint, name, "tgi_cli.router")
            self._providers.append(meter.provider)
            self._metrics = GenAIMetrics(meter, served)

    def begin(self, record: AccessRecord, scope: Scope) -> RequestSpan:
        """See :class:`RequestTracing`."""
        span = record.span = RequestSpan(self._tracer, record, scope, self._served, self._metrics)
        return span

    def close(self) -> None:
        """Send the last spans and metrics, for two seconds at most."""
        shut_down(*self._providers)


class ServerSpan:
    """The span of an HTTP request at its server, until the answer has ended.

    https://opentelemetry.io/docs/specs/semconv/http/http-spans/
    """

    def __init__(self, tracer: Tracer, record: AccessRecord, scope: Scope) -> None:
        self._tracer = tracer
        self._record = record
        self._address = _address(scope)
        self.span = tracer.start(
            record.method,
            "server",
            _context(scope["headers"]),
            record.began_ns,
            {
                "http.request.method": record.method,
                "url.scheme": scope.get("scheme", "http"),
                "url.path": record.printable_path,
                "network.protocol.version": scope.get("http_version", "1.1"),
                **self._address,
            },
        )
        record.trace_id = trace_id(self.span)
        if is_sampled(self.span):
            record.sampled_trace = record.trace_id

    def end(self) -> None:
        """The answer has ended, or the client has disconnected."""
        span, record = self.span, self._record
        if not span.is_recording():
            return
        if record.route:
            span.update_name(f"{record.method} {record.route}")
            span.set_attribute("http.route", record.route)
        if record.status:
            span.set_attribute("http.response.status_code", record.status)
        span.set_attributes(self.results())
        self._record_failure(span)
        span.end(self.clock_time(time.perf_counter()))

    def results(self) -> dict[str, Any]:
        """Attributes besides those of HTTP."""
        return {"request_id": self._record.request_id}

    def clock_time(self, moment: float) -> int:
        """A moment of ``time.perf_counter()`` as nanoseconds since the epoch."""
        return self._record.began_ns + int((moment - self._record.began) * 1e9)

    def _record_failure(self, span: Any) -> None:
        if error := self._record.error_type:
            fail(span, error, self._record.failed)


class RequestSpan(ServerSpan):
    """The spans of a request to the router, and its metrics."""

    def __init__(
        self,
        tracer: Tracer,
        record: AccessRecord,
        scope: Scope,
        served: str,
        metrics: GenAIMetrics | None,
    ) -> None:
        super().__init__(tracer, record, scope)
        self._served = served
        self._metrics = metrics
        self._work: Any = None
        self._answered = False

    def work(self) -> TraceContext | None:
        """Begin the span of the model's work; its context, or None if it is not sampled."""
        if not is_sampled(self.span):
            return None
        record = self._record
        if self._work is None:
            model = gen_ai.model_of(record, self._served)
            attributes = gen_ai.request_attributes(record, self._served) | self._address
            self._work = self._tracer.start(
                f"{record.operation} {model}", "client", self.span, attributes=attributes
            )
        return self._tracer.context_of(self._work)

    def sequences_ended(self) -> None:
        """Called when no sequence of the request runs any more, nor of a background response."""
        if self._answered:
            self._end_work()

    def end(self) -> None:
        """See :meth:`ServerSpan.end`. Work that goes on in the background keeps its own span."""
        super().end()
        self._answered = True
        if not self._record.running:
            self._end_work()

    def results(self) -> dict[str, Any]:
        """TGI's attributes."""
        record = self._record
        usage = access_log.usage(record)
        found = {
            **super().results(),
            **{name: tgi_duration(seconds) for name, seconds in access_log.times(record).items()},
            "drafted_tokens": usage.get("drafted_tokens"),
            "accepted_tokens": usage.get("accepted_tokens"),
            "adapter": usage.get("adapter"),
        }
        if "seed" in usage:
            found["seed"] = str(usage["seed"])  # unsigned 64 bits, which attributes cannot hold
        return {name: value for name, value in found.items() if value is not None}

    def _end_work(self) -> None:
        span, record = self._work, self._record
        if self._metrics is not None and record.generations:
            self._metrics.observe(record, self._address)
            self._metrics = None  # once
        if span is None:
            return
        self._work = None
        span.set_attributes(gen_ai.response_attributes(record, self._served))
        for generation in record.generations:
            self._add_sequence(span, generation.index, generation.timings)
        self._record_failure(span)
        span.end()

    def _add_sequence(self, span: Any, index: int, timings: Timings) -> None:
        """Add what the router knows of a sequence: its validation, and its first token."""
        began = self.clock_time(timings.arrived)
        attributes = {"sequence": index}
        validation = self._tracer.start(
            "validate", "internal", self.span, began, attributes=attributes
        )
        validation.end(self.clock_time(timings.submitted))
        if timings.first_token:
            span.add_event("first token", attributes, self.clock_time(timings.first_token))


def tgi_duration(seconds: float) -> str:
    """A duration as TGI writes it: ``1.5s``, ``20.25ms``, ``7µs``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.6f}".rstrip("0").rstrip(".") + unit
    return f"{max(round(seconds * 1e9), 0)}ns"


def _context(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """The client's span, or None. Headers longer than the SDK takes are dropped, which it logs."""
    found: dict[bytes, list[str]] = {b"traceparent": [], b"tracestate": []}
    for name, value in headers:
        if name in found:
            found[name].append(str(value, "latin-1"))
    parents, states = found.values()
    if len(parents) != 1 or len(parents[0]) > _MOST_CHARACTERS:
        return None
    state = ",".join(states)
    return TraceContext(parents[0], state if len(state) <= _MOST_CHARACTERS else "")


def _address(scope: Scope) -> dict[str, Any]:
    """The address that the request has arrived at."""
    host, port = scope.get("server") or ("", None)
    return {"server.address": host, **({} if port is None else {"server.port": port})}
