"""A run as one page of HTML that needs nothing else: no network, no scripts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tgi_cli.bench.events import BenchRun
from tgi_cli.bench.reports.charts import Figures, ReportChart, report_charts
from tgi_cli.bench.reports.markdown import told
from tgi_cli.bench.reports.style import CSS
from tgi_cli.bench.statistics import METRICS, StepMetrics, Summary, step_metrics
from tgi_cli.bench.sweeps import explain_knee
from tgi_cli.bench.text_output import title

_CUTS = ("p50", "p90", "p95", "p99", "p999")


def html(run: BenchRun) -> str:
    """The page: what was measured, charts, figures with intervals, errors, the machine."""
    figures = [(record, step_metrics(record, run.slo)) for record in run.steps]
    heading = f"{run.target.model or run.target.address}"
    sections = [
        _notes(run, figures),
        _key_figures(figures),
        _charts(report_charts(run, figures)),
        _percentiles(figures),
        _rates(figures),
        _errors(run),
        _facts(run),
        _meanings(figures),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>tgi bench: {escape(heading)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(heading)}</h1><p>{escape(_subtitle(run))}</p></header>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def _subtitle(run: BenchRun) -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.created))
    steps = f"{len(run.steps)} step{'' if len(run.steps) == 1 else 's'}"
    return f"{run.target.kind} at {run.target.address}, {steps}, {when}, tgi {run.tgi}"


def _notes(run: BenchRun, figures: Figures) -> str:
    notes = list(run.notes)
    clients = [f for record, f in figures if record.step.kind == "concurrency"]
    knee = explain_knee(sorted(clients, key=lambda figure: figure.step.value))
    if knee and not run.slo:
        notes.append(knee)
    notes += [f"{title(f.step)}: {warning}" for _, f in figures for warning in f.warnings]
    items = "".join(f"<li>{escape(note)}</li>" for note in dict.fromkeys(notes))
    return f'<ul class="notes">{items}</ul>' if items else ""


def _key_figures(figures: Figures) -> str:
    """The best of the run in a few large numbers."""
    cards: list[tuple[str, str, str]] = []
    loads = [f for _, f in figures if f.latencies]
    batches = [f for _, f in figures if f.batches]
    if loads:
        best = max(loads, key=lambda f: f.rates["output_tokens_per_second"])
        value = f"{best.rates['output_tokens_per_second']:.1f} tokens/s"
        cards.append(("Highest output", value, title(best.step)))
        for name in ("ttft", "itl"):
            having = [f for f in loads if name in f.latencies]
            if having:
                low = min(having, key=lambda f: f.latencies[name].p50)
                value = f"{low.latencies[name].p50:.1f} ms"
                cards.append((f"Lowest {METRICS[name].label} p50", value, title(low.step)))
        within = [f for f in loads if f.attainment is not None]
        if within:
            best = max(within, key=lambda f: f.rates["goodput"])
            share = f"{title(best.step)}, {best.attainment:.1%} within limits"
            cards.append(("Highest goodput", f"{best.rates['goodput']:.2f} requests/s", share))
    for name in ("prefill_throughput", "decode_throughput"):
        having = [f for f in batches if name in f.batches]
        if having:
            best = max(having, key=lambda f: f.batches[name].mean)
            value = f"{best.batches[name].mean:.1f} tokens/s"
            cards.append((f"Highest {METRICS[name].label.lower()}", value, title(best.step)))
    return (
        '<div class="cards">'
        + "".join(
            f"<div><span>{escape(a)}</span><b>{escape(b)}</b><span>{escape(c)}</span></div>"
            for a, b, c in cards
        )
        + "</div>"
        if cards
        else ""
    )


def _charts(found: Sequence[ReportChart]) -> str:
    if not found:
        return ""
    narrow = "".join(_figure(plot) for plot in found if not plot.wide)
    wide = "".join(
        f"<details{' open' if place == 0 else ''}><summary>{escape(plot.heading)}</summary>"
        f"{_figure(plot)}</details>"
        for place, plot in enumerate(plot for plot in found if plot.wide)
    )
    timelines = f"<h2>Timelines</h2>{wide}" if wide else ""
    return f'<h2>Charts</h2><div class="charts">{narrow}</div>{timelines}'


def _figure(plot: ReportChart) -> str:
    keys = "".join(
        f'<span><svg viewBox="0 0 10 10"><rect class="{colour}" width="10" height="10"/></svg>'
        f"{escape(meaning)}</span>"
        for colour, meaning in plot.keys
    )
    legend = f'<div class="keys">{keys}</div>' if keys else ""
    heading = "" if plot.wide else f"<h3>{escape(plot.heading)}</h3>"
    text = f"<p>{escape(plot.text)}</p>" if plot.text else ""
    return f"<figure>{heading}{plot.svg}<figcaption>{legend}{text}</figcaption></figure>"


def _percentiles(figures: Figures) -> str:
    rows = []
    for _, figure in figures:
        for name, summary in {**told(figure), **figure.batches}.items():
            if METRICS[name].unit != "ms":
                continue
            values = [("mean", summary.mean), *((cut, getattr(summary, cut)) for cut in _CUTS)]
            cells = [_interval_cell(summary, cut, value) for cut, value in values]
            rows.append(
                f"<tr><th>{escape(title(figure.step))}</th><td>{escape(METRICS[name].label)}</td>"
                f"<td>{summary.count}</td><td>{summary.minimum:.2f}</td>{''.join(cells)}"
                f"<td>{summary.maximum:.2f}</td></tr>"
            )
    if not rows:
        return ""
    heads = "".join(
        f"<th>{head}</th>"
        for head in (
            *("Load", "Latency, ms", "Values", "Lowest", "Mean", "p50", "p90"),
            *("p95", "p99", "p99.9", "Highest"),
        )
    )
    return (
        "<h2>Percentiles</h2><p>Small: 95 % bootstrap intervals.</p>"
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _interval_cell(summary: Summary, name: str, value: float) -> str:
    small = ""
    if name in summary.intervals:
        low, high = summary.intervals[name]
        small = f"<small>{low:.2f} – {high:.2f}</small>"
    return f"<td>{value:.2f}{small}</td>"


def _rates(figures: Figures) -> str:
    rows = []
    for record, figure in figures:
        found: list[tuple[str, float, tuple[float, float] | None]] = [
            (name, value, figure.rate_intervals.get(name)) for name, value in figure.rates.items()
        ]
        found += [
            (name, summary.mean, summary.intervals.get("mean"))
            for name, summary in figure.batches.items()
            if METRICS[name].unit != "ms"
        ]
        rows += [_rate_row(figure, *each) for each in found]
        if record.server:
            seen = ", ".join(f"{name} {value:.4g}" for name, value in record.server.items())
            rows.append(
                f"<tr><th>{escape(title(figure.step))}</th><td>the server's own</td>"
                f'<td colspan="2" class="text">{escape(seen)}</td></tr>'
            )
    if not rows:
        return ""
    return (
        '<h2>Throughput</h2><div class="scroll"><table><thead><tr><th>Load</th><th>Figure</th>'
        f"<th>Mean</th><th>95 % interval</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _rate_row(
    figure: StepMetrics, name: str, value: float, bounds: tuple[float, float] | None
) -> str:
    metric = METRICS[name]
    interval = f"{bounds[0]:.2f} – {bounds[1]:.2f}" if bounds else ""
    return (
        f"<tr><th>{escape(title(figure.step))}</th><td>{escape(metric.label)}, {metric.unit}</td>"
        f"<td>{value:.2f}</td><td>{interval}</td></tr>"
    )


def _errors(run: BenchRun) -> str:
    rows = []
    for record in run.steps:
        kinds: dict[str, list[str]] = {}
        for request in record.requests:
            if request.error is not None and not request.warmup:
                kinds.setdefault(request.error, []).append(request.detail)
        rows += [
            f"<tr><th>{escape(title(record.step))}</th><td>{escape(kind)}</td>"
            f'<td>{len(details)}</td><td class="text">{escape(details[0])}</td></tr>'
            for kind, details in kinds.items()
        ]
    if not rows:
        return ""
    return (
        '<h2>Errors</h2><div class="scroll"><table><thead><tr><th>Load</th><th>Kind</th>'
        "<th>Requests</th><th>The first one said</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _facts(run: BenchRun) -> str:
    limits = {name: f"{limit:g} ms" for name, limit in run.slo.items()}
    command = {"command": " ".join(run.command)} if run.command else {}
    started = {"started": " ".join(run.target.started_here)} if run.target.started_here else {}
    server = {"kind": run.target.kind, "address": run.target.address, **started, **run.target.info}
    parts = [
        _table("Workload", {**command, **run.workload}),
        _table("Limits", limits),
        _table("Server", server),
        _table("Machine of the client", run.machine),
    ]
    return f'<h2>What was measured</h2><div class="facts">{"".join(parts)}</div>'


def _table(heading: str, facts: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th>{escape(str(name))}</th><td class="text">{escape(_said(value))}</td></tr>'
        for name, value in facts.items()
        if value not in (None, "", [], {})
    )
    return f"<section><h3>{heading}</h3><table>{rows}</table></section>" if rows else ""


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_said(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_said(inner) for inner in value)
    return str(value)


def _meanings(figures: Figures) -> str:
    names = [
        name
        for name in METRICS
        if any(name in {**f.latencies, **f.rates, **f.batches} for _, f in figures)
    ]
    rows = "".join(
        f"<dt>{escape(METRICS[name].label)}, {METRICS[name].unit}</dt>"
        f"<dd>{escape(METRICS[name].meaning)}</dd>"
        for name in names
    )
    return f"<h2>What the figures mean</h2><dl>{rows}</dl>" if rows else ""
