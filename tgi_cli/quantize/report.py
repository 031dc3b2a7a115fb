"""Reports of quantizations and inspections: tables, plain lines or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from tgi_cli.models.checkpoint_report import CheckpointReport, WeightGroup
from tgi_cli.quantize.pipeline import QuantizeResult


def show_result(result: QuantizeResult, json_output: bool, address: str | None = None) -> None:
    """Print tables on a terminal, else the evaluation and the folder as lines."""
    if json_output:
        print(json.dumps(_result_json(result) | ({"url": address} if address else {})))
        return
    console = Console()
    if console.is_terminal:
        _loss_table(result, console)
    if result.evaluation is not None:
        if console.is_terminal:
            title = f"on {result.evaluation.tokens} tokens of held-out text"
            rows = result.evaluation.rows()
            console.print(_table(title, ["", "original", "quantized"], rows))
        else:
            for what, before, after in result.evaluation.rows():
                print(f"{what}: {before} -> {after}")
    if console.is_terminal:
        console.print(
            f"{len(result.layers)} layers quantized, {len(result.ignored)} unchanged; "
            f"{result.num_bytes / 2**20:.1f} MiB in {result.seconds:.0f} s",
            highlight=False,
        )
    print(address or result.path)


def show_inspection(name: str, report: CheckpointReport, json_output: bool) -> None:
    """Print a table on a terminal, else lines."""
    if json_output:
        print(json.dumps(_report_json(name, report)))
        return
    console = Console()
    if not console.is_terminal:
        for line in report.lines():
            print(line)
        return
    size = f"{report.num_bytes / 2**20:.1f} MiB"
    title = f"{name}: {report.architecture}, {report.method or 'plain'}, {size}"
    columns = ["format", "tensors", "MiB", "bits per number", f"kernel on {report.device}"]
    rows = [
        (
            group.how,
            str(len(group.modules)),
            f"{group.num_bytes / 2**20:.1f}",
            f"{_per_number(group):.2f}",
            group.kernel or "",
        )
        for group in (*report.quantized, *report.plain)
    ]
    console.print(_table(title, columns, rows))
    for module, how in report.exceptions.items():
        console.print(f"{module}: {how}", highlight=False)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of names in the first column, and numbers in the others."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _loss_table(result: QuantizeResult, console: Console) -> None:
    """Print a row per block, with a column per kind of layer."""
    cells: dict[str, dict[str, list[float]]] = {}
    for layer in result.layers:
        if math.isfinite(layer.loss):
            block, kind = _split(layer.name)
            cells.setdefault(block, {}).setdefault(kind, []).append(layer.loss)
    kinds = list(dict.fromkeys(kind for row in cells.values() for kind in row))
    if not kinds:
        return
    rows = [
        (block, *(f"{fmean(row[kind]):.1e}" if kind in row else "" for kind in kinds))
        for block, row in cells.items()
    ]
    title = "squared error of outputs, relative to their mean square"
    console.print(_table(title, ["block", *kinds], rows))
    for layer in result.layers:
        if layer.note:
            console.print(f"{layer.name}: {layer.note}", highlight=False)


def _split(name: str) -> tuple[str, str]:
    """The block's number, and the layer's name inside it without expert numbers."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdigit()), -1)
    inner = [part for part in parts[at + 1 :] if not part.isdigit()]
    return parts[at] if at >= 0 else "", ".".join(inner[-2:]) if "experts" in inner else inner[-1]


def _result_json(result: QuantizeResult) -> dict[str, Any]:
    return {
        "path": str(result.path),
        "bytes": result.num_bytes,
        "seconds": round(result.seconds, 1),
        "calibration": result.source,
        "layers": [
            asdict(layer) | {"loss": layer.loss if math.isfinite(layer.loss) else None}
            for layer in result.layers
        ],
        "ignored": list(result.ignored),
        "evaluation": None if result.evaluation is None else asdict(result.evaluation),
    }


def _report_json(name: str, report: CheckpointReport) -> dict[str, Any]:
    def ways(found: tuple[WeightGroup, ...]) -> Iterator[dict[str, Any]]:
        for group in found:
            yield asdict(group) | {"bits_per_number": round(_per_number(group), 3)}

    return {
        "model": name,
        "architecture": report.architecture,
        "method": report.method,
        "bytes": report.num_bytes,
        "device": report.device,
        "quantized": list(ways(report.quantized)),
        "plain": list(ways(report.plain)),
        "exceptions": report.exceptions,
    }


def _per_number(group: WeightGroup) -> float:
    return 8 * group.num_bytes / max(1, group.parameters)
