"""Metrics as a collector receives them."""

from __future__ import annotations

import pytest

from tests.tools.otlp_collector import attributes, collecting
from tgi_cli.errors import ConfigError
from tgi_cli.telemetry.meter import EXPORTER_VARIABLE, Meter, sends_metrics
from tgi_cli.telemetry.provider import service_resource, shut_down


def test_a_histogram_is_sent_at_the_end() -> None:
    with collecting() as collector:
        meter = Meter(collector.endpoint, "mine", "tgi_cli.test")
        histogram = meter.seconds("some.duration", "Of a test.", (0.5, 1.5))
        for value in (0.1, 1.0, 1.5, 9.0):
            histogram.record(value, {"kind": "x"})
        shut_down(meter.provider)
        resource, metric = collector.metrics.latest["some.duration"]
    (point,) = metric.histogram.data_points
    assert list(point.bucket_counts) == [1, 2, 1]
    assert attributes(point) == {"kind": "x"}
    assert (metric.unit, metric.description) == ("s", "Of a test.")
    assert resource["service.name"] == "mine"


def test_instances_differ_unless_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    first, second = (service_resource(name).attributes for name in ("one", "other"))
    assert first["service.instance.id"] == second["service.instance.id"], "of one process"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=pod-7")
    assert service_resource("one").attributes["service.instance.id"] == "pod-7"


@pytest.mark.parametrize(
    ("value", "sends"), [(None, True), ("", True), ("otlp", True), ("none", False)]
)
def test_the_environment_decides(
    monkeypatch: pytest.MonkeyPatch, value: str | None, sends: bool
) -> None:
    monkeypatch.delenv(EXPORTER_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(EXPORTER_VARIABLE, value)
    assert sends_metrics() is sends


def test_endpoints_are_urls() -> None:
    with pytest.raises(ConfigError, match="is not a URL"):
        Meter("collector:4317", "mine", "tgi_cli.test")


def test_shutting_down_twice_does_nothing() -> None:
    with collecting() as collector:
        meter = Meter(collector.endpoint, "mine", "tgi_cli.test")
        shut_down(meter.provider)
        shut_down(meter.provider)
