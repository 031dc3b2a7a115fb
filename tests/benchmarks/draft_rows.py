"""What verifying drafts costs: a step of one sequence by its rows, for each kind of weights.

    python -m tests.benchmarks.draft_rows [--shapes 135m qwen3-0.6b] [--rows 1 2 3 ... 12]
        [--kinds bf16 "int8 a8" "int8 a16" ...] [--rounds 5] [--json FILE]

Creates checkpoints with random weights in the shapes of a 135M Llama and of Qwen3-0.6B once in
``--folder``. All kinds of a shape are loaded in one process and take turns, a burst of steps at a
time, so that other load on the machine affects them alike. Figures are medians over the rounds of
the median step of a burst: a row is the sequence's last token, the others are drafts behind it that
are rejected, at a context of ``--context`` tokens. ``a8`` has activations of 8 bits, the default of
``tgi serve`` with these weights, ``a16`` of 16 (``--no-quantize-activations``). ``head 8`` has an
output head of 8 bits; other heads have 16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tests.benchmarks.peers.machine import description
from tests.benchmarks.peers.tgi import Tgi
from tests.benchmarks.quantized import Variant, checkpoint
from tests.benchmarks.step import read_rate, verifications
from tests.tools.checkpoints import SHAPES
from tgi_cli import kernels
from tgi_cli.config import ServeConfig
from tgi_cli.engine.step import Step
from tgi_cli.worker.factory import load_worker
from tgi_cli.worker.worker import ModelWorker

KINDS = {
    "bf16": Variant(),
    "int8 a8": Variant(quantize="int8", quantize_activations=True),
    "int8 a16": Variant(quantize="int8", quantize_activations=False),
    "int4 a8": Variant("{gptq4}", quantize_activations=True),
    "int4 a16": Variant("{gptq4}", quantize_activations=False),
    "int4 a8 head 8": Variant("{gptq4}", quantize_head_bits=8, quantize_activations=True),
    "int4 a16 head 8": Variant("{gptq4}", quantize_head_bits=8, quantize_activations=False),
}
ROWS = tuple(range(1, 13))
FEW = 8
"""Rows whose cost is related to one row's in the last column."""
BURST_STEPS = 15
WARMUP_STEPS = 3
"""Steps of a burst that are ignored, while the CPU caches hold other weights."""


class Verifier:
    """A worker that verifies drafts behind one sequence."""

    def __init__(self, path: Path, kind: Variant, rows: list[int], context: int) -> None:
        serve = ServeConfig(
            model_id=str(path),
            quantize=kind.quantize,
            quantize_head_bits=kind.quantize_head_bits,
            quantize_activations=kind.quantize_activations,
            max_batch_total_tokens=4 * (context + max(rows) + 64),
            speculate=0,
            num_shard=1,
        )
        worker, _ = load_worker(serve, path)
        assert isinstance(worker, ModelWorker)
        worker.warmup()
        self._worker = worker
        self._context = context
        self._run(verifications(max(rows), context)[0])

    def burst(self, rows: int) -> float:
        """Milliseconds of the median step of a burst."""
        steps = verifications(rows - 1, self._context)[1:]
        taken = [self._run(step) for step in steps[:BURST_STEPS]]
        return statistics.median(taken[WARMUP_STEPS:])

    def _run(self, step: Step) -> float:
        began = time.perf_counter()
        self._worker.sample(self._worker.launch(step)).wait()
        return 1e3 * (time.perf_counter() - began)


def measure(shape: str, options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Milliseconds of a step, by kind and number of rows."""
    folder = options.folder / "made" / shape
    folder.mkdir(parents=True, exist_ok=True)
    path = checkpoint(shape, options.folder)
    verifiers = {}
    for name in options.kinds:
        kind = KINDS[name]
        found = Tgi(name, Path(sys.executable), kind.checkpoint).prepare(path, folder)
        verifiers[name] = Verifier(found, kind, options.rows, options.context)
    taken: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in verifiers}
    for _ in range(options.rounds):
        for rows in options.rows:
            for name, verifier in verifiers.items():
                taken[name][rows].append(verifier.burst(rows))
    return {
        name: {rows: statistics.median(each) for rows, each in by_rows.items()}
        for name, by_rows in taken.items()
    }


def print_table(shape: str, found: dict[str, dict[int, float]], rows: list[int]) -> None:
    """Print milliseconds, and beside them the multiples of one row."""
    print(f"\n{shape}, {kernels.threads()} threads, ms of a step (times the first)\n")
    last = f" {FEW} rows over 1 |" if {1, FEW} <= set(rows) else ""
    print(f"| weights | {' | '.join(map(str, rows))} |{last}")
    print("|---" * (1 + len(rows) + bool(last)) + "|")
    for name, by_rows in found.items():
        first = by_rows[rows[0]]
        cells = [f"{by_rows[count]:.2f} ({by_rows[count] / first:.2f})" for count in rows]
        end = f" {by_rows[FEW] / by_rows[1]:.2f} |" if last else ""
        print(f"| {name} | {' | '.join(cells)} |{end}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = ["135m", "qwen3-0.6b"]
    parser.add_argument("--shapes", choices=sorted(SHAPES), nargs="+", default=shapes)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "quantized")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, object] = {"machine": description(), "read_gb_s": read_rate() / 1e9}
    print(f"{description()}\nall cores read {results['read_gb_s']:.1f} GB/s", flush=True)
    for shape in options.shapes:
        found = measure(shape, options)
        print_table(shape, found, options.rows)
        results[shape] = found
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
