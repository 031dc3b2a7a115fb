"""Spans of the calls of TGI's router, which sends its context with each call.

https://opentelemetry.io/docs/specs/semconv/rpc/grpc/. Our own router's requests share one call, and
have spans of their own (:mod:`tgi_cli.model_server.request_spans`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grpc

from tgi_cli.telemetry.context import TraceContext
from tgi_cli.telemetry.tracer import Tracer, fail

_SERVICES = "/generate."
"""Beginning of the methods of TGI's services."""


class RpcSpans(grpc.ServerInterceptor):  # type: ignore[misc]
    """Gives calls of TGI's services a span if their client traces them."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def intercept_service(
        self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails
    ) -> Any:
        """See :class:`grpc.ServerInterceptor`."""
        handler = continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler
        parent = _context(details.invocation_metadata)
        if parent is None or not details.method.startswith(_SERVICES):
            return handler
        name = details.method.removeprefix("/")
        service, _, method = name.partition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}

        def traced(request: Any, context: grpc.ServicerContext) -> Any:
            span = self._tracer.start(name, "server", parent, attributes=attributes)
            try:
                return handler.unary_unary(request, context)
            except BaseException:
                code = context.code() or grpc.StatusCode.UNKNOWN
                fail(span, code.name, code not in _CLIENTS)
                raise
            finally:
                span.end()

        return grpc.unary_unary_rpc_method_handler(
            traced, handler.request_deserializer, handler.response_serializer
        )


_CLIENTS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
)
"""Statuses that are no fault of the server."""


def _context(metadata: Iterable[tuple[str, Any]]) -> TraceContext | None:
    found = {key: str(value) for key, value in metadata or ()}
    parent = found.get("traceparent")
    return None if parent is None else TraceContext(parent, found.get("tracestate", ""))
