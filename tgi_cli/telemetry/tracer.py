"""Spans for an OpenTelemetry collector, which a thread of the SDK sends in batches.

The SDK is an extra (``otlp``), imported only if a collector is configured. A span whose parent is
in another process is sampled as its parent is; a span without parent as OTEL_TRACES_SAMPLER sets,
by default always.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from tgi_cli.errors import ConfigError
from tgi_cli.process.installation import install_command
from tgi_cli.telemetry.context import TraceContext
from tgi_cli.telemetry.provider import Attributes, service_resource, shut_down
from tgi_cli.version import __version__

_PREFIX = "text-generation-inference."
_DEFAULT_NAME = f"{_PREFIX}router"


def check_endpoint(endpoint: str) -> None:
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


def service_name(configured: str, role: str) -> str:
    """The service name of a process: the configured one, or TGI's for its role by default."""
    return f"{_PREFIX}{role}" if configured == _DEFAULT_NAME else configured


class Tracer:
    """Creates spans. Its methods may be called from any thread.

    Args:
        endpoint: of a collector that receives OTLP over gRPC.
        name: of the service.
        scope: of the instrumentation: the package that creates the spans.
        resource: further attributes of all spans.

    Attributes:
        provider: the SDK's.

    Raises:
        ConfigError: as :func:`check_endpoint`.
    """

    def __init__(
        self, endpoint: str, name: str, scope: str, resource: Attributes | None = None
    ) -> None:
        check_endpoint(endpoint)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation import tracecontext

        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
        about = service_resource(name, resource)
        self.provider = TracerProvider(resource=about, shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self.provider.get_tracer(scope, __version__)
        self._propagator = tracecontext.TraceContextTextMapPropagator()

    def start(
        self,
        name: str,
        kind: str,
        parent: TraceContext | Any | None,
        began_ns: int | None = None,
        attributes: Attributes | None = None,
    ) -> Any:
        """Start a span of the SDK.

        Args:
            name: of the span.
            kind: ``server``, ``client`` or ``internal``.
            parent: a span, or the context of another process's; None to begin a trace.
            began_ns: since the epoch. Default: now.
            attributes: those that samplers may look at.
        """
        from opentelemetry.trace import SpanKind, set_span_in_context

        if parent is None or isinstance(parent, TraceContext):
            context = self._propagator.extract(_headers(parent))
        else:
            context = set_span_in_context(parent)
        return self._tracer.start_span(
            name, context, SpanKind[kind.upper()], attributes, start_time=began_ns
        )

    def context_of(self, span: Any) -> TraceContext | None:
        """What makes spans of another process children of a span; None with OTEL_SDK_DISABLED."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return TraceContext(**carrier) if carrier else None

    def close(self) -> None:
        """Send the last spans, for two seconds at most."""
        shut_down(self.provider)


def fail(span: Any, error_type: str, is_fault: bool = True) -> None:
    """Record on a span that its work has failed; ``is_fault`` False if another party caused it."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", error_type)
    if is_fault:
        span.set_status(StatusCode.ERROR)


def is_sampled(span: Any) -> bool:
    """Whether a span, and those below it, are sent."""
    return bool(span.get_span_context().trace_flags.sampled)


def trace_id(span: Any) -> str:
    """The id of a span's trace in hexadecimal digits; empty with OTEL_SDK_DISABLED."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def _headers(parent: TraceContext | None) -> dict[str, str]:
    if parent is None:
        return {}
    return {"traceparent": parent.traceparent, "tracestate": parent.tracestate}
