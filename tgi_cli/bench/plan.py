"""The options of a run, and the steps that follow from them.

A plan is a list of steps, or a search that chooses the next step by the result of the last. A
search is a generator: it yields a BenchStep, is sent the StepRecord of that step, and returns its
findings as sentences for ``BenchRun.notes``. It uses neither a clock nor a server, so tests drive
it with a model of a server.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from tgi_cli.bench.events import BenchRequest, BenchStep, StepRecord
from tgi_cli.bench.statistics.metrics import ENOUGH, StepMetrics, find_knee, meets, step_metrics
from tgi_cli.bench.workloads.images import ImageWorkload
from tgi_cli.config.settings import default
from tgi_cli.config.settings.setting import BENCH
from tgi_cli.errors import ConfigError

DEFAULT_SIZES = (1, 2, 4, 8, 16, 32)
"""Batch sizes and numbers of concurrent clients."""
DEFAULT_RUNS = 10
"""Runs of each batch size."""
DEFAULT_SECONDS = 30.0
"""Length of a step of clients or of a rate, unless it is bounded otherwise."""

LoadKind = Literal["batch", "concurrency", "rate", "ramp", "sweep", "peak", "trace"]
StepSearch = Generator[BenchStep, StepRecord, list[str]]
RequestsOfStep = Callable[[BenchStep, int], Iterable[BenchRequest]]
"""Builds the requests of a step from the step and its position in the run."""


class SharedPrefix(msgspec.Struct, frozen=True):
    """Prefixes that prompts share: their length, the share of prompts, the number of prefixes."""

    tokens: int
    share: float = 1.0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> SharedPrefix:
        """Parse ``512``, ``512:0.5`` or ``512:0.5:4``. Raises ConfigError."""
        try:
            parts = [
                kind(part) for kind, part in zip((int, float, int), text.split(":"), strict=False)
            ]
            prefix = cls(*parts)
            if (
                text.count(":") > 2
                or prefix.tokens < 1
                or not 0 < prefix.share <= 1
                or prefix.count < 1
            ):
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"--prefix: {text!r} is not TOKENS, TOKENS:SHARE or TOKENS:SHARE:COUNT",
                "for example 512:0.5:4",
            ) from None
        return prefix


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The load and the workload of a run.

    Attributes:
        load: What is varied.
        values: Batch sizes, clients or rates; the first and the last rate of a ramp.
        input_tokens, output_tokens: Lengths as ``LengthDistribution`` parses them; whole numbers
            for batches. Empty: those of the file, or the default.
        seconds, requests: Limits of each step; for batches, ``requests`` is the number of runs.
        slo: Limits by metric, in ms.
        enough: Share of requests that must meet the limits, in a search for the peak rate.
    """

    load: LoadKind
    values: tuple[float, ...] = ()
    input_tokens: str = "256"
    output_tokens: str = ""
    arrival: str = default("arrival", BENCH)
    prefix: SharedPrefix | None = None
    images: ImageWorkload | None = None
    turns: str = ""
    think: float = default("think", BENCH)
    prompts: Path | None = None
    trace: Path | None = None
    speed: float = default("speed", BENCH)
    requests: int | None = None
    seconds: float | None = None
    warmups: int = default("warmups", BENCH)
    seed: int = default("seed", BENCH)
    slo: dict[str, float] = {}
    enough: float = ENOUGH
    chat: bool = False


@dataclass(frozen=True)
class BenchPlan:
    """The steps of a run.

    Attributes:
        name: Name of the workload, for titles.
        total: Number of steps, or 0 if only the search knows.
        search: Starts the search.
    """

    name: str
    total: int
    search: Callable[[], StepSearch]


class StepBounds(msgspec.Struct, frozen=True, kw_only=True):
    """When a step ends: after ``requests`` or ``seconds``, whichever comes first.

    Attributes:
        warmups: Warm-ups: runs of a batch size, requests of each client, requests of a rate.
    """

    requests: int | None = None
    seconds: float | None = None
    warmups: int = 1


