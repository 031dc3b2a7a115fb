"""Comparison of two runs: ratios with their intervals, and regressions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import NormalDist
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tgi_cli.bench.events import BenchRequestRecord, BenchRun, StepRecord
from tgi_cli.bench.load.client_lag import worst_of
from tgi_cli.bench.statistics.metrics import MERGED
from tgi_cli.bench.statistics.observations import (
    METRICS,
    batch_values,
    latencies_of,
    without_warmup,
)
from tgi_cli.bench.statistics.rates import SLICES, goodput_windows, resampled_rate, windows
from tgi_cli.bench.statistics.resolution import unresolved
from tgi_cli.bench.statistics.summary import resampled

FAIL_ON = 0.05
CONFIDENCE = 0.99
"""Confidence of all intervals of a comparison together."""
BEYOND = 5
"""Fewest values beyond a percentile that is compared; fewer are single outliers."""
ANSWERED = "answered"
_LEAST = 1e-12

Floats = NDArray[np.float64]
Verdict = Literal["better", "worse", "same"]

# The median of each latency, and its tail if there are enough values.
_COMPARED = (
    ("ttft_scheduled", 50.0),
    ("ttft_scheduled", 99.0),
    ("itl", 50.0),
    ("itl", 99.0),
    ("tpot", 50.0),
    ("e2e_scheduled", 50.0),
    ("e2e_scheduled", 99.0),
)
_RATES = ("requests_per_second", "output_tokens_per_second", "goodput")
_BATCH = ("prefill", "decode_token", "prefill_throughput", "decode_throughput")
_MACHINE = ("processor", "cores", "gpus", "hostname", "system")
"""What should be equal; versions are often what is compared."""


class ComparedMetric(msgspec.Struct, frozen=True, kw_only=True):
    """One statistic of one step in both runs.

    Attributes:
        metric: A name of ``METRICS``, or ``answered``: the share of requests that succeeded.
        statistic: ``mean``, ``p50`` ...
        a, b: Values in ms, per second, or as a share.
        ratio: ``b`` over ``a``, with the interval ``low`` to ``high``.
        verdict: The verdict on ``b``; ``same`` means not significant.
        failed: Whether it is worse by more than is allowed.
    """

    step: str
    metric: str
    statistic: str
    a: float
    b: float
    ratio: float
    low: float
    high: float
    verdict: Verdict
    failed: bool


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of two runs.

    Attributes:
        notes: Differences between the runs besides their metrics.
        unmatched: Steps that only one of them has.
    """

    rows: list[ComparedMetric]
    notes: list[str]
    unmatched: list[str]
    fail_on: float | None

    @property
    def regressions(self) -> list[ComparedMetric]:
        """Metrics that fail."""
        return [row for row in self.rows if row.failed]


def compare(a: BenchRun, b: BenchRun, fail_on: float | None = FAIL_ON) -> Comparison:
    """Compare ``b`` with ``a`` step by step; steps match by kind and value.

    A metric is better or worse if the interval of its ratio excludes 1 and the ratio differs from 1
    by at least ``fail_on`` (5 % if None). The intervals are wide enough that all of them together
    are right in 99 % of comparisons (Bonferroni): otherwise some of a hundred metrics would be
    worse by chance every time. Requests that run at the same time share what happens to the server,
    so the bootstrap draws slices of time, not requests; for batches it draws runs.

    Args:
        fail_on: Change for the worse that is a regression, or None for no regressions.
    """
    first, second = _by_step(a), _by_step(b)
    slo = a.slo or b.slo
    pairs = []
    for key in first:
        if key in second:
            left, right = _estimates(first[key], slo, 1), _estimates(second[key], slo, 2)
            label = _label(first[key])
            pairs += [(label, *name, left[name], right[name]) for name in left if name in right]
    tail = (1 - CONFIDENCE) / 2 / max(len(pairs), 1)
    rows = [_compared(*pair, tail, fail_on) for pair in pairs]
    notes = [*differences(a, b), *_uncompared(first, second)]
    unmatched = []
    for name, own, other in (("first", first, second), ("second", second, first)):
        only = [_label(record) for key, record in own.items() if key not in other]
        unmatched += [f"{label}: only in the {name} run" for label in only]
    return Comparison(rows=rows, notes=notes, unmatched=unmatched, fail_on=fail_on)


