"""The run as lines of text: one when a step begins to take long, one when it is over."""

from __future__ import annotations

from typing import TextIO

from tgi_cli.bench.events import (
    Event,
    RunEnded,
    StepEnded,
    StepFailed,
    StepProgress,
    StepStarted,
)
from tgi_cli.bench.statistics.metrics import StepMetrics, step_metrics

PATIENCE = 10.0
"""Seconds between two lines of a step's progress."""


class TextReporter:
    """Follows a run's events and writes lines; for stderr, so that stdout stays for data.

    Args:
        slo: limits by metric in ms, for the goodput of each step.
    """

    def __init__(self, out: TextIO, slo: dict[str, float] | None = None) -> None:
        self._out = out
        self._slo = slo or {}
        self._place = ""
        self._told = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepStarted):
            place = f"{event.index + 1}/{event.total}" if event.total else f"{event.index + 1}"
            self._place = f"[{place}] {event.step.title}"
            self._told = 0.0
        elif isinstance(event, StepProgress):
            if event.elapsed - self._told >= PATIENCE:
                self._told = event.elapsed
                self._say(f"{self._place}: {_progress(event)}")
        elif isinstance(event, StepFailed):
            remedy = f" ({event.remedy})" if event.remedy else ""
            self._say(f"{self._place}: error: {event.cause}{remedy}")
        elif isinstance(event, StepEnded):
            figures = step_metrics(event.record, self._slo, intervals=False)
            self._say(f"{self._place}: {line(figures)}")
            for warning in figures.warnings:
                self._say(f"{' ' * len(self._place)}  warning: {warning}")
        elif isinstance(event, RunEnded):
            for note in event.run.notes:
                self._say(f"note: {note}")

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def line(figures: StepMetrics) -> str:
    """One step's figures in a line: what was done, how fast, how long one waited (p50, p99)."""
    if figures.batches:
        return _batch_line(figures)
    parts = []
    for name, label in (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "E2E")):
        summary = figures.latencies.get(name)
        if summary is not None:
            parts.append(f"{label} {summary.p50:.1f}/{summary.p99:.1f} ms")
    parts.append(f"{figures.rates.get('output_tokens_per_second', 0.0):.1f} tokens/s")
    parts.append(f"{figures.rates.get('requests_per_second', 0.0):.2f} requests/s")
    if figures.attainment is not None:
        parts.append(f"{figures.attainment:.1%} within limits")
    if figures.failed:
        kinds = ", ".join(f"{count} {kind}" for kind, count in figures.errors.items())
        parts.append(f"errors: {kinds}")
    return f"{figures.succeeded} answers, {', '.join(parts)}"


def _batch_line(figures: StepMetrics) -> str:
    parts = [f"prefill {figures.batches['prefill'].p50:.2f} ms"]
    parts.append(f"{figures.batches['prefill_throughput'].mean:.1f} tokens/s")
    if "decode_token" in figures.batches:
        parts.append(f"decode {figures.batches['decode_token'].p50:.2f} ms a token")
        parts.append(f"{figures.batches['decode_throughput'].mean:.1f} tokens/s")
    return f"{figures.runs} runs, {', '.join(parts)}"


def _progress(event: StepProgress) -> str:
    done = f"{event.done} of {event.expected}" if event.expected else f"{event.done}"
    text = f"{event.elapsed:.0f} s, {done} done, {event.in_flight} in flight"
    text += f", {event.tokens_per_second:.1f} tokens/s"
    return f"{text}, {event.errors} errors" if event.errors else text
