"""Run the contestants and print the tables."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tests.benchmarks.peers.arguments import DEFAULT_MODELS, contestants, parser
from tests.benchmarks.peers.columns import LONG_NEW, NEW, Column, long_contexts, serving
from tests.benchmarks.peers.contestant import Contestant, Failure
from tests.benchmarks.peers.machine import description, read_bandwidth
from tests.benchmarks.peers.report import Report
from tests.benchmarks.peers.rounds import PREPARATION, Rules, Run, in_turn
from tests.benchmarks.peers.tgi import Tgi
from tests.tools.checkpoints import SHAPES, make_llama, write_tokenizer
from tests.tools.published_shapes import PUBLISHED, write_published

SHAPE_OF = {"small": "135m", "qwen06": "qwen3-0.6b"}
"""Shapes of :mod:`tests.tools.checkpoints`; other models are published ones."""


def vocabulary(model: str) -> int:
    """Return the number of a model's tokens."""
    shape = SHAPES[SHAPE_OF[model]] if model in SHAPE_OF else PUBLISHED[model].values
    return int(shape["vocab_size"])


def checkpoint(work: Path, model: str) -> Path:
    """Return a checkpoint of a model's shape in ``work``, created on first use."""
    path = work / model / "checkpoint"
    if not (path / "tokenizer.json").is_file():
        if model in SHAPE_OF:
            # Allow long contexts. Weights do not depend on the number of positions.
            shape = SHAPE_OF[model]
            positions = max(SHAPES[shape]["max_position_embeddings"], 16384)
            make_llama(path, dtype=torch.bfloat16, shape=shape, max_position_embeddings=positions)
        else:
            write_published(model, path)
        write_tokenizer(path, vocabulary(model))
    return path


def measure(
    model: str,
    entrants: list[Contestant],
    columns: list[Column],
    arguments: argparse.Namespace,
    console: Console,
) -> dict[str, Any]:
    """Measure one model, print its tables, and return the results to save."""
    path = checkpoint(arguments.work, model)
    logs = arguments.work / model / "logs"
    logs.mkdir(exist_ok=True)
    rules = Rules(
        rounds=arguments.rounds,
        foreign=arguments.foreign,
        retries=arguments.retries,
        timeout=arguments.timeout,
        vocabulary=vocabulary(model),
        skipped=frozenset(arguments.skip),
    )
    with Progress(
        TextColumn(f"{model} {{task.description}}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=1,  # it uses CPU time
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=None)
        run = Run(columns, rules, logs, console.print)
        loads: dict[str, Path] = {}
        weights: dict[str, int] = {}
        versions: dict[str, dict[str, str]] = {}
        for contestant in entrants:
            name = contestant.name
            progress.update(task, description=f"preparing {name}")
            try:
                versions[name] = contestant.versions()
                loads[name] = contestant.prepare(path, path.parent)
                weights[name] = contestant.weight_bytes(loads[name])
            except (Failure, OSError) as error:
                run.fail(contestant, PREPARATION, error)
        ready = [contestant for contestant in entrants if contestant.name in weights]
        progress.update(task, total=rules.rounds * len(ready))
        reads: list[tuple[float, float]] = []
        for number in range(rules.rounds):
            reads.append(read_bandwidth(arguments.tgi_python))
            for contestant in in_turn(ready, number):
                progress.update(task, description=f"round {number + 1}: {contestant.name}")
                run.visit(contestant, loads[contestant.name], number)
                progress.advance(task)
    bandwidth = max(rate for rate, _ in reads)
    transports = {contestant.name: contestant.transport for contestant in entrants}
    ours = [contestant.name for contestant in entrants if isinstance(contestant, Tgi)]
    report = Report(run.results, transports, ours, rules.foreign)
    print(f"\n### {model}\n")
    print(report.long(columns) if arguments.long else report.serving(columns))
    singles = [column for column in columns if column.concurrency == 1 and column.new > 1]
    if singles:
        print(f"\n{report.limit(weights, bandwidth, singles[0])}")
    if run.results.failures:
        print(f"\nFailed:\n\n{report.failures()}")
    return {
        "columns": [asdict(column) for column in columns],
        "results": asdict(run.results),
        "weight_bytes": weights,
        "read_bytes_per_second": reads,
        "versions": versions,
        "transports": transports,
    }


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop the contestants, too
    arguments = parser().parse_args()
    arguments.work = arguments.work.absolute()
    entrants = contestants(arguments)
    if arguments.long:
        columns = long_contexts(arguments.contexts, arguments.new or LONG_NEW)
    else:
        new = arguments.new or NEW
        columns = serving(arguments.concurrency, arguments.prefill, arguments.prompt, new)
    machine = description()
    saved: dict[str, Any] = {"machine": machine, "command": sys.argv[1:], "models": {}}
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for model in arguments.models or DEFAULT_MODELS:
        saved["models"][model] = measure(model, entrants, columns, arguments, console)
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(saved, indent=1))
    print(f"\nMachine: {', '.join(f'{key} {value}' for key, value in machine.items())}.")
    for model in saved["models"].values():
        reads = [
            f"{rate / 1e9:.1f} ({foreign:.2f})" for rate, foreign in model["read_bytes_per_second"]
        ]
        print(f"Read bandwidth of each round, GB/s (and foreign share): {', '.join(reads)}.")
    found = next(iter(saved["models"].values()))["versions"]
    for name, versions in found.items():
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in versions.items())}.")


if __name__ == "__main__":
    main()
