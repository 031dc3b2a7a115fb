"""Which charts a run has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tgi_cli.bench.events import BenchRequestRecord, BenchRun, StepRecord
from tgi_cli.bench.reports.svg import SERIES, SvgChart, timeline
from tgi_cli.bench.statistics import (
    METRICS,
    StepMetrics,
    batch_values,
    latencies_of,
    without_warmup,
)
from tgi_cli.bench.statistics.metrics import find_knee
from tgi_cli.bench.text_output import title

CURVE = 200
"""Points of a distribution's curve."""
TIMELINE = 120
"""Requests of a timeline at most; of more, the first ones."""

Figures = Sequence[tuple[StepRecord, StepMetrics]]


class ReportChart(NamedTuple):
    """A chart with what is said about it.

    Attributes:
        keys: (colour, meaning) of its lines.
        wide: takes the page's whole width.
    """

    heading: str
    svg: str
    text: str = ""
    keys: Sequence[tuple[str, str]] = ()
    wide: bool = False


def report_charts(run: BenchRun, figures: Figures) -> list[ReportChart]:
    """All charts of a run, those first that say most."""
    batches = [pair for pair in figures if pair[1].batches]
    loads = [pair for pair in figures if pair[1].latencies]
    found: list[ReportChart] = []
    if batches:
        found += [*_batch_plots(batches)]
    if loads:
        found += [*_load_plots(loads, run)]
    return found


def _batch_plots(figures: Figures) -> list[ReportChart]:
    found = []
    for name, latency, throughput in (
        ("Prefill", "prefill", "prefill_throughput"),
        ("Decode", "decode_token", "decode_throughput"),
    ):
        points = [
            (figure.batches[latency], figure.batches[throughput], record.step.label)
            for record, figure in figures
            if latency in figure.batches
        ]
        if not points:
            continue
        unit = "ms a token" if latency == "decode_token" else "ms"
        chart = SvgChart(f"latency, {unit}", "tokens per second")
        chart.line([x.mean for x, _, _ in points], [y.mean for _, y, _ in points], 0)
        for x, y, label in points:
            hint = f"batch size {label}: {x.mean:.2f} {unit}, {y.mean:.1f} tokens/s"
            chart.point(x.mean, y.mean, 0, label, hint)
        heading = f"{name}: throughput over latency"
        found.append(
            ReportChart(heading, chart.render(heading), "A point for each batch size (means).")
        )
    for name, label in (("prefill", "Prefill"), ("decode_token", "Decode (token)")):
        found += _distribution(
            f"{label} latency",
            "ms",
            [(record, batch_values(record.batches)[name]) for record, _ in figures],
        )
    return found


def _load_plots(figures: Figures, run: BenchRun) -> list[ReportChart]:
    found = []
    if len(figures) > 1:
        found.append(_throughput_over_latency(figures, run))
        found += [
            plot
            for name in ("ttft", "itl")
            if (plot := _latency_by_load(figures, name, run)) is not None
        ]
        if run.slo:
            found.append(_goodput(figures))
    for name in ("ttft", "itl"):
        values = [(record, latencies_of(record.requests)[name].values) for record, _ in figures]
        found += _distribution(METRICS[name].label, "ms", values)
    for record, _ in _spread(figures):
        if record.requests:
            found.append(_timeline(record))
    return found


def _kinds(figures: Figures) -> dict[str, list[tuple[StepRecord, StepMetrics]]]:
    """By kind of load, each by rising load."""
    found: dict[str, list[tuple[StepRecord, StepMetrics]]] = {}
    for pair in figures:
        found.setdefault(pair[0].step.kind, []).append(pair)
    return {k: sorted(pairs, key=lambda pair: pair[0].step.value) for k, pairs in found.items()}


def _throughput_over_latency(figures: Figures, run: BenchRun) -> ReportChart:
    chart = SvgChart("end-to-end latency, median, ms", "output tokens per second")
    text = "A point for each load; further up and further left is better."
    keys = []
    for colour, (kind, pairs) in enumerate(_kinds(figures).items()):
        xs = [figure.latencies["e2e"].p50 for _, figure in pairs]
        ys = [figure.rates["output_tokens_per_second"] for _, figure in pairs]
        chart.line(xs, ys, colour)
        knee = find_knee([figure for _, figure in pairs]) if kind == "concurrency" else None
        for place, (x, y, (record, figure)) in enumerate(zip(xs, ys, pairs, strict=True)):
            bounds = figure.rate_intervals.get("output_tokens_per_second")
            if bounds:
                chart.error_bar(x, *bounds)
            label = f"{record.step.label} (knee)" if place == knee else record.step.label
            hint = f"{title(record.step)}: {x:.1f} ms, {y:.1f} tokens/s"
            chart.point(x, y, colour, label, hint)
        keys.append((f"f{colour}", {"concurrency": "clients", "rate": "rates"}.get(kind, kind)))
    heading = "Throughput over latency"
    return ReportChart(heading, chart.render(heading), text, keys if len(keys) > 1 else ())


