"""Metrics for an OpenTelemetry collector, which a thread of the SDK sends once a minute.

OTEL_METRIC_EXPORT_INTERVAL sets another interval, and OTEL_METRICS_EXPORTER=none turns them off:
a collector of traces alone, such as Jaeger, refuses metrics.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tgi_cli.telemetry.provider import service_resource
from tgi_cli.telemetry.tracer import check_endpoint
from tgi_cli.version import __version__

EXPORTER_VARIABLE = "OTEL_METRICS_EXPORTER"
"""https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/"""


def sends_metrics() -> bool:
    """Whether the environment lets metrics be sent."""
    return os.environ.get(EXPORTER_VARIABLE, "").strip().lower() != "none"


class Meter:
    """Creates instruments.

    Args:
        endpoint: of a collector that receives OTLP over gRPC.
        name: of the service.
        scope: of the instrumentation: the package that observes.

    Attributes:
        provider: the SDK's.

    Raises:
        ConfigError: as :func:`tgi_cli.telemetry.tracer.check_endpoint`.
    """

    def __init__(self, endpoint: str, name: str, scope: str) -> None:
        check_endpoint(endpoint)
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        exporter = OTLPMetricExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
        self.provider = MeterProvider(
            [PeriodicExportingMetricReader(exporter)],
            resource=service_resource(name),
            shutdown_on_exit=False,
        )
        self._meter = self.provider.get_meter(scope, __version__)

    def seconds(self, name: str, description: str, bounds: Sequence[float]) -> Any:
        """A histogram of the SDK, of seconds, whose buckets end at ``bounds``."""
        return self._meter.create_histogram(
            name, "s", description, explicit_bucket_boundaries_advisory=list(bounds)
        )