def plan_of(options: BenchOptions) -> BenchPlan:
    """The plan of a run. Raises ConfigError for values that no step can have."""
    bounds, values = bounds_of(options), options.values
    if any(not value > 0 for value in values):
        raise ConfigError("a load of 0 or less cannot be measured", "give values above 0")
    match options.load:
        case "batch":
            sizes = [int(value) for value in values or DEFAULT_SIZES]
            return batches(sizes, options.requests or DEFAULT_RUNS, options.warmups)
        case "concurrency":
            return clients([int(value) for value in values or DEFAULT_SIZES], bounds)
        case "rate":
            return rates(values, bounds)
        case "ramp":
            first, last = values
            label = f"{first:g} to {last:g}/s"
            return listed("ramp", [rate_step((first + last) / 2, bounds, label)])
        case "sweep":
            return to_saturation(bounds)
        case "peak":
            return peak_rate(options.slo, bounds, enough=options.enough)
        case "trace":
            whole = StepBounds(requests=options.requests, seconds=options.seconds, warmups=0)
            step = rate_step(options.speed, whole, f"trace x{options.speed:g}")
            return listed("trace", [step])


def bounds_of(options: BenchOptions) -> StepBounds:
    """When each step of a run ends."""
    seconds = options.seconds
    if seconds is None and (options.requests is None or options.load == "ramp"):
        seconds = DEFAULT_SECONDS
    return StepBounds(requests=options.requests, seconds=seconds, warmups=options.warmups)


def batch_step(size: int, runs: int, warmups: int) -> BenchStep:
    """Closed batches of one size: first the warm-ups, then ``runs`` that count."""
    return BenchStep(
        kind="batch", value=size, label=str(size), warmup=warmups, requests=runs + warmups
    )


def client_step(clients: int, bounds: StepBounds) -> BenchStep:
    """Concurrent clients that each send a request, wait for the response, and send the next."""
    warmup = bounds.warmups * clients
    return BenchStep(
        kind="concurrency",
        value=clients,
        label=str(clients),
        warmup=warmup,
        requests=None if bounds.requests is None else bounds.requests + warmup,
        seconds=bounds.seconds,
    )


def rate_step(rate: float, bounds: StepBounds, label: str = "") -> BenchStep:
    """Requests at a rate per second, sent when they are due whatever the server does."""
    return BenchStep(
        kind="rate",
        value=rate,
        label=label or f"{rate:.4g}/s",
        warmup=bounds.warmups,
        requests=None if bounds.requests is None else bounds.requests + bounds.warmups,
        seconds=bounds.seconds,
    )


def listed(name: str, steps: Sequence[BenchStep]) -> BenchPlan:
    """Steps that are known in advance."""

    def search() -> StepSearch:
        for step in steps:  # noqa: UP028 (the iterator of a list has no send)
            yield step
        return []

    return BenchPlan(name, len(steps), search)


def batches(sizes: Sequence[int], runs: int, warmups: int) -> BenchPlan:
    """TGI's batch sweep: for each size its warm-ups, then its runs."""
    return listed("batch sizes", [batch_step(size, runs, warmups) for size in sizes])


def clients(counts: Sequence[int], bounds: StepBounds) -> BenchPlan:
    """One step for each number of concurrent clients."""
    return listed("concurrency", [client_step(count, bounds) for count in counts])


def rates(values: Sequence[float], bounds: StepBounds) -> BenchPlan:
    """One step for each rate; the workload spaces the requests."""
    return listed("rates", [rate_step(value, bounds) for value in values])


def to_saturation(bounds: StepBounds, most: int = 1024, refine: int = 2) -> BenchPlan:
    """Doubles the clients until throughput stays while latency grows, then looks between.

    It ends when two steps one after the other are past the knee (``find_knee``) - one alone may
    be chance -, when no request of a step was answered, or at ``most`` clients. Then ``refine``
    steps halve (on a log scale) the distance between the knee and the next count below it.
    """

    def search() -> StepSearch:
        points: list[StepMetrics] = []
        count, end = 1, f"saturation was not reached with {most} clients"
        while count <= most:
            points.append(_metrics((yield client_step(count, bounds))))
            if not points[-1].succeeded:
                end = f"no request was answered with {count} clients; the sweep ends there"
                break
            knee = find_knee(points)
            if knee is not None and len(points) - 1 - knee >= 2:
                end = ""
                break
            count *= 2
        for _ in range(refine):
            points.sort(key=lambda point: point.step.value)
            knee = find_knee(points)
            if not knee:
                break
            low, high = (int(points[i].step.value) for i in (knee - 1, knee))
            middle = round((low * high) ** 0.5)
            if middle in (low, high):
                break
            points.append(_metrics((yield client_step(middle, bounds))))
        points.sort(key=lambda point: point.step.value)
        return [note for note in (end, explain_knee(points)) if note]

    return BenchPlan("sweep to saturation", 0, search)