def differences(a: BenchRun, b: BenchRun) -> list[str]:
    """The differences between two runs that should be equal, one sentence each."""
    notes = []
    machines = [{key: run.machine.get(key) for key in _MACHINE} for run in (a, b)]
    for what, left, right in (
        ("the workload", a.workload, b.workload),
        ("the machine", machines[0], machines[1]),
        ("the limits", a.slo, b.slo),
        ("the target", {"kind": a.target.kind}, {"kind": b.target.kind}),
        ("the model", {"name": a.target.model}, {"name": b.target.model}),
    ):
        notes += [
            f"{what} differs: {key} {left.get(key)!r} and {right.get(key)!r}"
            for key in sorted(set(left) | set(right))
            if left.get(key) != right.get(key)
        ]
    for name, run in (("first", a), ("second", b)):
        if any(_merged(without_warmup(record.requests)) for record in run.steps):
            notes.append(f"events of the {name} run have several tokens: ITL is not compared")
        if any(record.client.behind for record in run.steps):
            notes.append(f"the load generator was the bottleneck in a step of the {name} run")
    return notes


def _uncompared(*runs: Mapping[tuple[str, float], StepRecord]) -> list[str]:
    """A sentence for each latency that is not compared, as one of the runs could not resolve it."""
    notes = []
    for name, steps in zip(("first", "second"), runs, strict=True):
        for record in steps.values():
            observed = latencies_of(record.requests)
            coarse = unresolved(record, observed)
            for metric in dict.fromkeys(metric for metric, _ in _COMPARED):
                start = f"{METRICS[metric].label} of {_label(record)} is not compared"
                if metric in coarse:
                    notes.append(f"{start}: in the {name} run, {coarse[metric]}")
    return notes


def _label(record: StepRecord) -> str:
    return f"{record.step.kind} {record.step.label}"


def _by_step(run: BenchRun) -> dict[tuple[str, float], StepRecord]:
    """Steps by kind and value; repeated ones joined."""
    found: dict[tuple[str, float], StepRecord] = {}
    for record in run.steps:
        key = (record.step.kind, record.step.value)
        found[key] = _joined(found[key], record) if key in found else record
    return found


def _joined(a: StepRecord, b: StepRecord) -> StepRecord:
    """Two records of one step, with the times of the second after those of the first."""
    shift = max((request.finished for request in a.requests), default=0.0)
    shift -= min((request.scheduled for request in b.requests), default=0.0)
    moved = [
        msgspec.structs.replace(
            request,
            scheduled=request.scheduled + shift,
            dispatched=request.dispatched + shift,
            arrivals=[time + shift for time in request.arrivals],
            finished=request.finished + shift,
        )
        for request in b.requests
    ]
    return msgspec.structs.replace(
        a,
        duration=a.duration + b.duration,
        requests=[*a.requests, *moved],
        batches=[*a.batches, *b.batches],
        client=worst_of([a.client, b.client]),
        server={
            name: a.server.get(name, 0.0) + b.server.get(name, 0.0)
            for name in {*a.server, *b.server}
            if name.endswith("_total")
        },
    )


class _Estimate(NamedTuple):
    """A statistic of one run; ``replicates`` of the bootstrap drew from so many units."""

    value: float
    replicates: Floats
    units: int


def _compared(
    step: str,
    metric: str,
    statistic: str,
    a: _Estimate,
    b: _Estimate,
    tail: float,
    fail_on: float | None,
) -> ComparedMetric:
    """Compare two estimates; the interval leaves out the probability ``tail`` on either side."""
    ratio, low, high = _ratio(a, b, tail)
    lower_is_better = metric in METRICS and METRICS[metric].better == "lower"
    least = FAIL_ON if fail_on is None else fail_on
    if metric == ANSWERED:  # more failures are worse long before they are 5 %
        least = min(least, 0.01)
    verdict: Verdict = "same"
    if abs(ratio - 1) >= least and (low > 1 or high < 1):
        verdict = "better" if (ratio < 1) == lower_is_better else "worse"
    return ComparedMetric(
        step=step,
        metric=metric,
        statistic=statistic,
        a=a.value,
        b=b.value,
        ratio=ratio,
        low=low,
        high=high,
        verdict=verdict,
        failed=fail_on is not None and verdict == "worse",
    )