def _latency_by_load(figures: Figures, name: str, run: BenchRun) -> ReportChart | None:
    pairs = max(_kinds(figures).values(), key=len)
    pairs = [pair for pair in pairs if name in pair[1].latencies]
    if len(pairs) < 2:
        return None
    kind = pairs[0][0].step.kind
    logarithmic = kind == "concurrency"
    label = "clients" if logarithmic else "requests per second"
    chart = SvgChart(label, f"{METRICS[name].label}, ms", x_log=logarithmic, y_log=True)
    loads = [record.step.value for record, _ in pairs]
    keys = []
    for colour, cut in enumerate(("p50", "p90", "p99")):
        ys = [getattr(figure.latencies[name], cut) for _, figure in pairs]
        chart.line(loads, ys, colour)
        for x, y, (record, figure) in zip(loads, ys, pairs, strict=True):
            bounds = figure.latencies[name].intervals.get(cut)
            if bounds:
                chart.error_bar(x, *bounds)
            chart.point(x, y, colour, "", f"{title(record.step)}: {cut} {y:.1f} ms")
        keys.append((f"f{colour}", cut))
    if name in run.slo:
        limit = run.slo[name]
        chart.line([loads[0], loads[-1]], [limit, limit], 3, dashed=True)
        keys.append(("f3", f"limit {limit:g} ms"))
    heading = f"{METRICS[name].label} by load"
    text = "Bars are 95 % bootstrap intervals."
    return ReportChart(heading, chart.render(heading), text, keys)


def _goodput(figures: Figures) -> ReportChart:
    pairs = max(_kinds(figures).values(), key=len)
    pairs = [pair for pair in pairs if "goodput" in pair[1].rates]
    kind = "clients" if pairs[0][0].step.kind == "concurrency" else "requests per second"
    chart = SvgChart(kind, "answers per second")
    loads = [record.step.value for record, _ in pairs]
    for colour, name in enumerate(("requests_per_second", "goodput")):
        ys = [figure.rates[name] for _, figure in pairs]
        chart.line(loads, ys, colour)
        for x, y in zip(loads, ys, strict=True):
            chart.point(x, y, colour, "", f"{x:g}: {y:.3g}/s")
    heading = "Goodput by load"
    return ReportChart(
        heading, chart.render(heading), "", (("f0", "all"), ("f1", "within the limits"))
    )


def _spread(figures: Figures) -> list[tuple[StepRecord, StepMetrics]]:
    """As many steps as there are colours, evenly taken, the first and the last among them."""
    if len(figures) <= SERIES:
        return list(figures)
    places = np.unique(np.round(np.linspace(0, len(figures) - 1, SERIES)).astype(int))
    return [figures[place] for place in places]


def _distribution(
    name: str, unit: str, values: Sequence[tuple[StepRecord, np.ndarray]]
) -> list[ReportChart]:
    """The share of values up to each value, a curve for each step."""
    usable = [(record, np.sort(array)) for record, array in values if array.size > 1]
    if len(usable) > SERIES:
        places = np.unique(np.round(np.linspace(0, len(usable) - 1, SERIES)).astype(int))
        usable = [usable[place] for place in places]
    if not usable:
        return []
    chart = SvgChart(f"{name}, {unit}", "share of values, %", x_log=True)
    keys = []
    for colour, (record, array) in enumerate(usable):
        shares = np.unique(np.concatenate([np.linspace(0, 1, CURVE), [0.99, 0.999]]))
        cuts = np.maximum(np.quantile(array, shares), 1e-3)
        chart.line([float(cut) for cut in cuts], [float(share * 100) for share in shares], colour)
        keys.append((f"f{colour}", title(record.step)))
    heading = f"{name}: distribution"
    return [
        ReportChart(
            heading, chart.render(heading), "The share of values that were at most so large.", keys
        )
    ]


def _timeline(record: StepRecord) -> ReportChart:
    every = sorted(without_warmup(record.requests), key=lambda request: request.scheduled)
    shown = every[:TIMELINE]
    start = min((request.scheduled for request in shown), default=0.0)
    rows = [_bars(request, start) for request in shown]
    seconds = max((request.finished - start for request in shown), default=1.0)
    heading = f"Requests of {title(record.step)}"
    text = f"The first {len(shown)} of {len(every)}." if len(every) > len(shown) else ""
    keys = (
        ("waiting", "due, not yet dispatched"),
        ("first", "until the first token"),
        ("decoding", "until whole"),
        ("failed", "failed"),
    )
    return ReportChart(heading, timeline(rows, seconds, heading), text, keys, wide=True)


def _bars(request: BenchRequestRecord, start: float) -> list[tuple[float, float, str, str]]:
    due, sent, over = (
        time - start for time in (request.scheduled, request.dispatched, request.finished)
    )
    name = f"request {request.index}"
    bars = [(due, sent, "waiting", f"{name}: {sent - due:.3f} s late")] if sent > due else []
    if request.error is not None:
        hint = f"{name}: {request.error} {request.detail}"
        return [*bars, (sent, over, "failed", hint)]
    first = request.arrivals[0] - start if request.arrivals else over
    bars.append((sent, first, "first", f"{name}: first token after {first - sent:.3f} s"))
    hint = f"{name}: {request.output_tokens} tokens in {over - sent:.3f} s"
    return [*bars, (first, over, "decoding", hint)]
