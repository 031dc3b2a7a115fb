"""Saved runs: JSON (the whole run), JSON lines (events as they occur), CSV (for spreadsheets).

The JSON is an ``events.BenchRun``; docs/bench.md describes it. Readers support every version up to
their own.
"""

from __future__ import annotations

import contextlib
import csv
import os
import secrets
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import IO, Any

import msgspec

from tgi_cli.bench import events
from tgi_cli.bench.events import BenchRun, StepRecord
from tgi_cli.bench.statistics.metrics import step_metrics
from tgi_cli.bench.statistics.observations import (
    BATCH_METRICS,
    LATENCIES,
    MS,
    RATES,
    measured_seconds,
    tpot,
)
from tgi_cli.errors import ConfigError
from tgi_cli.files import WORKLOAD_BYTES, FileRefusedError, read_bytes

_UPGRADE = "open it with the tgi that wrote it, or a newer one"


class _RunVersion(msgspec.Struct):
    version: int


class RunStarted(msgspec.Struct, frozen=True, tag=True):
    """The first of the JSON lines: the run without its steps."""

    run: BenchRun


_Line = RunStarted | events.Event
_LINES: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Line)


def check_writable(*paths: Path | None) -> None:
    """Check before a run that its files can be written.

    Raises:
        ConfigError: A folder is missing or not writable.
    """
    for path in paths:
        if path is None:
            continue
        folder = path.absolute().parent
        if path.is_dir():
            raise ConfigError(f"{path} is a folder", "name a file")
        if not folder.is_dir():
            raise ConfigError(f"the folder {folder} does not exist", f"mkdir -p {folder}")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(f"{path} is not writable", "name another file")


