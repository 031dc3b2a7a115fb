"""Compare quantized and bfloat16 weights: decoding speed and memory.

    python -m tests.benchmarks.quantized [--shapes 135m qwen3-0.6b] [--rows 1 8 32] [--json FILE]

Creates checkpoints with random weights in the shapes of a 135M Llama and of Qwen3-0.6B once in
``--folder``: unquantized, in 4-bit GPTQ, and quantized on load. A worker decodes without engine,
wire and HTTP. All variants are loaded in one process and take turns, 20 steps at a time; figures
are medians over the rounds of the median step. Memory is that of all processes of ``tgi serve``
after one request, with shared pages counted once. Both shapes have tied embeddings, 28 of 135 and
156 of 596 million parameters. The output head is in bfloat16 unless the variant's name mentions it;
activations have the bits that ``tgi serve`` gives them by default, 8 in products with integers on
CPUs that can, unless it says 16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.peers.contestant import Setup
from tests.benchmarks.peers.machine import description
from tests.benchmarks.peers.process_memory import memory
from tests.benchmarks.peers.tgi import Tgi
from tests.benchmarks.step import decodes
from tests.tools.checkpoints import SHAPES, make_llama, write_tokenizer
from tgi_cli import kernels
from tgi_cli.config import ServeConfig
from tgi_cli.engine.step import Step
from tgi_cli.worker.factory import load_worker
from tgi_cli.worker.worker import ModelWorker


@dataclass(frozen=True, slots=True)
class Variant:
    """Weights, and the flags of ``tgi serve`` for them."""

    checkpoint: str = "{checkpoint}"
    quantize: str | None = None
    quantize_head_bits: int | None = None
    quantize_activations: bool | None = None
    """None: as served by default."""

    @property
    def flags(self) -> str:
        """The command line."""
        flags = [f"--quantize {self.quantize}"] if self.quantize else []
        if self.quantize_head_bits:
            flags.append(f"--quantize-head-bits {self.quantize_head_bits}")
        if self.quantize_activations is not None:
            prefix = "" if self.quantize_activations else "no-"
            flags.append(f"--{prefix}quantize-activations")
        return " ".join(flags)


VARIANTS = {
    "bf16": Variant(),
    "gptq, 4 bits": Variant("{gptq4}"),
    "gptq, 4 bits, 16-bit activations": Variant("{gptq4}", quantize_activations=False),
    "gptq, 4 bits, head of 8": Variant("{gptq4}", None, 8),
    "gptq, 4 bits, head of 4": Variant("{gptq4}", None, 4),
    "int8": Variant(quantize="int8"),
    "int8, 16-bit activations": Variant(quantize="int8", quantize_activations=False),
    "int8, head too": Variant("{checkpoint}", "int8", 8),
    "head of 8": Variant(quantize_head_bits=8),
    "nf4": Variant(quantize="bitsandbytes-nf4"),
    "fp8": Variant(quantize="fp8"),
}

BURST_STEPS = 20
WARMUP_STEPS = 4
"""Steps of a burst that are ignored, while the CPU caches hold another variant's weights."""


def checkpoint(shape: str, folder: Path) -> Path:
    """Return a checkpoint with random weights and a tokenizer, created on first use."""
    import torch

    path = folder / shape
    if not path.is_dir():
        part = path.with_suffix(".part")
        make_llama(part, shape=shape, dtype=torch.bfloat16)
        write_tokenizer(part, SHAPES[shape]["vocab_size"])
        part.rename(path)
    return path


class Decoder:
    """A worker that decodes batches of sequences with ``context`` tokens each."""

    def __init__(self, path: Path, variant: Variant, rows: list[int], context: int) -> None:
        serve = ServeConfig(
            model_id=str(path),
            quantize=variant.quantize,
            quantize_head_bits=variant.quantize_head_bits,
            quantize_activations=variant.quantize_activations,
            max_batch_total_tokens=max(rows) * (context + 128),
            num_shard=1,
        )
        worker, _ = load_worker(serve, path)
        assert isinstance(worker, ModelWorker)
        worker.warmup()
        self.worker = worker
        self.context = context

    def burst(self, rows: int) -> float:
        """Decode a burst of steps and return the median milliseconds of a step."""
        first, *steps = decodes(rows, self.context)
        self._run(first)
        taken = [self._run(step) for step in steps[:BURST_STEPS]]
        return statistics.median(taken[WARMUP_STEPS:])

    def _run(self, step: Step) -> float:
        began = time.perf_counter()
        self.worker.sample(self.worker.launch(step)).wait()
        return 1e3 * (time.perf_counter() - began)


def speeds(
    path: Path, folder: Path, rows: list[int], rounds: int, context: int
) -> dict[str, dict[int, float]]:
    """Return the milliseconds of a step, by variant and number of rows."""
    decoders = {}
    for name, variant in VARIANTS.items():
        found = Tgi(name, Path(sys.executable), variant.checkpoint).prepare(path, folder)
        decoders[name] = Decoder(found, variant, rows, context)
    taken: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in decoders}
    for _ in range(rounds):
        for count in rows:
            for name, decoder in decoders.items():
                taken[name][count].append(decoder.burst(count))
    return {
        name: {count: statistics.median(each) for count, each in by_rows.items()}
        for name, by_rows in taken.items()
    }


def served_memory(path: Path, folder: Path) -> dict[str, float]:
    """Return the MB of ``tgi serve`` and its processes after a request, by variant."""
    found = {}
    for name, variant in VARIANTS.items():
        contestant = Tgi(name, Path(sys.executable), variant.checkpoint, variant.flags)
        model = contestant.prepare(path, folder)
        with tempfile.TemporaryDirectory() as logs:
            setup = Setup(sequences=1, context=256, cached_tokens=256)
            running = contestant.start(model, setup, Path(logs) / "log")
            try:
                running.wave([list(range(300, 364))], 64, 300.0)
                found[name] = memory(running.process.pid).proportional
            finally:
                running.close()
    return found


def table(rows: list[int], steps: dict[str, dict[int, float]], memories: dict[str, float]) -> str:
    """Format tokens per second, their ratio to bfloat16's, and MB."""
    lines = [
        f"| weights | {' | '.join(f'{count} decoding' for count in rows)} | MB served |",
        "|---" * (len(rows) + 2) + "|",
    ]
    for name, by_rows in steps.items():
        cells = []
        for count in rows:
            ratio = steps["bf16"][count] / by_rows[count]
            cells.append(f"{1e3 * count / by_rows[count]:.0f} tok/s ({ratio:.2f}x)")
        size = f"{memories[name]:.0f}" if name in memories else "-"
        lines.append(f"| {name} | {' | '.join(cells)} | {size} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", choices=sorted(SHAPES), nargs="+", default=["135m", "qwen3-0.6b"]
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "quantized")
    parser.add_argument("--no-memory", action="store_true", help="skip the memory measurement")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    results: dict[str, object] = {"machine": description(), "threads": kernels.threads()}
    for shape in options.shapes:
        folder = options.folder / "made" / shape
        folder.mkdir(parents=True, exist_ok=True)
        path = checkpoint(shape, options.folder)
        memories = {} if options.no_memory else served_memory(path, folder)
        steps = speeds(path, folder, options.rows, options.rounds, options.context)
        print(f"\n{shape}, {kernels.threads()} threads, context {options.context}\n")
        print(table(options.rows, steps, memories), flush=True)
        results[shape] = {"step_ms": steps, "served_mb": memories}
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
