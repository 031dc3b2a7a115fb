"""Two runs side by side: by how much, how surely, and whether that is a regression."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import NormalDist
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from tgi_cli.bench.events import BenchRequestRecord, BenchRun, StepRecord
from tgi_cli.bench.statistics import METRICS, batch_values, latencies_of, windows, without_warmup
from tgi_cli.bench.statistics.metrics import MERGED
from tgi_cli.bench.statistics.rates import SLICES, goodput_windows, resampled_rate
from tgi_cli.bench.statistics.summary import resampled

FAIL_ON = 0.05
CONFIDENCE = 0.99
"""Of all intervals of a comparison together."""
BEYOND = 5
"""Values that must lie beyond a percentile before it is compared: fewer are single accidents."""
ANSWERED = "answered"
_LEAST = 1e-12

Floats = NDArray[np.float64]
Verdict = Literal["better", "worse", "same"]

# Of each latency its typical value; and its tail where there is enough of it.
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


class ComparedMetric(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one step in both runs.

    Attributes:
        metric: of ``METRICS``, or ``answered``: the share of requests that did not fail.
        statistic: ``mean``, ``p50`` ...
        a, b: ms, per second, or a share.
        ratio: b over a; ``low`` and ``high`` its interval.
        verdict: of b; ``same`` is "no difference was shown".
        failed: worse by more than the run may be.
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
    """Of two runs.

    Attributes:
        notes: in what the runs differ besides their figures.
        unmatched: steps that only one of them has.
    """

    rows: list[ComparedMetric]
    notes: list[str]
    unmatched: list[str]
    fail_on: float | None

    @property
    def regressions(self) -> list[ComparedMetric]:
        """Rows that fail."""
        return [row for row in self.rows if row.failed]


def compare(a: BenchRun, b: BenchRun, fail_on: float | None = FAIL_ON) -> Comparison:
    """Compare ``b`` with ``a`` step by step; steps match by kind and value.

    A figure is better or worse if the interval of its ratio leaves out 1 and the ratio itself is
    off by at least ``fail_on`` (5 % if that is None). The intervals are wide enough that all of
    them together are right in 99 % of comparisons (Bonferroni): of a hundred figures some would
    else be worse by chance every time. Requests that run at the same time share what happens to
    the server, so the bootstrap draws slices of time, not requests; of batches, runs.

    Args:
        fail_on: from which change on what is worse is a regression; None: nothing is.
    """
    first, second = _by_step(a), _by_step(b)
    threshold = FAIL_ON if fail_on is None else fail_on
    slo = a.slo or b.slo
    pairs = [
        pair for key in first if key in second for pair in _pairs(first[key], second[key], slo)
    ]
    tail = (1 - CONFIDENCE) / 2 / max(len(pairs), 1)
    rows = [pair.row(tail, threshold, fail_on is not None) for pair in pairs]
    labels = {key: _label(record) for key, record in {**second, **first}.items()}
    unmatched = [f"{labels[key]}: only in the first run" for key in first if key not in second]
    unmatched += [f"{labels[key]}: only in the second run" for key in second if key not in first]
    return Comparison(rows=rows, notes=differences(a, b), unmatched=unmatched, fail_on=fail_on)


def differences(a: BenchRun, b: BenchRun) -> list[str]:
    """In what two runs differ that should be alike, a sentence each."""
    notes = []
    for what, left, right in (
        ("the workload", a.workload, b.workload),
        ("the machine", _comparable(a.machine), _comparable(b.machine)),
        ("the limits", a.slo, b.slo),
        ("the target", {"kind": a.target.kind}, {"kind": b.target.kind}),
        ("the model", {"name": a.target.model}, {"name": b.target.model}),
    ):
        for key in sorted(set(left) | set(right)):
            if left.get(key) != right.get(key):
                notes.append(f"{what} differs: {key} {left.get(key)!r} and {right.get(key)!r}")
    for name, run in (("first", a), ("second", b)):
        if any(_merged(without_warmup(record.requests)) for record in run.steps):
            notes.append(
                f"several tokens came in an event in the {name} run: ITL is not compared, TPOT is"
            )
        if any(record.client.behind for record in run.steps):
            notes.append(f"the load generator was the limit in a step of the {name} run")
    return notes


def _comparable(machine: dict[str, Any]) -> dict[str, Any]:
    """What shapes figures and should be alike; versions are often what is compared."""
    return {key: machine.get(key) for key in ("processor", "cores", "gpus", "hostname", "system")}


def _label(record: StepRecord) -> str:
    return f"{record.step.kind} {record.step.label}"


def _by_step(run: BenchRun) -> dict[tuple[str, float], StepRecord]:
    """Steps by kind and value; of repeated ones all requests and batches together."""
    found: dict[tuple[str, float], StepRecord] = {}
    for record in run.steps:
        key = (record.step.kind, record.step.value)
        if key in found:
            record = _joined(found[key], record)
        found[key] = record
    return found


def _joined(a: StepRecord, b: StepRecord) -> StepRecord:
    """Two records of one step, the second one's times behind the first one's."""
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
    )


class _Figure(msgspec.Struct):
    """A figure of one run.

    Attributes:
        replicates: of the bootstrap, which drew from so many slices or runs (``drawn``).
    """

    value: float
    replicates: Floats
    drawn: int


class _Pair(msgspec.Struct):
    """A figure in both runs."""

    step: str
    metric: str
    statistic: str
    a: _Figure
    b: _Figure

    def row(self, tail: float, threshold: float, may_fail: bool) -> ComparedMetric:
        """Its line. ``tail``: the probability that the interval leaves out on either side."""
        ratio, low, high = _ratio(self.a, self.b, tail)
        lower_is_better = self.metric in METRICS and METRICS[self.metric].better == "lower"
        # That more requests fail is worse long before it is 5 % of them.
        least = min(threshold, 0.01) if self.metric == ANSWERED else threshold
        verdict: Verdict = "same"
        if abs(ratio - 1) >= least and (low > 1 or high < 1):
            verdict = "better" if (ratio < 1) == lower_is_better else "worse"
        return ComparedMetric(
            step=self.step,
            metric=self.metric,
            statistic=self.statistic,
            a=self.a.value,
            b=self.b.value,
            ratio=ratio,
            low=low,
            high=high,
            verdict=verdict,
            failed=may_fail and verdict == "worse",
        )


def _ratio(a: _Figure, b: _Figure, tail: float) -> tuple[float, float, float]:
    """b over a, and its interval: on the log scale, by the deviation of the replicates."""
    if a.value == b.value:
        ratio = 1.0
    else:
        ratio = max(b.value, _LEAST) / max(a.value, _LEAST)
    count = min(len(a.replicates), len(b.replicates))
    logs = [np.log(np.maximum(side.replicates[:count], _LEAST)) for side in (a, b)]
    reach = _quantile(1 - tail, max(a.drawn + b.drawn - 2, 1)) * float((logs[1] - logs[0]).std())
    return ratio, ratio * math.exp(-min(reach, 700)), ratio * math.exp(min(reach, 700))


def _quantile(probability: float, freedom: int) -> float:
    """Student's t, by the first terms of its expansion in the normal quantile.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + first + second


