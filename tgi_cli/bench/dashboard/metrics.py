"""The figures that screens show of a step, computed beside the screen and kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tgi_cli.bench.dashboard.run_state import RunState, StepState
from tgi_cli.bench.events import StepRecord
from tgi_cli.bench.statistics import (
    StepMetrics,
    Summary,
    batch_values,
    latencies_of,
    step_metrics,
    summarize,
    windows,
    without_warmup,
)

SHARE = 0.1
"""Of the time that may be spent on the figures of a step that runs."""
PAUSE = 0.5
"""Seconds between two of its figures at least: drawing them costs more than the rest."""
CHART_POINTS = 400
"""Most points of one step in a chart; a terminal has no room for more."""

Floats = NDArray[np.float64]
NONE: Floats = np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class StepPanel:
    """One half of the first view: prefill, or decode.

    Attributes:
        heading: of the statistics and the histogram.
        columns: latencies by the heading of their column, ms.
        rate: tokens per second, over the runs of a batch.
        counts: other numbers by their names, the rate of a step of requests first.
        values: float64 ``[n]``, ms: of the histogram.
        latency, throughput: float64 ``[n]``, ms and tokens/s: the chart's points.
    """

    heading: str
    columns: Mapping[str, Summary | None]
    rate: Summary | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    values: Floats = field(default_factory=lambda: NONE)
    latency: Floats = field(default_factory=lambda: NONE)
    throughput: Floats = field(default_factory=lambda: NONE)


@dataclass(frozen=True, slots=True, eq=False)
class StepPanels:
    """Both halves."""

    prefill: StepPanel
    decode: StepPanel


def panels(record: StepRecord) -> StepPanels:
    """What the first view shows of a step.

    Closed batches are shown as text-generation-benchmark shows them; requests over HTTP by their
    time to first token in the place of the prefill, their inter-token latency in that of a decode
    step and their end-to-end time in that of all decode steps.
    """
    if record.batches or (record.step.kind == "batch" and not record.requests):
        return _of_batches(record)
    return _of_requests(record)


def _of_batches(record: StepRecord) -> StepPanels:
    found = batch_values(record.batches)
    prefill, token = found["prefill"], found["decode_token"]
    return StepPanels(
        StepPanel(
            "Prefill",
            {"ms": _summary(prefill)},
            _summary(found["prefill_throughput"]),
            {},
            prefill,
            prefill[-CHART_POINTS:],
            found["prefill_throughput"][-CHART_POINTS:],
        ),
        StepPanel(
            "Decode",
            {"total ms": _summary(found["decode_total"]), "token ms": _summary(token)},
            _summary(found["decode_throughput"]),
            {},
            token,
            token[-CHART_POINTS:],
            found["decode_throughput"][-CHART_POINTS:],
        ),
    )


def _of_requests(record: StepRecord) -> StepPanels:
    observed = latencies_of(record.requests)
    requests = without_warmup(record.requests)
    failed = sum(request.error is not None for request in requests)
    rates = {name: float(found.mean()) for name, found in _rates(record, failed).items()}
    read, written = rates.get("input_tokens_per_second"), rates.get("output_tokens_per_second")
    first, gaps = _summary(observed["ttft"].values), _summary(observed["itl"].values)
    return StepPanels(
        StepPanel(
            "First token",
            {"TTFT ms": first},
            None,
            _known({"tokens/s": read, "answers/s": rates.get("requests_per_second")}),
            observed["ttft"].values,
            *_point(first, read),
        ),
        StepPanel(
            "Decode",
            {"E2E ms": _summary(observed["e2e"].values), "ITL ms": gaps},
            None,
            _known({"tokens/s": written, "failed": float(failed) if requests else None}),
            observed["itl"].values,
            *_point(gaps, written),
        ),
    )


def _rates(record: StepRecord, failed: int) -> Mapping[str, Floats]:
    answered = len(without_warmup(record.requests)) > failed
    return windows(record.requests, record.duration) if answered else {}


def _known(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if number is not None}


def _summary(values: Floats) -> Summary | None:
    return summarize(values, intervals=False)


def _point(latency: Summary | None, rate: float | None) -> tuple[Floats, Floats]:
    if latency is None or rate is None:
        return NONE, NONE
    return np.array([latency.mean]), np.array([rate])


class MetricsCache:
    """Panels and tables of all steps, each computed again only when its step has changed.

    They are computed in a thread, since a long step takes seconds. Those of a step that runs are
    computed so seldom that they take ``SHARE`` of the time.
    """

    def __init__(self, slo: Mapping[str, float] | None = None) -> None:
        self.slo = dict(slo or {})
        self._panels: dict[StepState, tuple[int, StepPanels]] = {}
        self._tables: dict[StepState, tuple[int, StepMetrics]] = {}
        self._next = 0.0

    def panels(self, step: StepState) -> StepPanels | None:
        """The newest; None: none yet."""
        kept = self._panels.get(step)
        return kept[1] if kept else None

    def table(self, step: StepState) -> StepMetrics | None:
        """The newest, with intervals once the step has ended; None: none yet."""
        kept = self._tables.get(step)
        return kept[1] if kept else None

    def missing(self, run_state: RunState, shown: StepState | None, tables: bool) -> bool:
        """Whether ``update`` has something to do."""
        return bool(self._stale_panels(run_state)) or (tables and self._stale_table(shown))

    def due(self, run_state: RunState, shown: StepState | None, tables: bool) -> bool:
        """Whether it is time for ``update`` to do it."""
        return time.monotonic() >= self._next and self.missing(run_state, shown, tables)

    async def update(self, run_state: RunState, shown: StepState | None, tables: bool) -> None:
        """Compute what is missing: all panels, and the table of the step that is shown."""
        began = time.monotonic()
        live = False
        for step in self._stale_panels(run_state):
            version, record = step.version, step.snapshot()
            found = await asyncio.to_thread(panels, record)
            self._panels[step] = (version, found)
            live |= step.record is None
        if shown is not None and tables and self._stale_table(shown):
            version, record = shown.version, shown.snapshot()
            whole = shown.record is not None
            figures = await asyncio.to_thread(step_metrics, record, self.slo, intervals=whole)
            self._tables[shown] = (version, figures)
            live |= not whole
        ended = time.monotonic()
        if live:
            self._next = ended + max((ended - began) * (1 - SHARE) / SHARE, PAUSE)

    def _stale_panels(self, run_state: RunState) -> list[StepState]:
        kept = self._panels
        return [s for s in run_state if s not in kept or kept[s][0] != s.version]

    def _stale_table(self, step: StepState | None) -> bool:
        kept = self._tables.get(step) if step is not None else None
        return step is not None and (kept is None or kept[0] != step.version)
