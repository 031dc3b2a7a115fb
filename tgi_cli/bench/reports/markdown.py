"""Tables of markdown, aligned so that they read well as they are."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tgi_cli.bench.compare import ANSWERED, ComparedMetric, Comparison
from tgi_cli.bench.events import BenchRun
from tgi_cli.bench.plan import explain_knee
from tgi_cli.bench.statistics.metrics import StepMetrics, step_metrics
from tgi_cli.bench.statistics.observations import METRICS, batch_values
from tgi_cli.bench.statistics.summary import Summary, summarize

_HANGING: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False}
UNRESOLVED = "unresolved"
"""Shown for a latency that the client could not resolve."""
BURSTS = "bursts"
"""Shown for an ITL whose median is 0, since tokens arrive together, as accepted drafts do."""


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    merge: bool = False,
    width: int | None = None,
    keys: int = 1,
) -> str:
    """Format a markdown table.

    Args:
        merge: Leave a cell empty if it equals the one above, as TGI's benchmark does.
        width: Columns of the terminal, or None for a file. A wider table is divided into several,
            below one another.
        keys: Number of first columns that each of these has.
    """
    shown = _merged(rows) if merge else [list(row) for row in rows]
    shown = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in shown]
    widths = [max(map(len, column)) for column in zip(header, *shown, strict=True)]
    parts = []
    for columns in _parts(widths, width, keys):
        chosen = [widths[column] for column in columns]
        lines = [_line([header[column] for column in columns], chosen)]
        lines.append("|" + "|".join("-" * (each + 2) for each in chosen) + "|")
        lines += [_line([row[column] for column in columns], chosen) for row in shown]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _parts(widths: Sequence[int], most: int | None, keys: int) -> list[list[int]]:
    """The columns of each table: all, or as many beside the keys as fit."""
    first = list(range(keys))
    parts: list[list[int]] = []
    left = 0
    for column in range(keys, len(widths)):
        if not parts or (most is not None and widths[column] + 3 > left):
            parts.append([*first])
            left = (most or 0) - 1 - sum(widths[key] + 3 for key in first)
        parts[-1].append(column)
        left -= widths[column] + 3
    return parts or [first]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "| " + " | ".join(padded) + " |"


def _merged(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    merged = []
    for number, row in enumerate(rows):
        above = rows[number - 1] if number else [None] * len(row)
        pairs = zip(row, above, strict=True)
        merged.append(["" if cell == upper else cell for cell, upper in pairs])
    return merged


_PARAMETERS = (
    *("sequence_length", "decode_length", "top_n_tokens", "runs", "warmups", "temperature"),
    *("top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "watermark"),
    "do_sample",
)
"""TGI's parameters in its order."""
_LABELS = {name: name.replace("_", " ").title() for name in _PARAMETERS} | {"runs": "N Runs"}
_OPTIONAL = {
    *("top_n_tokens", "temperature", "top_k", "top_p", "typical_p"),
    *("repetition_penalty", "frequency_penalty"),
}


def tgi_tables(run: BenchRun, width: int | None = None) -> str:
    """The tables of text-generation-benchmark: parameters, latency, throughput.

    The format is exactly TGI's (github.com/huggingface/text-generation-inference,
    benchmark/src/table.rs); percentiles are of sorted values, unlike some of TGI's.
    """
    workload = run.workload
    parameters = [["Model", str(workload.get("tokenizer_name") or run.target.model)]]
    parameters += [[label, _as_rust(name, workload.get(name))] for name, label in _LABELS.items()]
    steps = [record for record in run.steps if record.step.kind == "batch"]
    found = [(f"{record.step.value:g}", batch_values(record.batches)) for record in steps]
    latency, throughput = [], []
    for label, name in (
        ("Prefill", "prefill"),
        ("Decode (token)", "decode_token"),
        ("Decode (total)", "decode_total"),
    ):
        latency += [[label, size, *_six(summarize(v[name], intervals=False))] for size, v in found]
    for label, name in (("Prefill", "prefill_throughput"), ("Decode", "decode_throughput")):
        throughput += [
            [label, size, *_three(summarize(values[name], intervals=False), "tokens/secs")]
            for size, values in found
        ]
    extremes = ["Step", "Batch Size", "Average", "Lowest", "Highest"]
    return "\n\n".join(
        [
            table(["Parameter", "Value"], parameters),
            table([*extremes, "p50", "p90", "p99"], latency, merge=True, width=width, keys=2),
            table(extremes, throughput, merge=True, width=width, keys=2),
        ]
    )


def _as_rust(name: str, value: Any) -> str:
    """Format a value as TGI's table does: ``None``, ``Some(0.5)``, ``true``."""
    if name in _OPTIONAL:
        return "None" if value is None else f"Some({value})"
    return str(bool(value)).lower() if name in ("watermark", "do_sample") else str(value or 0)