def write(path: Path, content: str | bytes) -> None:
    """Write a file atomically. Raises ConfigError."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def save(run: BenchRun, path: Path) -> None:
    """Write a run as JSON, atomically. Raises ConfigError."""
    write(path, msgspec.json.encode(_plain(run)))


def load(path: Path) -> BenchRun:
    """Read a saved run: JSON, or the JSON lines of a run that may not have ended.

    Raises:
        ConfigError: The file cannot be read, is not a saved run, or has a newer version.
    """
    try:
        data = read_bytes(path, WORKLOAD_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except FileRefusedError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        if data.startswith(b'{"type":'):
            return _from_lines(data, path)
        _check_version(data, path)
        return msgspec.json.decode(data, type=BenchRun)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a saved run: {error}", "give what `tgi bench --output` wrote"
        ) from error


def _check_version(data: bytes, path: Path) -> None:
    version = msgspec.json.decode(data, type=_RunVersion).version
    if version > events.VERSION:
        raise ConfigError(
            f"{path} is of version {version} of saved runs; this tgi reads up to {events.VERSION}",
            _UPGRADE,
        )


def _plain(run: BenchRun) -> dict[str, Any]:
    """The run as it is written, with its version, which omit_defaults would omit."""
    return {"version": run.version, **msgspec.to_builtins(run)}


class EventLog:
    """Writes a run's events as JSON lines as they occur, without progress.

    The record of a step has neither requests nor batches, since they have lines of their own.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")

    def __call__(self, event: RunStarted | events.Event) -> None:
        if isinstance(event, events.StepProgress):
            return
        if isinstance(event, events.StepEnded):
            bare = msgspec.structs.replace(event.record, requests=[], batches=[])
            event = events.StepEnded(event.index, bare)
        elif isinstance(event, events.RunEnded):
            event = events.RunEnded(msgspec.structs.replace(event.run, steps=[]))
        value: Any = event
        if isinstance(event, RunStarted | events.RunEnded):
            value = {"type": type(event).__name__, "run": _plain(event.run)}
        self._file.write(msgspec.json.encode(value) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _from_lines(data: bytes, path: Path) -> BenchRun:
    """Restore a run from its events, with steps that did not end."""
    whole = data[: data.rfind(b"\n") + 1].splitlines()  # the last line may be incomplete
    started = msgspec.json.decode(whole[0], type=dict[str, Any]) if whole else {}
    _check_version(msgspec.json.encode(started.get("run", {})), path)
    run: BenchRun | None = None
    ended, over = False, set()
    steps: dict[int, StepRecord] = {}
    for line in whole:
        match _LINES.decode(line):
            case RunStarted(run):
                pass
            case events.StepStarted(index, _, step):
                steps[index] = StepRecord(step=step, began=0.0, duration=0.0)
            case events.RequestDone(index, request):
                steps[index].requests.append(request)
            case events.BatchDone(index, batch):
                steps[index].batches.append(batch)
            case events.StepEnded(index, record):
                over.add(index)
                requests = sorted(steps[index].requests, key=lambda request: request.index)
                batches = steps[index].batches
                steps[index] = msgspec.structs.replace(record, requests=requests, batches=batches)
            case events.RunEnded(run):
                ended = True
    if run is None:
        raise msgspec.ValidationError("it lacks its first line")
    for index in steps.keys() - over:
        steps[index] = cut_short(steps[index], "the run did not end")
    notes = run.notes if ended else [*run.notes, "the run did not end; this is what it had written"]
    return msgspec.structs.replace(
        run, steps=[steps[index] for index in sorted(steps)], notes=notes
    )


def cut_short(record: StepRecord, why: str) -> StepRecord:
    """The record of a step that ended early."""
    return msgspec.structs.replace(record, duration=measured_seconds(record.requests), stopped=why)


STATISTICS = ("count", "mean", "minimum", "maximum", "p50", "p90", "p95", "p99", "p999")


def csv_paths(path: Path) -> tuple[Path, Path]:
    """The files of the steps, and of the requests or runs of batches."""
    return path, path.with_name(f"{path.stem}-requests{path.suffix or '.csv'}")


def save_csv(run: BenchRun, path: Path) -> None:
    """Write a row per step, and in a second file (``csv_paths``) a row per request."""
    for file, rows in zip(csv_paths(path), (step_rows(run), request_rows(run)), strict=True):
        out = StringIO()
        table = csv.writer(out, lineterminator="\n")
        table.writerows(rows)
        write(file, out.getvalue())


def step_rows(run: BenchRun) -> Iterable[list[Any]]:
    """The header, then a row of metrics per step; empty if a step lacks the metric."""
    summaries = [
        (name, statistic) for name in (*LATENCIES, *BATCH_METRICS) for statistic in STATISTICS
    ]
    yield [
        *("kind", "value", "label", "duration_s", "requests", "succeeded", "failed", "batch_runs"),
        *("input_tokens", "output_tokens", "image_tokens", "concurrency", "attainment"),
        *RATES,
        *(_column(name, statistic) for name, statistic in summaries),
    ]
    for record in run.steps:
        metrics = step_metrics(record, run.slo, intervals=False)
        found = {**metrics.latencies, **metrics.batches}
        yield [
            *(record.step.kind, record.step.value, record.step.label, record.duration),
            *(metrics.requests, metrics.succeeded, metrics.failed, metrics.runs),
            *(metrics.input_tokens, metrics.output_tokens, metrics.image_tokens),
            *(metrics.concurrency, metrics.attainment),
            *(metrics.rates.get(name) for name in RATES),
            *(
                getattr(found[name], statistic) if name in found else None
                for name, statistic in summaries
            ),
        ]


def _column(name: str, statistic: str) -> str:
    unit = "" if statistic == "count" or name.endswith("throughput") else "_ms"
    return f"{name}_{statistic}{unit}"


def request_rows(run: BenchRun) -> Iterable[list[Any]]:
    """The header, then a row per request, or per run of a batch."""
    if any(record.batches for record in run.steps):
        yield ["batch_size", "warmup", "prefill_ms", "decode_ms_each"]
        for record in run.steps:
            for batch in record.batches:
                decodes = " ".join(f"{seconds * MS:.3f}" for seconds in batch.decodes)
                yield [batch.batch_size, batch.warmup, batch.prefill * MS, decodes]
        return
    yield [
        *("kind", "value", "index", "warmup", "scheduled_s", "dispatched_s", "finished_s"),
        *("ttft_ms", "tpot_ms", "input_tokens", "output_tokens", "image_tokens", "counted_by"),
        *("finish_reason", "error", "detail"),
    ]
    for record in run.steps:
        for request in record.requests:
            first = request.arrivals[0] - request.dispatched if request.arrivals else None
            per_token = tpot(request)
            yield [
                *(record.step.kind, record.step.value, request.index, request.warmup),
                *(request.scheduled, request.dispatched, request.finished),
                None if first is None else first * MS,
                None if per_token is None else per_token * MS,
                *(request.input_tokens, request.output_tokens, request.image_tokens),
                request.counted_by,
                *(request.finish_reason, request.error, request.detail),
            ]
