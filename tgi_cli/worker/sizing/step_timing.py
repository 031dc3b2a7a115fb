"""`tgi warmup` of a model: save its profile, and time prompts and decodes on this device.

Steps are those of the engine, on a worker that is warmed up and idle. Decodes are compared with the
memory's bandwidth: each reads every weight and cached token that it needs once, mostly from memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from tgi_cli import kernels
from tgi_cli.config import EngineConfig, ServeConfig
from tgi_cli.device import describe
from tgi_cli.engine.step import NO_EXTRAS, NewRow, PendingResult, Step
from tgi_cli.kernels.memory import allocate
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.factory import load_worker
from tgi_cli.worker.sizing import saved_profile
from tgi_cli.worker.sizing.kv_cache import Capacity
from tgi_cli.worker.sizing.profile_steps import add_row, with_slots

log = logging.getLogger(__name__)

CONTEXT = 128
"""Context of decoding sequences, if the limits allow it."""
LENGTHS = (128, 512, 1024, 2048, 4096)
"""Lengths of prompts."""
MOST_SECONDS = 10.0
"""Time limit of a prompt, or of the contexts of one batch size; larger ones are left out."""

_ROUNDS = 3
_LONG_SECONDS = 3.0
"""Time above which a prompt is timed only once."""
_SECONDS = 0.5
"""Target duration of a round of decodes."""
_STEPS = (2, 24)
"""Minimum and maximum number of steps in a round."""
_GREEDY = SamplingParams(temperature=0.0)


class StepRunner(Protocol):
    """The methods of a worker that the timer calls."""

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
        capacity: the result of its warm-up.

    Attributes:
        left_out: steps that were not timed, each with the reason.
    """

    def __init__(self, worker: StepRunner, capacity: Capacity) -> None:
        self._worker = worker
        self._config: EngineConfig = capacity.config
        self._tokens = capacity.max_batch_total_tokens
        self._slots = capacity.num_state_slots
        self._ahead = 0 if self._config.device == "cpu" else 1
        self.left_out: list[str] = []

    def prefills(self, lengths: Sequence[int] = LENGTHS) -> Iterator[Prefill]:
        """Time prompts of each length that the limits allow, or else the longest allowed one."""
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
        """Time decodes of each batch size. Default: powers of two.

        Sizes that the limits do not allow are left out, and those whose contexts would take
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
        """Seconds that the steps take, with results read as the engine reads them."""
        pending: list[PendingResult] = []
        began = time.perf_counter()
        for step in steps:
            with_slots(step, self._slots)
            pending.append(self._worker.sample(self._worker.launch(step)))
            if len(pending) > self._ahead:
                pending.pop(0).wait()
        for result in pending:
            result.wait()
        return time.perf_counter() - began

    def _prompts(self, count: int, length: int, first: int = 0) -> list[Step]:
        """Steps of the largest budget that prefill ``count`` rows from ``first`` on."""
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
                add_row(step, row, done, taken, samples=done + taken == length)
                done += taken
                left -= taken
        return steps

    def _decodings(self, rows: int, context: int, count: int) -> list[Step]:
        """``count`` decode steps after the contexts, which are cached."""
        steps = [Step(number, num_decodes=rows) for number in range(count)]
        for number, step in enumerate(steps):
            for row in range(rows):
                add_row(step, row, context + number, 1)
        return steps

    def _row(self, row: int, length: int) -> NewRow:
        size = self._config.block_size
        end = min(length + _STEPS[1], self._config.max_total_tokens, self._tokens)
        each = -(-end // size)
        ids = [5 + (row * 31 + token * 7) % 200 for token in range(length)]
        blocks = list(range(row * each, (row + 1) * each))
        return NewRow(row, row, ids, length, blocks, _GREEDY, NO_EXTRAS, -1)


def read_rate(device: torch.device) -> float:
    """Bytes per second that the device reads from its memory, the best of several attempts."""
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


def measure(
    serve: ServeConfig,
    model_path: Path,
    batch_sizes: Sequence[int] | None = None,
    on_stage: Callable[[str], object] = lambda text: None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Load a model, warm it up, save its profile and time its steps.

    Args:
        serve: the settings, as for a server.
        model_path: folder of the checkpoint.
        batch_sizes: numbers of sequences to time decodes of. Default: powers of two.
        on_stage: called with a description of each stage as it begins.
        progress: called while loading; see :func:`tgi_cli.models.load_model`.

    Returns:
        JSON values; sizes in bytes, times in seconds. ``left_out`` lists what would have taken
        too long to time, ``kept`` is the saved profile's file (None if it cannot be written).

    Raises:
        TgiError: as :func:`tgi_cli.worker.factory.load_worker` and ``warmup``.
    """
    on_stage("loading the model")
    worker, config = load_worker(replace(serve, measured_limits=False), model_path, progress)
    try:
        on_stage("running the worst steps")
        capacity = worker.warmup()
        info = worker.info()
        saved: Path | None = None
        try:
            saved = saved_profile.save(saved_profile.key_of(config), capacity.profile)
        except OSError as error:
            log.warning("the profile cannot be saved: %s", error)
        timer = StepTimer(worker, capacity)
        prefills, decodes = [], []
        for prefill in timer.prefills():
            prefills.append(asdict(prefill) | {"tokens_per_second": prefill.tokens_per_second})
            on_stage(f"timing prompts: {prefill.tokens} tokens")
        on_stage("measuring the memory")
        device = torch.device(config.device)
        # Each of several GPUs reads its own memory.
        rate = read_rate(device) * (config.num_shard if config.device == "cuda" else 1)
        # A decode reads its state and writes it.
        per_row = 2 * capacity.state_bytes / max(1, capacity.num_state_slots)
        per_token = capacity.cache_bytes / max(1, capacity.max_batch_total_tokens)
        for decode in timer.decodes(batch_sizes):
            rows = decode.batch_size
            read = worker.read_bytes(rows) + (per_token * decode.context + per_row) * rows
            decodes.append(
                asdict(decode)
                | {
                    "tokens_per_second": decode.tokens_per_second,
                    "bytes_read": int(read),
                    "memory_share": read / decode.seconds / rate,
                }
            )
            on_stage(f"timing decodes: {rows} sequences")
    finally:
        worker.close()
    return {
        "model": info.model_id,
        "device": info.device,
        "device_name": describe(config.device).name,
        "dtype": info.dtype,
        "quantize": info.quantize,
        "num_shard": info.num_shard,
        "weight_bytes": capacity.weight_bytes,
        "kv_blocks": capacity.num_blocks,
        "block_size": info.block_size,
        "kv_bytes": capacity.cache_bytes,
        "state_slots": capacity.num_state_slots,
        "state_bytes": capacity.state_bytes,
        "activation_bytes": capacity.activation_bytes,
        "max_batch_total_tokens": info.max_batch_total_tokens,
        "max_total_tokens": info.max_total_tokens,
        "max_input_tokens": info.max_input_tokens,
        "max_batch_prefill_tokens": info.max_batch_prefill_tokens,
        "max_batch_size": info.max_batch_size,
        "cuda_graphs": capacity.graphs,
        "load_seconds": capacity.load_seconds,
        "warmup_seconds": capacity.warmup_seconds,
        "memory_bytes_per_second": rate,
        "prefill": prefills,
        "decode": decodes,
        "left_out": timer.left_out,
        "kept": None if saved is None else str(saved),
    }