def _three(summary: Summary | None, unit: str) -> list[str]:
    values = (summary.mean, summary.minimum, summary.maximum) if summary else [np.nan] * 3
    return [f"{value:.2f} {unit}" if summary else f"NaN {unit}" for value in values]


def _six(summary: Summary | None) -> list[str]:
    cuts = (summary.p50, summary.p90, summary.p99) if summary else [np.nan] * 3
    return [*_three(summary, "ms"), *(f"{cut:.2f} ms" if summary else "NaN ms" for cut in cuts)]


def markdown(run: BenchRun, width: int | None = None) -> str:
    """The whole run: TGI's tables of batches, tables of requests, and notes.

    Args:
        width: Columns of the terminal that it is for, or None for a file.
    """
    steps = [step_metrics(record, run.slo) for record in run.steps]
    parts = []
    if any(step.batches for step in steps):
        parts.append(tgi_tables(run, width))
    if loads := [step for step in steps if step.requests]:
        parts += [load_table(loads, width), percentile_table(loads, width)]
    if drafting := [step for step in steps if step.drafts]:
        parts.append(draft_table(drafting, width))
    if notes := notes_of(run, steps):
        parts.append("\n".join(_item(note, width) for note in notes))
    return "\n\n".join(parts) + "\n" if parts else "no step of the run has any metrics\n"


def _item(note: str, width: int | None) -> str:
    """An item of a list, wrapped to the width of the terminal."""
    return f"- {note}" if width is None else textwrap.fill(f"- {note}", width, **_HANGING)


def notes_of(run: BenchRun, steps: Sequence[StepMetrics]) -> list[str]:
    """The run's notes, its knee, and the warnings of its steps, without repeats."""
    clients = [step for step in steps if step.step.kind == "concurrency"]
    knee = explain_knee(sorted(clients, key=lambda step: step.step.value))
    notes = [*run.notes, knee if not run.slo else ""]
    notes += [f"{step.step.title}: {warning}" for step in steps for warning in step.warnings]
    return list(dict.fromkeys(note for note in notes if note))


def load_table(metrics: Sequence[StepMetrics], width: int | None = None) -> str:
    """A row per step: throughput and median latencies."""
    columns: list[tuple[str, Callable[[StepMetrics], str]]] = [
        ("Load", lambda step: step.step.title),
        ("Requests", lambda step: str(step.succeeded)),
        ("Errors", lambda step: _errors(step)),
        ("Requests/s", lambda step: _rate(step, "requests_per_second", 2)),
        ("Input tokens/s", lambda step: _rate(step, "input_tokens_per_second", 1)),
        ("Output tokens/s", lambda step: _rate(step, "output_tokens_per_second", 1)),
    ]
    if any(step.image_tokens for step in metrics):
        columns.insert(4, ("Image tokens", lambda step: _image_tokens(step)))
    if any(step.attainment is not None for step in metrics):
        columns.append(("Goodput/s", lambda step: _rate(step, "goodput", 2)))
        columns.append(("Within limits", lambda step: _share(step.attainment)))
    if any(step.acceptance is not None for step in metrics):
        columns.append(("Drafts accepted", lambda step: _share(step.acceptance)))
    if any(step.step.kind == "rate" for step in metrics):
        columns.append(("TTFT (scheduled)", lambda step: _middle(step, "ttft_scheduled")))
    for name in ("ttft", "itl", "tpot", "e2e"):
        label = METRICS[name].label
        columns.append((f"{label} p50", lambda step, name=name: _middle(step, name)))  # type: ignore[misc]
    rows = [[cell(step) for _, cell in columns] for step in metrics]
    return table([label for label, _ in columns], rows, width=width)


def draft_table(metrics: Sequence[StepMetrics], width: int | None = None) -> str:
    """A row per step and source of drafts: how many the server verified and accepted."""
    rows = [
        [step.step.title, source, *(f"{count:.0f}" for count in counts), _share(counts.share)]
        for step in metrics
        for source, counts in step.drafts.items()
    ]
    labels = ["Load", "Drafts from", "Verified", "Accepted", "Share"]
    return table(labels, rows, width=width, keys=2)


def percentile_table(metrics: Sequence[StepMetrics], width: int | None = None) -> str:
    """A row per step and latency: mean and percentiles in ms, with intervals if these fit."""
    whole = _percentile_table(metrics, None, intervals=True)
    if width is None or whole.index("\n") <= width:
        return whole
    return _percentile_table(metrics, width, intervals=False)


