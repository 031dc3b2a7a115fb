"""Measure the overhead of LoRA adapters in a decode step.

    python -m tests.tools.checkpoints --shape 135m /tmp/model
    python -m tests.benchmarks.lora /tmp/model

Decode steps of several rows, with 0, 1, 2 or 4 adapters of one rank on all linear layers assigned
to them in turn. The variants alternate for ``--rounds`` rounds. Prints the median and minimum time
of a step in milliseconds; "no slots" is a worker without adapter slots.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from tests.tools.lora_adapters import make_adapter
from tgi_cli.config import ServeConfig
from tgi_cli.engine.step import NewRow, Step, Worker
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.factory import load_worker

CONTEXT = 64
GREEDY = SamplingParams(temperature=0.0)


class Rows:
    """Rows of a worker that decode in one batch."""

    def __init__(self, worker: Worker, count: int, adapters: int) -> None:
        self._worker = worker
        self._count = count
        self._end = CONTEXT
        step = Step(0)
        per_row = 2 * CONTEXT // 16
        for row in range(count):
            slot = row % adapters if adapters else -1
            blocks = list(range(row * per_row, (row + 1) * per_row))
            tokens = [3 + row] * CONTEXT
            step.new.append(NewRow(row, row, tokens, CONTEXT, blocks, GREEDY, adapter_slot=slot))
        step.rows, step.starts = list(range(count)), [0] * count
        step.counts, step.samples = [CONTEXT] * count, [True] * count
        worker.sample(worker.launch(step)).wait()

    def step(self) -> float:
        """Decode one more token of each row and return the milliseconds."""
        count = self._count
        rows, ones = list(range(count)), [1] * count
        step = Step(
            1,
            rows=rows,
            starts=[self._end] * count,
            counts=ones,
            samples=[True] * count,
            num_decodes=count,
        )
        self._end += 1
        began = time.perf_counter()
        self._worker.sample(self._worker.launch(step)).wait()
        return (time.perf_counter() - began) * 1e3


def load(model: Path, slots: int, rank: int) -> Worker:
    serve = ServeConfig(
        model_id="m",
        max_total_tokens=4 * CONTEXT,
        max_batch_size=32,
        max_batch_total_tokens=64 * 4 * CONTEXT,
        max_batch_prefill_tokens=32 * CONTEXT,
        max_loras=slots,
        max_lora_rank=rank,
    )
    worker, _ = load_worker(serve, model)
    worker.warmup()
    return worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32])
    arguments = parser.parse_args()
    plain = load(arguments.model, 0, arguments.rank)
    adapted = load(arguments.model, arguments.slots, arguments.rank)
    with tempfile.TemporaryDirectory() as folder:
        for slot in range(arguments.slots):
            path = Path(folder, str(slot))
            make_adapter(arguments.model, path, rank=arguments.rank, seed=slot)
            began = time.perf_counter()
            adapted.prepare_adapter(slot + 1, str(slot), str(path)).result()
            read = time.perf_counter() - began
            began = time.perf_counter()
            step = Step(0, adapters=[(slot, slot + 1)], rows=[0], starts=[0], counts=[1])
            step.new.append(NewRow(0, 0, [1], 1, [0], GREEDY))
            step.samples = [True]
            adapted.sample(adapted.launch(step)).wait()
            first = time.perf_counter() - began
            print(f"adapter {slot}: read in {read * 1e3:.0f} ms, step {first * 1e3:.0f} ms")
    counts = [count for count in (0, 1, 2, 4) if count <= arguments.slots]
    for rows in arguments.rows:
        times: dict[str, list[float]] = {}
        for _ in range(arguments.rounds):
            variants = {"no slots": (plain, 0)} | {
                f"{count} adapters": (adapted, count) for count in counts if count <= rows
            }
            for name, (worker, count) in variants.items():
                running = Rows(worker, rows, count)
                times.setdefault(name, []).extend(running.step() for _ in range(CONTEXT // 2))
        for name, found in times.items():
            print(f"{rows:3} rows, {name:11} {statistics.median(found):8.2f} {min(found):8.2f}")


if __name__ == "__main__":
    main()
