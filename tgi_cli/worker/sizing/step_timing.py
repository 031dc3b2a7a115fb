"""How long steps take on this device: prompts by length, decodes by the number of sequences.

Steps are those that the engine would make, on a worker that is warmed up and serves nobody. The
yardstick of a decode is memory: every weight and every cached token that it needs is read once,
and few of them come from a processor's caches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

from tgi_cli import kernels
from tgi_cli.config import EngineConfig
from tgi_cli.engine.step import NO_EXTRAS, NewRow, PendingResult, Step
from tgi_cli.kernels.memory import allocate
from tgi_cli.layers.base import Loadable
from tgi_cli.layers.embedding import Embedding, PositionEmbedding
from tgi_cli.layers.moe import Expert, MoE
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.sizing.capacity import Capacity

CONTEXT = 128
"""Tokens that decoding sequences have, where the limits allow."""
LENGTHS = (128, 512, 1024, 2048, 4096)
"""Of prompts."""
MOST_SECONDS = 10.0
"""For a prompt, or for the contexts of one number of sequences; larger ones are left out."""

_ROUNDS = 3
_LONG_SECONDS = 3.0
"""What takes longer is timed once."""
_SECONDS = 0.5
"""That the decodes of a round are to take, within these numbers of steps:"""
_STEPS = (2, 24)
_GREEDY = SamplingParams(temperature=0.0)


class StepRunner(Protocol):
    """What is needed of a worker."""

    def launch(self, step: Step) -> object: ...

    def sample(self, handle: object) -> PendingResult: ...


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt of ``tokens``; it takes as many steps as the limits make of it."""

    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Decode:
    """One step of ``batch_size`` sequences with ``context`` tokens each."""

    batch_size: int
    context: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.batch_size / self.seconds