def _percentile_table(metrics: Sequence[StepMetrics], width: int | None, *, intervals: bool) -> str:
    def shown(summary: Summary, name: str) -> str:
        return _with_interval(summary, name) if intervals else f"{getattr(summary, name):.1f}"

    rows = []
    for step in metrics:
        for name, summary in distinct_latencies(step).items():
            rows.append(
                [
                    *(step.step.title, METRICS[name].label, str(summary.count)),
                    shown(summary, "mean"),
                    *(f"{getattr(summary, p):.1f}" for p in ("p50", "p90", "p95")),
                    shown(summary, "p99"),
                    *(f"{summary.p999:.1f}", f"{summary.maximum:.1f}"),
                ]
            )
        rows += [
            [step.step.title, METRICS[name].label, UNRESOLVED, *["-"] * 7]
            for name in unresolved_latencies(step)
        ]
    header = ["Load", "ms", "Values", "Mean", "p50", "p90", "p95", "p99", "p99.9", "Highest"]
    return table(header, rows, width=width, keys=2)


def distinct_latencies(step: StepMetrics) -> dict[str, Summary]:
    """The step's latencies, without those from schedule if nothing was late."""
    late = step.latencies.get("late")
    if late is not None and late.maximum > 0:
        return step.latencies
    return {
        name: summary
        for name, summary in step.latencies.items()
        if name != "late" and not name.endswith("scheduled")
    }


def unresolved_latencies(step: StepMetrics) -> list[str]:
    """The latencies that are not given, without those from schedule."""
    return [name for name in step.unresolved if not name.endswith("scheduled")]


def _with_interval(summary: Summary, name: str) -> str:
    value = f"{getattr(summary, name):.1f}"
    if name not in summary.intervals:
        return value
    low, high = summary.intervals[name]
    return f"{value} ({low:.1f} to {high:.1f})"


def _image_tokens(step: StepMetrics) -> str:
    """Image tokens of a request, on average."""
    return f"{step.image_tokens / step.succeeded:.0f}" if step.succeeded else "-"


def _errors(step: StepMetrics) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in step.errors.items()) or "0"


def _rate(step: StepMetrics, name: str, digits: int) -> str:
    return f"{step.rates[name]:.{digits}f}" if name in step.rates else "-"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _middle(step: StepMetrics, name: str) -> str:
    if name in step.unresolved:
        return UNRESOLVED
    if name == "itl" and step.together > 0.5:
        return BURSTS
    return f"{step.latencies[name].p50:.1f} ms" if name in step.latencies else "-"


def comparison(result: Comparison, width: int | None = None) -> str:
    """A comparison as markdown, after the differences between the runs.

    Args:
        width: Columns of the terminal that it is for, or None for a file.
    """
    parts = []
    if notes := result.notes + result.unmatched:
        parts.append("\n".join(_item(f"WARNING: {note}", width) for note in notes))
    if result.rows:
        rows = [_row(row) for row in result.rows]
        header = ["Load", "Metric", "First", "Second", "Change", "Interval", "Verdict"]
        parts.append(table(header, rows, width=width, keys=2))
    else:
        parts.append("the runs have no step in common")
    parts.append(verdict(result))
    return "\n\n".join(parts) + "\n"


def verdict(result: Comparison) -> str:
    """Summarize the comparison in a sentence."""
    counts = {name: sum(row.verdict == name for row in result.rows) for name in ("better", "worse")}
    text = f"{counts['better']} better, {counts['worse']} worse, of {len(result.rows)} metrics"
    failed = result.regressions
    if not failed:
        return f"no regression: {text}"
    worst = max(failed, key=lambda row: max(row.ratio, 1 / row.ratio if row.ratio else np.inf))
    return (
        f"REGRESSION: {text}; the largest: {figure_name(worst)} of {worst.step}, "
        f"{change(worst.ratio)}"
    )


def figure_name(row: ComparedMetric) -> str:
    """``TTFT p99``, ``Output tokens/s`` ..."""
    if row.metric == ANSWERED:
        return "Answered"
    metric = METRICS[row.metric]
    name = metric.label if metric.unit == "ms" else f"{metric.label} {metric.unit}"
    return name if row.statistic == "mean" else f"{name} {row.statistic}"


def _row(row: ComparedMetric) -> list[str]:
    unit = ".2%" if row.metric == ANSWERED else ".2f"
    text = {"same": "not significant", "better": "better", "worse": "WORSE"}[row.verdict]
    return [
        *(row.step, figure_name(row), f"{row.a:{unit}}", f"{row.b:{unit}}"),
        *(change(row.ratio), f"{change(row.low)} to {change(row.high)}", text),
    ]


def change(ratio: float) -> str:
    """Format a ratio as a change: +12.3%, x12, > x1000."""
    if ratio >= 1000:
        return "> x1000"
    return f"x{ratio:.0f}" if ratio >= 10 else f"{ratio - 1:+.1%}"