def explain_knee(points: Sequence[StepMetrics]) -> str:
    """The knee in a sentence; empty where the steps show none."""
    knee = find_knee(points)
    if knee is None:
        return ""
    at, beyond = points[knee], points[-1]
    more = beyond.rates["output_tokens_per_second"] / at.rates["output_tokens_per_second"] - 1
    slower = beyond.latencies["e2e"].p50 / at.latencies["e2e"].p50
    return (
        f"knee at {at.step.label} clients: {at.rates['output_tokens_per_second']:.1f} output "
        f"tokens/s at {at.latencies['e2e'].p50:.0f} ms (median); {beyond.step.label} clients get "
        f"{more:+.1%} throughput at {slower:.1f} times that latency"
    )


def peak_rate(
    slo: dict[str, float],
    bounds: StepBounds,
    *,
    enough: float = ENOUGH,
    precision: float = 0.1,
    most: int = 16,
    first: float | None = None,
) -> BenchPlan:
    """The highest rate at which a share ``enough`` of the requests meet every limit.

    One client alone shows what the limits cost unloaded; if that misses them no rate will do.
    From the rate it was answered at (or ``first``) the rate doubles while the limits are met, or
    halves until they are; bisection then narrows the gap to ``precision``.

    Args:
        slo: limits by metric in ms.
        precision: highest rate missed over highest rate met, less 1.
        most: steps at most, the first one included.
    """

    def search() -> StepSearch:
        alone = _metrics((yield client_step(1, bounds)), slo)
        if not meets(alone, enough):
            return [_unmet(alone, slo)]
        whole = alone.latencies.get("e2e")
        rate = first or (1000.0 / whole.mean if whole else alone.rates["requests_per_second"])
        met: StepMetrics | None = None
        missed: float | None = None
        for _ in range(most - 1):
            metrics = _metrics((yield rate_step(rate, bounds)), slo)
            if meets(metrics, enough):
                met = metrics
            else:
                missed = rate
            if met and missed and missed / met.step.value - 1 <= precision:
                break
            if missed is None:
                rate *= 2
            else:
                rate = (met.step.value + missed) / 2 if met else rate / 2
        return [_peak(met, missed, enough)]

    return BenchPlan("peak rate within limits", 0, search)


def _metrics(record: StepRecord, slo: dict[str, float] | None = None) -> StepMetrics:
    return step_metrics(record, slo, intervals=False)


def _unmet(alone: StepMetrics, slo: dict[str, float]) -> str:
    if not alone.succeeded:
        return "one client alone got no answer; no rate was tried"
    parts = {"ttft": "ttft_scheduled", "e2e": "e2e_scheduled"}
    seen = {name: alone.latencies.get(parts.get(name, name)) for name in slo}
    took = ", ".join(
        f"{name} {summary.p90:.0f} ms (p90; limit {slo[name]:g})"
        for name, summary in seen.items()
        if summary is not None
    )
    return f"the limits are missed by one client alone, so by every rate: {took}"


def _peak(met: StepMetrics | None, missed: float | None, enough: float) -> str:
    if met is None:
        share = f"{enough:.0%} of the requests"
        return f"no rate met the limits for {share}; the lowest was {missed:.4g}/s"
    found = (
        f"peak rate within the limits: {met.step.label} with {met.attainment:.1%} of the requests "
        f"good, a goodput of {met.rates['goodput']:.4g} requests/s"
    )
    if missed is None:
        return f"{found}; no higher rate was tried, and none was missed"
    return f"{found}; {missed:.4g}/s missed them"
