"""The metrics that screens show of a step, computed in a thread and cached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tgi_cli.bench.dashboard.run_state import RunState, StepState
from tgi_cli.bench.events import BenchRequestRecord, StepRecord
from tgi_cli.bench.statistics.metrics import StepMetrics, step_metrics
from tgi_cli.bench.statistics.observations import (
    METRICS,
    batch_values,
    latencies_of,
    without_warmup,
)
from tgi_cli.bench.statistics.rates import windows
from tgi_cli.bench.statistics.resolution import TOGETHER, together, unresolved
from tgi_cli.bench.statistics.summary import Summary, summarize

SHARE = 0.1
"""Share of the time that may be spent on the metrics of a running step."""
PAUSE = 0.5
"""Least seconds between updates of a running step: drawing costs more than computing."""
CHART_POINTS = 400
"""Most points of one step in a chart; a terminal has no space for more."""

Floats = NDArray[np.float64]
NONE: Floats = np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class StepPanel:
    """One half of the first view: prefill or decode.

    Attributes:
        heading: Heading of the statistics and the histogram.
        columns: Latencies in ms, by the heading of their column.
        rate: Tokens per second over the runs of a batch.
        counts: Other numbers by name, the rate of a step of requests first.
        values: Values of the histogram, float64 ``[n]``, ms.
        latency, throughput: Points of the chart, float64 ``[n]``, ms and tokens/s.
        axis: What the chart's latency is.
        unresolved: Why there are no values, if the client could not resolve them.
        note: What the user should know about the values.
    """

    heading: str
    columns: Mapping[str, Summary | None]
    rate: Summary | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    values: Floats = field(default_factory=lambda: NONE)
    latency: Floats = field(default_factory=lambda: NONE)
    throughput: Floats = field(default_factory=lambda: NONE)
    axis: str = "ms"
    unresolved: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class StepPanels:
    """The prefill half and the decode half."""

    prefill: StepPanel
    decode: StepPanel


def panels(record: StepRecord) -> StepPanels:
    """What the first view shows of a step.

    Closed batches are shown as text-generation-benchmark shows them. For requests over HTTP, the
    time to first token takes the place of the prefill, the inter-token latency that of a decode
    step, and the end-to-end latency that of all decode steps. Where tokens arrive together, as
    those of accepted drafts do, the time per output token replaces the inter-token latency. The
    chart has the time per output token in any case, so that its points can be compared.
    """
    if not record.batches and (record.step.kind != "batch" or record.requests):
        return _of_requests(record)
    found = batch_values(record.batches)

    def panel(name: str, values: Floats, columns: dict[str, str]) -> StepPanel:
        throughput = found[f"{name.lower()}_throughput"]
        return StepPanel(
            name,
            {heading: _summary(found[metric]) for heading, metric in columns.items()},
            _summary(throughput),
            {},
            values,
            values[-CHART_POINTS:],
            throughput[-CHART_POINTS:],
        )

    return StepPanels(
        panel("Prefill", found["prefill"], {"ms": "prefill"}),
        panel(
            "Decode",
            found["decode_token"],
            {"total ms": "decode_total", "token ms": "decode_token"},
        ),
    )


def _of_requests(record: StepRecord) -> StepPanels:
    observed = latencies_of(record.requests)
    coarse = unresolved(record, observed)
    requests = without_warmup(record.requests)
    failed = sum(request.error is not None for request in requests)
    rates = {name: float(found.mean()) for name, found in _rates(record, failed).items()}
    read, written = rates.get("input_tokens_per_second"), rates.get("output_tokens_per_second")
    values = {name: NONE if name in coarse else observed[name].values for name in observed}
    first, per_token = _summary(values["ttft"]), _summary(values["tpot"])
    merged = "itl" in coarse or together(observed) > TOGETHER
    name, decode = ("tpot", per_token) if merged else ("itl", _summary(values["itl"]))
    return StepPanels(
        StepPanel(
            "First token",
            {"TTFT ms": first},
            None,
            _known(
                {
                    "tokens/s": read,
                    "answers/s": rates.get("requests_per_second"),
                    "image tok": _image_tokens(requests),
                }
            ),
            values["ttft"],
            *_point(first, read),
            "TTFT ms",
            coarse.get("ttft", ""),
            "TTFT is unresolved: 2 has the reason" if "ttft" in coarse else "",
        ),
        StepPanel(
            "Decode",
            {"E2E ms": _summary(values["e2e"]), f"{METRICS[name].label} ms": decode},
            None,
            _known({"tokens/s": written, "failed": float(failed) if requests else None}),
            values[name],
            *_point(per_token, written),
            "TPOT ms",
            coarse.get(name, ""),
            "ITL is unresolved, see TPOT: 2 has the reason" if "itl" in coarse else "",
        ),
    )


def _image_tokens(requests: Sequence[BenchRequestRecord]) -> float | None:
    """Image tokens of a request, on average; None without images."""
    counts = [request.image_tokens for request in requests if request.error is None]
    return sum(counts) / len(counts) if any(counts) else None


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
    """Panels and tables of all steps, computed again only after a step has changed.

    They are computed in a thread, since a long step takes seconds; those of a running step so
    seldom that they take ``SHARE`` of the time.
    """

    def __init__(self, slo: Mapping[str, float] | None = None) -> None:
        self.slo = dict(slo or {})
        self._panels: dict[StepState, tuple[int, StepPanels]] = {}
        self._tables: dict[StepState, tuple[int, StepMetrics]] = {}
        self._next = 0.0

    def panels(self, step: StepState) -> StepPanels | None:
        """The latest panels, or None if there are none yet."""
        _, found = self._panels.get(step, (0, None))
        return found

    def table(self, step: StepState) -> StepMetrics | None:
        """The latest table, with intervals once the step has ended, or None."""
        _, found = self._tables.get(step, (0, None))
        return found

    def missing(self, run_state: RunState, shown: StepState | None, tables: bool) -> bool:
        """Whether ``update`` has something to compute."""
        return bool(self._stale_panels(run_state)) or (tables and self._stale_table(shown))

    def due(self, run_state: RunState, shown: StepState | None, tables: bool) -> bool:
        """Whether it is time for ``update``."""
        return time.monotonic() >= self._next and self.missing(run_state, shown, tables)

    async def update(self, run_state: RunState, shown: StepState | None, tables: bool) -> None:
        """Compute what is missing: all panels, and the table of the step that is shown."""
        began = time.monotonic()
        live = False
        for step in self._stale_panels(run_state):
            version, record = step.version, step.snapshot()
            self._panels[step] = (version, await asyncio.to_thread(panels, record))
            live |= step.record is None
        if shown is not None and tables and self._stale_table(shown):
            version, record = shown.version, shown.snapshot()
            ended = shown.record is not None
            table = await asyncio.to_thread(step_metrics, record, self.slo, intervals=ended)
            self._tables[shown] = (version, table)
            live |= not ended
        now = time.monotonic()
        if live:
            self._next = now + max((now - began) * (1 - SHARE) / SHARE, PAUSE)

    def _stale_panels(self, run_state: RunState) -> list[StepState]:
        return [s for s in run_state if self._panels.get(s, (-1,))[0] != s.version]

    def _stale_table(self, step: StepState | None) -> bool:
        return step is not None and self._tables.get(step, (-1,))[0] != step.version
