"""Reports a run as lines of text."""

from __future__ import annotations

from typing import TextIO

from tgi_cli.bench.events import Event, RunEnded, StepEnded, StepFailed, StepProgress, StepStarted
from tgi_cli.bench.statistics.metrics import StepMetrics, step_metrics

PATIENCE = 10.0
"""Seconds between lines of progress."""


class TextReporter:
    """Writes a line for each step, and for its progress if it takes long.

    Args:
        out: Usually stderr, since stdout is for data.
        slo: Limits by metric in ms, for the goodput of each step.
    """

    def __init__(self, out: TextIO, slo: dict[str, float] | None = None) -> None:
        self._out = out
        self._slo = slo or {}
        self._prefix = ""
        self._reported = 0.0

    def __call__(self, event: Event) -> None:
        match event:
            case StepStarted(index, total, step):
                number = f"{index + 1}/{total}" if total else f"{index + 1}"
                self._prefix, self._reported = f"[{number}] {step.title}", 0.0
            case StepProgress() if event.elapsed - self._reported >= PATIENCE:
                self._reported = event.elapsed
                self._print(f"{self._prefix}: {_progress(event)}")
            case StepFailed(_, cause, remedy):
                self._print(f"{self._prefix}: error: {cause}{f' ({remedy})' if remedy else ''}")
            case StepEnded(_, record):
                metrics = step_metrics(record, self._slo, intervals=False)
                self._print(f"{self._prefix}: {line(metrics)}")
                for warning in metrics.warnings:
                    self._print(f"{' ' * len(self._prefix)}  warning: {warning}")
            case RunEnded(run):
                for note in run.notes:
                    self._print(f"note: {note}")

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def line(metrics: StepMetrics) -> str:
    """The metrics of a step in a line; latencies as p50/p99."""
    if metrics.batches:
        return _batch_line(metrics)
    parts = []
    per_token = (("tpot", "TPOT"),) if metrics.bursty else ()
    for name, label in (("ttft", "TTFT"), ("itl", "ITL"), *per_token, ("e2e", "E2E")):
        summary = metrics.latencies.get(name)
        if name in metrics.unresolved:
            parts.append(f"{label} unresolved")
        elif summary is not None:
            parts.append(f"{label} {summary.p50:.1f}/{summary.p99:.1f} ms")
    parts.append(f"{metrics.rates.get('output_tokens_per_second', 0.0):.1f} tokens/s")
    parts.append(f"{metrics.rates.get('requests_per_second', 0.0):.2f} requests/s")
    if metrics.attainment is not None:
        parts.append(f"{metrics.attainment:.1%} within limits")
    if metrics.acceptance is not None:
        counts = metrics.drafts.items()
        by_source = ", ".join(f"{source} {drafts.share:.1%}" for source, drafts in counts)
        more = f" ({by_source})" if by_source else ""
        parts.append(f"{metrics.acceptance:.1%} of drafts accepted{more}")
    if metrics.failed:
        kinds = ", ".join(f"{count} {kind}" for kind, count in metrics.errors.items())
        parts.append(f"errors: {kinds}")
    return f"{metrics.succeeded} responses, {', '.join(parts)}"


def _batch_line(metrics: StepMetrics) -> str:
    parts = [f"prefill {metrics.batches['prefill'].p50:.2f} ms"]
    parts.append(f"{metrics.batches['prefill_throughput'].mean:.1f} tokens/s")
    if "decode_token" in metrics.batches:
        parts.append(f"decode {metrics.batches['decode_token'].p50:.2f} ms per token")
        parts.append(f"{metrics.batches['decode_throughput'].mean:.1f} tokens/s")
    return f"{metrics.runs} runs, {', '.join(parts)}"


def _progress(event: StepProgress) -> str:
    done = f"{event.done} of {event.expected}" if event.expected else f"{event.done}"
    text = f"{event.elapsed:.0f} s, {done} done, {event.in_flight} in flight"
    text += f", {event.tokens_per_second:.1f} tokens/s"
    return f"{text}, {event.errors} errors" if event.errors else text