def _ratio(a: _Estimate, b: _Estimate, tail: float) -> tuple[float, float, float]:
    """b over a with its interval: on the log scale, by the deviation of the replicates."""
    ratio = 1.0 if a.value == b.value else max(b.value, _LEAST) / max(a.value, _LEAST)
    count = min(len(a.replicates), len(b.replicates))
    logs = [np.log(np.maximum(side.replicates[:count], _LEAST)) for side in (a, b)]
    width = _quantile(1 - tail, max(a.units + b.units - 2, 1)) * float((logs[1] - logs[0]).std())
    return ratio, ratio * math.exp(-min(width, 700)), ratio * math.exp(min(width, 700))


def _quantile(probability: float, freedom: int) -> float:
    """Student's t, by the first terms of its expansion in the normal quantile.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + first + second


def _estimates(
    record: StepRecord, slo: dict[str, float], seed: int
) -> dict[tuple[str, str], _Estimate]:
    """The compared statistics of a step, by metric and statistic."""
    found: dict[tuple[str, str], _Estimate] = {}
    for name, values in batch_values(record.batches).items():
        if name in _BATCH and len(values) > 1:
            replicates = resampled(values, None, [50.0], seed)[:, 1]
            found[name, "p50"] = _Estimate(float(np.median(values)), replicates, len(values))
    requests = without_warmup(record.requests)
    if not requests:
        return found
    answered = [request for request in requests if request.error is None]
    share = np.array([request.error is None for request in requests], np.float64)
    slices = _slices([request.scheduled for request in requests], record.duration)
    blocks = len(np.unique(slices))
    replicates = resampled(share, slices, [], seed)[:, 0]
    found[ANSWERED, "share"] = _Estimate(float(share.mean()), replicates, blocks)
    slice_of = slices[share > 0]
    observed = latencies_of(requests)
    coarse = unresolved(record, observed)
    for name, group in groupby(_COMPARED, key=lambda pair: pair[0]):
        values, clusters = observed[name]
        if (name == "itl" and _merged(answered)) or not values.size or len(answered) < 2:
            continue
        if name in coarse:
            continue
        wanted = [p for _, p in group if values.size * (100 - p) / 100 >= BEYOND or p == 50]
        columns = resampled(values, slice_of[clusters], wanted, seed)[:, 1:]
        for percentile, replicates in zip(wanted, columns.T, strict=True):
            value = float(np.percentile(values, percentile))
            if replicates.min() > 0:  # a ratio to nothing says nothing
                found[name, f"p{percentile:g}"] = _Estimate(value, replicates, blocks)
    rates = windows(requests, record.duration, SLICES)
    if slo:
        rates["goodput"] = goodput_windows(requests, slo, record.duration, SLICES)
    for name in _RATES:
        if name in rates:
            replicates = resampled_rate(rates[name], seed)
            found[name, "mean"] = _Estimate(float(rates[name].mean()), replicates, SLICES)
    return found


def _merged(answered: Sequence[BenchRequestRecord]) -> bool:
    """Whether events have several tokens, so that gaps depend on chance."""
    events = sum(len(request.arrivals) for request in answered)
    return sum(request.output_tokens for request in answered) > MERGED * max(events, 1)


def _slices(times: Sequence[float], duration: float) -> NDArray[np.int64]:
    """The slice of the step in which each request was due."""
    array = np.asarray(times, np.float64)
    width = max(duration, 1e-9) / SLICES
    slices: NDArray[np.int64] = ((array - array.min()) / width).astype(np.int64)
    return np.minimum(slices, SLICES - 1)
