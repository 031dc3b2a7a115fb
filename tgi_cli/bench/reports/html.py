"""A run as one self-contained page of HTML: no network, no scripts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tgi_cli.bench.events import BenchRun
from tgi_cli.bench.reports.charts import TEMPLATES, charts_of
from tgi_cli.bench.reports.markdown import distinct_latencies, notes_of, unresolved_latencies
from tgi_cli.bench.statistics.metrics import StepMetrics, step_metrics
from tgi_cli.bench.statistics.observations import METRICS


def html(run: BenchRun) -> str:
    """The page: configuration, charts, metrics with intervals, errors, the client's machine."""
    steps = [step_metrics(record, run.slo) for record in run.steps]
    latencies, rates = [], []
    for step in steps:
        rates += [
            (step.step, METRICS[name], value, step.rate_intervals.get(name))
            for name, value in step.rates.items()
        ]
        for name, summary in {**distinct_latencies(step), **step.batches}.items():
            if METRICS[name].unit == "ms":
                latencies.append((step.step, METRICS[name], summary))
            else:
                interval = summary.intervals.get("mean")
                rates.append((step.step, METRICS[name], summary.mean, interval))
    measured = {n for s in steps for n in (*s.latencies, *s.unresolved, *s.rates, *s.batches)}
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.created))
    count = f"{len(run.steps)} step{'' if len(run.steps) == 1 else 's'}"
    return TEMPLATES.get_template("page.html").render(
        run=run,
        heading=run.target.model or run.target.address,
        subtitle=f"{run.target.kind} at {run.target.address}, {count}, {when}, tgi {run.tgi}",
        notes=notes_of(run, steps),
        cards=_best(steps),
        charts=charts_of(run, steps),
        latencies=latencies,
        unresolved=[
            (step.step, METRICS[name], step.unresolved[name])
            for step in steps
            for name in unresolved_latencies(step)
        ],
        rates=rates,
        drafting=[step for step in steps if step.drafts],
        errors=_errors(run),
        facts=_facts(run),
        definitions=[metric for name, metric in METRICS.items() if name in measured],
    )


def _best(steps: Sequence[StepMetrics]) -> list[tuple[str, str, str]]:
    """The best values of the run, each with its name and its step."""
    cards = []
    loads = [step for step in steps if step.latencies]
    if loads:
        best = max(loads, key=lambda step: step.rates["output_tokens_per_second"])
        value = f"{best.rates['output_tokens_per_second']:.1f} tokens/s"
        cards.append(("Highest output", value, best.step.title))
    for name in ("ttft", "tpot" if any(step.bursty for step in loads) else "itl"):
        if having := [step for step in loads if name in step.latencies]:
            best = min(having, key=lambda step: step.latencies[name].p50)
            value = f"{best.latencies[name].p50:.1f} ms"
            cards.append((f"Lowest {METRICS[name].label} p50", value, best.step.title))
    if having := [step for step in loads if step.attainment is not None]:
        best = max(having, key=lambda step: step.rates["goodput"])
        share = f"{best.step.title}, {best.attainment:.1%} within limits"
        cards.append(("Highest goodput", f"{best.rates['goodput']:.2f} requests/s", share))
    if having := [step for step in steps if step.acceptance is not None]:
        best = max(having, key=lambda step: step.acceptance or 0.0)
        cards.append(("Most drafts accepted", f"{best.acceptance:.1%}", best.step.title))
    for name in ("prefill_throughput", "decode_throughput"):
        if having := [step for step in steps if name in step.batches]:
            best = max(having, key=lambda step: step.batches[name].mean)
            value = f"{best.batches[name].mean:.1f} tokens/s"
            cards.append((f"Highest {METRICS[name].label.lower()}", value, best.step.title))
    return cards


def _errors(run: BenchRun) -> list[tuple[Any, str, list[str]]]:
    """Step, kind and all messages of each kind of error."""
    rows = []
    for record in run.steps:
        kinds: dict[str, list[str]] = {}
        for request in record.requests:
            if request.error is not None and not request.warmup:
                kinds.setdefault(request.error, []).append(request.detail)
        rows += [(record.step, kind, details) for kind, details in kinds.items()]
    return rows


def _facts(run: BenchRun) -> dict[str, dict[str, str]]:
    """Names and values of everything that was configured, by section."""
    server = {"kind": run.target.kind, "address": run.target.address}
    server["started"] = " ".join(run.target.started_here)
    sections = {
        "Workload": {"command": " ".join(run.command), **run.workload},
        "Limits": {name: f"{limit:g} ms" for name, limit in run.slo.items()},
        "Server": {**server, **run.target.info},
        "Client machine": run.machine,
    }
    return {
        heading: {
            name: _plain(value) for name, value in facts.items() if value not in (None, "", [], {})
        }
        for heading, facts in sections.items()
    }


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(inner) for inner in value)
    return str(value)
