"""What a quantization came to, and what a checkpoint holds: tables, plain lines or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from tgi_cli.models.checkpoint_report import CheckpointReport, WeightGroup
from tgi_cli.quantize.pipeline import QuantizeResult


def show_outcome(outcome: QuantizeResult, json_output: bool, address: str | None = None) -> None:
    """On stdout: tables on a terminal; else the folder, after lines of the evaluation if any."""
    if json_output:
        print(json.dumps(_outcome(outcome) | ({"url": address} if address else {})))
        return
    console = Console()
    if console.is_terminal:
        _loss_table(outcome, console)
    if outcome.evaluation is not None:
        if console.is_terminal:
            table = Table(title=f"on {outcome.evaluation.tokens} tokens of held-out text")
            table.add_column("")
            for column in ("original", "quantized"):
                table.add_column(column, justify="right")
            for row in outcome.evaluation.rows():
                table.add_row(*row)
            console.print(table)
        else:
            for what, before, after in outcome.evaluation.rows():
                print(f"{what}: {before} -> {after}")
    if console.is_terminal:
        console.print(
            f"{len(outcome.layers)} layers quantized, {len(outcome.ignored)} as they were; "
            f"{outcome.num_bytes / 2**20:.1f} MiB in {outcome.seconds:.0f} s",
            highlight=False,
        )
    print(address or outcome.path)


def show_inspection(name: str, report: CheckpointReport, json_output: bool) -> None:
    """On stdout: a table on a terminal, else lines."""
    if json_output:
        print(json.dumps(_report(name, report)))
        return
    console = Console()
    if not console.is_terminal:
        for line in report.lines():
            print(line)
        return
    size = f"{report.num_bytes / 2**20:.1f} MiB"
    table = Table(title=f"{name}: {report.architecture}, {report.method or 'plain'}, {size}")
    table.add_column("kept in")
    table.add_column("tensors", justify="right")
    table.add_column("MiB", justify="right")
    table.add_column("bits per number", justify="right")
    table.add_column(f"computed on {report.device} by")
    for kept in (*report.quantized, *report.plain):
        table.add_row(
            kept.how,
            str(len(kept.modules)),
            f"{kept.num_bytes / 2**20:.1f}",
            f"{_per_number(kept):.2f}",
            kept.kernel or "",
        )
    console.print(table)
    for module, how in report.exceptions.items():
        console.print(f"{module}: {how}", highlight=False)


def _loss_table(outcome: QuantizeResult, console: Console) -> None:
    """A row for each block, a column for each kind of layer."""
    cells: dict[str, dict[str, list[float]]] = {}
    for layer in outcome.layers:
        if math.isfinite(layer.loss):
            block, kind = _split(layer.name)
            cells.setdefault(block, {}).setdefault(kind, []).append(layer.loss)
    kinds = list(dict.fromkeys(kind for row in cells.values() for kind in row))
    if not kinds:
        return
    table = Table(title="squared error of outputs over their mean square")
    table.add_column("block", justify="right")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for block, row in cells.items():
        means = (sum(row[kind]) / len(row[kind]) if kind in row else None for kind in kinds)
        table.add_row(block, *("" if mean is None else f"{mean:.1e}" for mean in means))
    console.print(table)
    for layer in outcome.layers:
        if layer.note:
            console.print(f"{layer.name}: {layer.note}", highlight=False)


def _split(name: str) -> tuple[str, str]:
    """The number of the block, and the layer's name in it without the numbers of experts."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdigit()), -1)
    inner = [part for part in parts[at + 1 :] if not part.isdigit()]
    return parts[at] if at >= 0 else "", ".".join(inner[-2:]) if "experts" in inner else inner[-1]


def _outcome(outcome: QuantizeResult) -> dict[str, Any]:
    return {
        "path": str(outcome.path),
        "bytes": outcome.num_bytes,
        "seconds": round(outcome.seconds, 1),
        "calibration": outcome.source,
        "layers": [
            {
                "name": layer.name,
                "loss": layer.loss if math.isfinite(layer.loss) else None,
                "note": layer.note,
            }
            for layer in outcome.layers
        ],
        "ignored": list(outcome.ignored),
        "evaluation": None if outcome.evaluation is None else asdict(outcome.evaluation),
    }


def _report(name: str, report: CheckpointReport) -> dict[str, Any]:
    def ways(found: tuple[WeightGroup, ...]) -> Iterator[dict[str, Any]]:
        for kept in found:
            yield asdict(kept) | {"bits_per_number": round(_per_number(kept), 3)}

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


def _per_number(kept: WeightGroup) -> float:
    return 8 * kept.num_bytes / max(1, kept.parameters)
