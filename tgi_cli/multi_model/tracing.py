"""Traces of requests that are forwarded: the model's server continues them.

A request's span has two below it: ``queue`` until its model is loaded, and that of the request to
the model's server, which gets the latter's context in place of the client's. ``baggage`` is
forwarded as every other header.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Scope

from tgi_cli.router.observability.access_log import AccessRecord
from tgi_cli.router.observability.tracing import ServerSpan
from tgi_cli.telemetry.tracer import Tracer, service_name

_CONTEXT = (b"traceparent", b"tracestate")
_SPAN = "tgi.span"
"""Key of a request's span in its scope."""

Headers = Iterable[tuple[bytes, bytes]]


class ForwardTracing:
    """The spans of requests to a server of several models.

    Args:
        endpoint: address of the collector.
        configured_name: the setting of the service's name.

    Raises:
        ConfigError: as :func:`tgi_cli.telemetry.tracer.check_endpoint`.
    """

    def __init__(self, endpoint: str, configured_name: str) -> None:
        self._tracer = Tracer(endpoint, service_name(configured_name, "front"), "tgi_cli.front")

    def begin(self, record: AccessRecord, scope: Scope) -> ForwardSpan:
        """See :class:`tgi_cli.router.observability.tracing.RequestTracing`."""
        span = scope[_SPAN] = ForwardSpan(self._tracer, record, scope)
        return span

    def close(self) -> None:
        """Send the last spans, for two seconds at most."""
        self._tracer.close()


class ForwardSpan(ServerSpan):
    """The span of a request, and those of its waiting and its forwarding."""

    def __init__(self, tracer: Tracer, record: AccessRecord, scope: Scope) -> None:
        super().__init__(tracer, record, scope)
        self._forwarded: Any = None

    def model_found(self, model: str, arrived_ns: int) -> None:
        """The request has waited since ``arrived_ns`` for its model, which is loaded now."""
        attributes = {"gen_ai.request.model": model}
        waiting = self._tracer.start("queue", "internal", self.span, arrived_ns, attributes)
        waiting.end()

    def forward(self, url: str, headers: Headers) -> Iterator[tuple[bytes, bytes]]:
        """The request is sent to a model's server; yields its headers with the span's context."""
        parts = urlsplit(url)
        address = {"server.address": parts.hostname, "server.port": parts.port}
        self._forwarded = self._tracer.start(
            self._record.method,
            "client",
            self.span,
            attributes={
                "http.request.method": self._record.method,
                **{name: value for name, value in address.items() if value is not None},
            },
        )
        yield from (header for header in headers if header[0] not in _CONTEXT)
        context = self._tracer.context_of(self._forwarded)
        if context is not None:
            yield b"traceparent", context.traceparent.encode()
            if context.tracestate:
                yield b"tracestate", context.tracestate.encode()

    def end(self) -> None:
        """See :meth:`ServerSpan.end`."""
        forwarded = self._forwarded
        if forwarded is not None and forwarded.is_recording():
            if self._record.status:
                forwarded.set_attribute("http.response.status_code", self._record.status)
            self._record_failure(forwarded)
            forwarded.end(self.clock_time(time.perf_counter()))
        super().end()


def span_of(scope: Scope) -> ForwardSpan | None:
    """The span of a request, or None without tracing."""
    return scope.get(_SPAN)
