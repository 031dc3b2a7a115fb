"""Break down the time of a step on a CPU by operation.

    python -m tests.benchmarks.step CHECKPOINT [--rows 1 32] [--drafts 0 1 3 7] [--context 192]
        [--prompt 512] [--quantize int8] [--quantize-head] [--no-quantize-activations]

Runs a worker as a server does, without engine, wire and HTTP: decodes of ``--rows`` sequences with
``--context`` tokens each, one sequence that verifies ``--drafts`` draft tokens (one step of each
number in turn), then a prompt. Figures are medians over the steps. ``host`` is the time outside the
layers' operations and the head: inputs, embeddings, rotary angles, sampler, result. ``times``
relates steps with drafts to those with the first number of drafts. The lower bound of a step with
one sequence is the time to read all weights at the memory bandwidth of all cores, measured in the
same process.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tgi_cli import kernels
from tgi_cli.config import ServeConfig
from tgi_cli.engine.step import FRESH, NO_EXTRAS, NewRow, Step, TokenAppend
from tgi_cli.kernels.memory import allocate
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.factory import load_worker
from tgi_cli.worker.worker import ModelWorker

STEPS = 60
WARMUP_STEPS = 10
"""Steps at the beginning that are ignored."""
BLOCK = 16


def read_rate() -> float:
    """Return the memory read bandwidth in bytes per second, the best of several attempts."""
    memory = allocate(512 << 20).view(torch.float32).fill_(1.0)
    before, best = torch.get_num_threads(), 0.0
    torch.set_num_threads(kernels.threads())
    for _ in range(12):
        began = time.perf_counter()
        memory.sum()
        best = max(best, memory.nbytes / (time.perf_counter() - began))
    torch.set_num_threads(before)
    return best


class Profile:
    """Runs steps of a worker and records the time of each part."""

    def __init__(self, worker: ModelWorker) -> None:
        model: Any = worker.model
        compiled: Any = worker.runner.program
        if compiled is None:
            raise SystemExit("this model is not compiled to one program")
        program = compiled.program
        self.worker = worker
        self.labels = [label.rpartition(".")[2] for label in program.labels]
        self.seconds = (ctypes.c_double * len(self.labels))()
        program.run = partial(program.run, seconds=self.seconds)
        self.head = 0.0
        self._logits = model.logits
        model.logits = self._timed_head

    def _timed_head(self, hidden: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        logits: torch.Tensor = self._logits(hidden)
        self.head += time.perf_counter() - began
        return logits

    def run(self, step: Step) -> dict[str, float]:
        """Run a step; return the milliseconds of each part, and of ``all``."""
        if self.worker.model.state_specs:  # a slot for each row
            slots = zip(step.rows, step.starts, strict=True)
            step.state_in = [row if start else FRESH for row, start in slots]
            step.state_out = list(step.rows)
        ctypes.memset(self.seconds, 0, ctypes.sizeof(self.seconds))
        self.head = 0.0
        began = time.perf_counter()
        self.worker.sample(self.worker.launch(step)).wait()
        whole = time.perf_counter() - began
        parts: dict[str, float] = defaultdict(float)
        for label, seconds in zip(self.labels, self.seconds, strict=True):
            parts["norms" if label.endswith("norm") else label] += seconds
        parts["head"] = self.head
        parts["host"] = whole - sum(parts.values())
        parts["all"] = whole
        return {name: 1e3 * seconds for name, seconds in parts.items()}

    def median(self, steps: list[Step]) -> dict[str, float]:
        """Run steps; return the median of each part, without the warm-up steps."""
        return self.alternating({"": steps})[""]

    def alternating(self, columns: dict[str, list[Step]]) -> dict[str, dict[str, float]]:
        """Run a step of each column in turn; return the median of each part by column."""
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in columns}
        for steps in zip(*columns.values(), strict=True):
            for name, step in zip(columns, steps, strict=True):
                taken[name].append(self.run(step))
        medians = {}
        for name, each in taken.items():
            counted = each[min(WARMUP_STEPS, len(each) // 3) :]
            parts = counted[0]
            medians[name] = {
                part: statistics.median(one[part] for one in counted) for part in parts
            }
        return medians


def decodes(rows: int, context: int) -> list[Step]:
    """Return a step that computes ``context`` tokens per row, then decode steps."""
    blocks = -(-(context + STEPS) // BLOCK)
    first = Step(0)
    for row in range(rows):
        ids = list(range(row * blocks, (row + 1) * blocks))
        _prompt(first, row, context, ids)
    steps = [first]
    for number in range(STEPS):
        step = Step(number + 1, num_decodes=rows)
        step.rows.extend(range(rows))
        step.starts.extend([context + number] * rows)
        step.counts.extend([1] * rows)
        step.samples.extend([True] * rows)
        steps.append(step)
    return steps


def verifications(drafts: int, context: int) -> list[Step]:
    """Return a step that computes ``context`` tokens, then steps that verify drafts behind them.

    All of them verify the same ones, as if they were rejected.
    """
    first = Step(0)
    _prompt(first, 0, context, list(range(-(-(context + drafts + 1) // BLOCK))))
    steps = [first]
    for number in range(STEPS):
        step = Step(number + 1, num_decodes=1, rows=[0], starts=[context])
        step.counts, step.samples = [1 + drafts], [1 + drafts]
        if drafts:
            step.drafts.append(TokenAppend(0, context + 1, list(range(5, 5 + drafts))))
        steps.append(step)
    return steps


def prompts(length: int, count: int) -> list[Step]:
    """Return ``count`` steps with the same prompt."""
    steps = []
    for number in range(count):
        step = Step(number)
        _prompt(step, 0, length, list(range(-(-length // BLOCK))))
        steps.append(step)
    return steps


def _prompt(step: Step, row: int, length: int, blocks: list[int]) -> None:
    ids = [5 + (row * 31 + i * 7) % 200 for i in range(length)]
    greedy = SamplingParams(temperature=0.0)
    step.new.append(NewRow(row, row, ids, length, blocks, greedy, NO_EXTRAS, -1))
    step.rows.append(row)
    step.starts.append(0)
    step.counts.append(length)
    step.samples.append(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--drafts", type=int, nargs="*", default=[0, 1, 3, 7])
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--quantize")
    parser.add_argument("--quantize-head", action="store_true")
    parser.add_argument("--quantize-activations", action=argparse.BooleanOptionalAction)
    options = parser.parse_args()
    serve = ServeConfig(
        model_id=str(options.model),
        max_batch_total_tokens=1 << 15,
        quantize=options.quantize,
        quantize_head=options.quantize_head,
        quantize_activations=options.quantize_activations,
    )
    worker, _ = load_worker(serve, options.model)
    assert isinstance(worker, ModelWorker)
    worker.warmup()
    profile = Profile(worker)
    columns = {}
    for rows in options.rows:
        steps = decodes(rows, options.context)
        profile.run(steps[0])
        columns[f"{rows} decoding"] = profile.median(steps[1:])
    if options.drafts:
        profile.run(verifications(max(options.drafts), options.context)[0])
        found = profile.alternating(
            {f"1 with {d} drafts": verifications(d, options.context)[1:] for d in options.drafts}
        )
        first = next(iter(found.values()))["all"]
        columns |= found
    if options.prompt:
        columns[f"prompt of {options.prompt}"] = profile.median(prompts(options.prompt, 7))
    names = list(next(iter(columns.values())))
    print(f"| ms ({kernels.threads()} threads) | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for name in names:
        cells = [f"{c[name]:.2f} ({100 * c[name] / c['all']:.0f} %)" for c in columns.values()]
        print(f"| {name} | {' | '.join(cells)} |")
    if options.drafts:
        times = [
            f"{c['all'] / first:.2f}" if "drafts" in name else "" for name, c in columns.items()
        ]
        print(f"| times | {' | '.join(times)} |")
    rate, weights = read_rate(), worker.model.weight_bytes
    limit = 1e3 * weights / rate
    print(f"\nmemory bandwidth: {rate / 1e9:.1f} GB/s")
    print(f"all weights: {weights / 1e6:.0f} MB, {limit:.2f} ms")
    if 1 in options.rows:
        print(f"one sequence decodes at {limit / columns['1 decoding']['all']:.0%} of that limit")


if __name__ == "__main__":
    main()
