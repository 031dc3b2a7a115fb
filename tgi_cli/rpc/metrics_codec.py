"""What an engine has counted, as a message and back; see :mod:`tgi_cli.rpc.codec`."""

from __future__ import annotations

from tgi_cli.engine.distribution import Distribution
from tgi_cli.engine.metrics import EngineMetrics
from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.rpc.interface import EngineStatistics


def statistics_of(tally: EngineMetrics, queued: int) -> EngineStatistics:
    """A tally's counts, as of now; ``queued`` requests wait."""
    distributions = dict(tally.seconds)
    distributions["sizes", ""] = tally.sizes
    distributions["accepted", ""] = tally.accepted
    counts: dict[tuple[str, str], int] = {}
    for name in ("launched", "failed", "joined"):
        counts |= {(name, label): count for label, count in getattr(tally, name).items()}
    # The latest step's word on who waits may be old: those may have left since.
    return EngineStatistics(distributions, counts, tally.queue_age if queued else 0.0)


def encode(statistics: EngineStatistics, load: pb.StepMessage) -> pb.StatisticsResponse:
    """Statistics, and the load beside them, as a message."""
    message = pb.StatisticsResponse(queue_age_seconds=statistics.queue_age, load=load)
    for (name, label), found in statistics.distributions.items():
        entry = message.distributions.add(name=name, label=label, sum=found.sum)
        entry.bounds.extend(found.bounds)
        entry.counts.extend(found.counts)
    for (name, label), count in statistics.counts.items():
        message.counts.add(name=name, label=label, count=count)
    return message


def decode(message: pb.StatisticsResponse) -> EngineStatistics:
    """The statistics of a message."""
    distributions = {}
    for entry in message.distributions:
        found = distributions[entry.name, entry.label] = Distribution(entry.bounds)
        found.counts = list(entry.counts)
        found.sum = entry.sum
    counts = {(entry.name, entry.label): entry.count for entry in message.counts}
    return EngineStatistics(distributions, counts, message.queue_age_seconds)