class StepTimer:
    """Times the steps of one worker.

    Args:
        worker: warmed up.
        capacity: what its warm-up found.

    Attributes:
        left_out: what was not timed, and why.
    """

    def __init__(self, worker: StepRunner, capacity: Capacity) -> None:
        self._worker = worker
        self._config: EngineConfig = capacity.config
        self._tokens = capacity.max_batch_total_tokens
        self._ahead = 0 if self._config.device == "cpu" else 1
        self.left_out: list[str] = []

    def prefills(self, lengths: Sequence[int] = LENGTHS) -> Iterator[Prefill]:
        """Of each length that the limits allow, or of the longest prompt that they do."""
        most = min(self._config.max_input_tokens, self._tokens)
        fitting = [length for length in sorted(lengths) if length <= most]
        rate = 0.0
        for length in fitting or [most]:
            if rate * length > MOST_SECONDS:
                self.left_out.append(
                    f"a prompt of {length} tokens, some {rate * length:.0f} s of computing"
                )
                continue
            steps = self._prompts(1, length)
            seconds = self._run(steps)
            if seconds < _LONG_SECONDS:  # the first of a kind takes longer
                seconds = median(self._run(steps) for _ in range(_ROUNDS))
            rate = seconds / length
            yield Prefill(length, seconds)

    def decodes(self, sizes: Sequence[int] | None = None) -> Iterator[Decode]:
        """Of each number of sequences; None: powers of two.

        Numbers that the limits do not allow are left out, and those whose contexts would take
        longer than :data:`MOST_SECONDS` to compute.
        """
        rows, context = 0, min(CONTEXT, self._config.max_total_tokens - 1 - _STEPS[1])
        context = max(1, context)
        each = -(-(context + _STEPS[1]) // self._config.block_size) * self._config.block_size
        most = min(self._config.max_batch_size, self._tokens // each)
        rate = 0.0
        for size in sizes or [1 << power for power in range(most.bit_length())]:
            new = max(0, size - rows)
            if size > most:
                self.left_out.append(f"decodes of {size} sequences: the limits allow {most}")
                continue
            if new * rate > MOST_SECONDS:
                self.left_out.append(
                    f"decodes of {size} sequences, some {new * rate:.0f} s for their contexts"
                )
                continue
            if new:
                rate = self._run(self._prompts(new, context, rows)) / new
                rows = size
            yield Decode(size, context, self._decode(size, context))

    def _decode(self, size: int, context: int) -> float:
        """Seconds of a step."""
        one = self._run(self._decodings(size, context, 1))
        count = min(max(_STEPS[0], int(_SECONDS / one)), _STEPS[1])
        count = min(count, max(1, self._config.max_total_tokens - 1 - context))
        steps = self._decodings(size, context, count)
        return median(self._run(steps) / count for _ in range(_ROUNDS))

    def _run(self, steps: Sequence[Step]) -> float:
        """Seconds that they take, with results read as the engine reads them."""
        pending: list[PendingResult] = []
        began = time.perf_counter()
        for step in steps:
            pending.append(self._worker.sample(self._worker.launch(step)))
            if len(pending) > self._ahead:
                pending.pop(0).wait()
        for result in pending:
            result.wait()
        return time.perf_counter() - began

    def _prompts(self, count: int, length: int, first: int = 0) -> list[Step]:
        """Rows from ``first`` on get prompts, in steps of the largest budget."""
        budget, steps = self._config.max_batch_prefill_tokens, [Step(0)]
        left = budget
        for row in range(first, first + count):
            done = 0
            while done < length:
                if not left:
                    steps.append(Step(len(steps)))
                    left = budget
                taken = min(left, length - done)
                step = steps[-1]
                if not done:
                    step.new.append(self._row(row, length))
                step.rows.append(row)
                step.starts.append(done)
                step.counts.append(taken)
                done += taken
                left -= taken
                step.samples.append(done == length)
        return steps

    def _decodings(self, rows: int, context: int, count: int) -> list[Step]:
        """``count`` steps behind the contexts, which are there; from the beginning each time."""
        steps = []
        for number in range(count):
            step = Step(number, num_decodes=rows)
            step.rows.extend(range(rows))
            step.starts.extend([context + number] * rows)
            step.counts.extend([1] * rows)
            step.samples.extend([True] * rows)
            steps.append(step)
        return steps

    def _row(self, row: int, length: int) -> NewRow:
        size = self._config.block_size
        end = min(length + _STEPS[1], self._config.max_total_tokens, self._tokens)
        each = -(-end // size)
        ids = [5 + (row * 31 + token * 7) % 200 for token in range(length)]
        blocks = list(range(row * each, (row + 1) * each))
        return NewRow(row, row, ids, length, blocks, _GREEDY, NO_EXTRAS, -1)


def read_bytes(model: torch.nn.Module, rows: int) -> int:
    """Bytes of weights that a decode of ``rows`` sequences reads, of this shard.

    Tables of embeddings are read at a few places alone. Of experts it is as many as so many
    tokens choose, if they choose evenly.
    """
    sizes: dict[int, float] = {}

    def add(module: torch.nn.Module, share: float) -> None:
        if isinstance(module, Embedding | PositionEmbedding):
            return
        for parameter in module.parameters(recurse=False):
            sizes[parameter.data_ptr()] = parameter.nbytes * share
        packed = module.packed if isinstance(module, Loadable) else None
        if packed is not None:
            sizes[id(packed)] = packed.nbytes * share

    for module in model.modules():
        add(module, 1.0)
    for mixture in model.modules():
        if isinstance(mixture, MoE):
            experts = [each for each in mixture.experts.modules() if isinstance(each, Expert)]
            share = 1 - (1 - mixture.top_k / len(experts)) ** rows
            for expert in experts:
                for module in expert.modules():
                    add(module, share)
    return int(sum(sizes.values()))


def read_rate(device: torch.device) -> float:
    """Bytes per second that the device reads from its memory: the best of several attempts."""
    before = torch.get_num_threads()
    size = (256 << 20) if device.type == "cpu" else (1 << 30)
    if device.type == "cpu":
        memory = allocate(size).view(torch.float32).fill_(1.0)
        torch.set_num_threads(max(before, kernels.threads()))
    else:
        memory = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = 0.0
    try:
        for _ in range(12):
            began = time.perf_counter()
            memory.sum()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = max(best, memory.nbytes / (time.perf_counter() - began))
    finally:
        torch.set_num_threads(before)
    return best
