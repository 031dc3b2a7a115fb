"""Which steps a run has. Lists, and searches that choose the next step by what the last one showed.

A search is a generator: it yields a Step, is sent that step's StepRecord, and returns what it
found, in sentences for ``Run.notes``. It knows no clock and no server, so a model of one is all
that a test needs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from tgi_cli.bench.events import BenchRequest, BenchStep, StepRecord
from tgi_cli.bench.statistics import StepMetrics, step_metrics
from tgi_cli.bench.statistics.metrics import ENOUGH, find_knee, meets

Search = Generator[BenchStep, StepRecord, list[str]]
RequestsOfStep = Callable[[BenchStep, int], Iterable[BenchRequest]]
"""Builds the requests of a step from the step and its position in the run."""


@dataclass(frozen=True)
class BenchPlan:
    """The steps of a run.

    Attributes:
        name: of the workload, for titles.
        total: how many steps; 0: only a search's end will tell.
        search: begins it anew.
    """

    name: str
    total: int
    search: Callable[[], Search]


class StepBounds(msgspec.Struct, frozen=True, kw_only=True):
    """When a step ends: after so many counted requests or seconds, whichever comes first.

    Attributes:
        warmups: of a batch size, runs; of clients, requests for each; of a rate, requests.
    """

    requests: int | None = None
    seconds: float | None = None
    warmups: int = 1


def batch_step(size: int, runs: int, warmups: int) -> BenchStep:
    """Closed batches of one size; the warm-ups come before the ``runs`` that count."""
    return BenchStep(
        kind="batch", value=size, label=str(size), warmup=warmups, requests=runs + warmups
    )


def client_step(clients: int, bounds: StepBounds) -> BenchStep:
    """So many clients that each send, wait for the answer, and send again."""
    return _step("concurrency", clients, str(clients), bounds, bounds.warmups * clients)


def rate_step(rate: float, bounds: StepBounds, label: str = "") -> BenchStep:
    """Requests per second, sent when they are due whatever the server does."""
    return _step("rate", rate, label or f"{rate:.4g}/s", bounds, bounds.warmups)


def _step(kind: str, value: float, label: str, bounds: StepBounds, warmup: int) -> BenchStep:
    requests = None if bounds.requests is None else bounds.requests + warmup
    fields = {"kind": kind, "value": value, "label": label, "warmup": warmup}
    return BenchStep(**fields, requests=requests, seconds=bounds.seconds)  # type: ignore[arg-type]


def listed(name: str, steps: Sequence[BenchStep]) -> BenchPlan:
    """Steps that are known before the first one runs."""

    def search() -> Search:
        for step in steps:  # noqa: UP028 (a list's iterator takes no answers)
            yield step
        return []

    return BenchPlan(name, len(steps), search)


def batches(sizes: Sequence[int], runs: int, warmups: int) -> BenchPlan:
    """TGI's batch sweep: for each size its warm-ups, then its runs."""
    return listed("batch sizes", [batch_step(size, runs, warmups) for size in sizes])


def clients(counts: Sequence[int], bounds: StepBounds) -> BenchPlan:
    """One step for each number of clients."""
    return listed("concurrency", [client_step(count, bounds) for count in counts])


def rates(values: Sequence[float], bounds: StepBounds) -> BenchPlan:
    """One step for each rate; how requests are spaced (constant, Poisson) is the workload's."""
    return listed("rates", [rate_step(value, bounds) for value in values])


def to_saturation(bounds: StepBounds, most: int = 1024, refine: int = 2) -> BenchPlan:
    """Doubles the clients until throughput stays while latency grows, then looks between.

    It ends when two steps one after the other are past the knee (``find_knee``) - one alone may
    be chance -, when no request of a step was answered, or at ``most`` clients. Then ``refine``
    steps halve (on a log scale) the distance between the knee and the next count below it.
    """

    def search() -> Search:
        points: list[StepMetrics] = []
        count, end = 1, f"saturation was not reached with {most} clients"
        while count <= most:
            points.append(_figures((yield client_step(count, bounds))))
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
            points.append(_figures((yield client_step(middle, bounds))))
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

    def search() -> Search:
        alone = _figures((yield client_step(1, bounds)), slo)
        if not meets(alone, enough):
            return [_unmet(alone, slo)]
        rate = first or 1000.0 / alone.latencies["e2e"].mean
        met: StepMetrics | None = None
        missed: float | None = None
        for _ in range(most - 1):
            figures = _figures((yield rate_step(rate, bounds)), slo)
            if meets(figures, enough):
                met = figures
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


def _figures(record: StepRecord, slo: dict[str, float] | None = None) -> StepMetrics:
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