def _pairs(a: StepRecord, b: StepRecord, slo: dict[str, float]) -> Iterator[_Pair]:
    left, right = _figures(a, slo, seed=1), _figures(b, slo, seed=2)
    for key, one in left.items():
        if key in right:
            yield _Pair(_label(a), *key, one, right[key])


def _figures(
    record: StepRecord, slo: dict[str, float], seed: int
) -> dict[tuple[str, str], _Figure]:
    found: dict[tuple[str, str], _Figure] = {}
    for name, values in batch_values(record.batches).items():
        if name in _BATCH and len(values) > 1:
            replicates = resampled(values, None, [50.0], seed)[:, 1]
            found[name, "p50"] = _Figure(float(np.median(values)), replicates, len(values))
    requests = without_warmup(record.requests)
    if not requests:
        return found
    answered = [request for request in requests if request.error is None]
    share = np.array([request.error is None for request in requests], np.float64)
    slices = _slices([request.scheduled for request in requests], record.duration)
    blocks = len(np.unique(slices))
    found[ANSWERED, "share"] = _Figure(
        float(share.mean()), resampled(share, slices, [], seed)[:, 0], blocks
    )
    slice_of = slices[share > 0]
    observed = latencies_of(requests)
    for name, group in groupby(_COMPARED, key=lambda pair: pair[0]):
        values, clusters = observed[name]
        if name == "itl" and _merged(answered):
            continue
        if not values.size or len(answered) < 2:
            continue
        wanted = [p for _, p in group if values.size * (100 - p) / 100 >= BEYOND or p == 50]
        replicates = resampled(values, slice_of[clusters], wanted, seed)
        for column, percentile in enumerate(wanted, start=1):
            value = float(np.percentile(values, percentile))
            found[name, f"p{percentile:g}"] = _Figure(value, replicates[:, column], blocks)
    rates = windows(requests, record.duration, SLICES)
    if slo:
        rates["goodput"] = goodput_windows(requests, slo, record.duration, SLICES)
    for name in _RATES:
        if name in rates:
            value = float(rates[name].mean())
            found[name, "mean"] = _Figure(value, resampled_rate(rates[name], seed), SLICES)
    return found


def _merged(answered: Sequence[BenchRequestRecord]) -> bool:
    """Whether tokens came several in an event, so that gaps are what chance put together."""
    events = sum(len(request.arrivals) for request in answered)
    return sum(request.output_tokens for request in answered) > MERGED * max(events, 1)


def _slices(times: Sequence[float], duration: float) -> NDArray[np.int64]:
    """In which slice of the step each request was due."""
    array = np.asarray(times, np.float64)
    width = max(duration, 1e-9) / SLICES
    slices: NDArray[np.int64] = ((array - array.min()) / width).astype(np.int64)
    return np.minimum(slices, SLICES - 1)
