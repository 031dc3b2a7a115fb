"""The engine's metrics as a message and back; see :mod:`tgi_cli.rpc.codec`."""

from __future__ import annotations

import time
from dataclasses import asdict

from tgi_cli.engine.metrics import EngineLoad, EngineMetrics, Histogram
from tgi_cli.rpc import engine_pb2 as pb


def encode(metrics: EngineMetrics) -> pb.MetricsResponse:
    """Metrics as a message."""
    message = pb.MetricsResponse(
        queue_seconds=metrics.queue_seconds, load=pb.EngineLoad(**asdict(metrics.load))
    )
    for (name, label), histogram in metrics.histograms.items():
        entry = message.histograms.add(name=name, label=label, sum=histogram.sum)
        entry.bounds.extend(histogram.bounds)
        entry.counts.extend(histogram.counts)
    for (name, label), count in metrics.counts.items():
        message.counts.add(name=name, label=label, count=count)
    return message


def decode(message: pb.MetricsResponse) -> EngineMetrics:
    """The metrics of a message."""
    load = {name: getattr(message.load, name) for name in EngineLoad.__dataclass_fields__}
    metrics = EngineMetrics(EngineLoad(**load))
    for entry in message.histograms:
        histogram = metrics.histograms[entry.name, entry.label] = Histogram(entry.bounds)
        histogram.counts = list(entry.counts)
        histogram.sum = entry.sum
    for count in message.counts:
        metrics.counts[count.name, count.label] = count.count
    if message.queue_seconds:
        metrics.oldest_ns = time.monotonic_ns() - int(message.queue_seconds * 1e9)
    return metrics
