"""Runs the engine for the GPU benchmark: random weights, single steps, whole workloads."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.benchmarks.gpu.device import seconds_of, synchronize
from tgi_cli.config import EngineConfig, ServeConfig, resolve
from tgi_cli.device import describe
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import GenerationRequest, LoadAdapter, Shutdown
from tgi_cli.engine.metrics import StepStats
from tgi_cli.engine.step import NewRow, PendingResult, Step
from tgi_cli.models import loader, model_facts, read_config
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.factory import make_worker
from tgi_cli.worker.step_inputs import StepBatch
from tgi_cli.worker.worker import ModelWorker

GREEDY = SamplingParams(temperature=0.0)
STALL_SECONDS = 60.0
"""Time without a token after which a workload fails."""


@contextmanager
def random_on(device: torch.device) -> Iterator[None]:
    """Create the weights of ``load_format=dummy`` on the device: faster than on the host."""
    original = loader.random_tensor

    def make(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return original(name, shape)
        return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(0.0, 0.02)

    if device.type == "cuda":
        loader.random_tensor = make  # type: ignore[assignment, unused-ignore]
    try:
        yield
    finally:
        loader.random_tensor = original


def make(
    folder: Path, kind: str, *, load_format: str = "dummy", graphs: bool = True, **options: Any
) -> tuple[ModelWorker, SchedulerConfig]:
    """Return a worker on that kind of device, warmed up, and the limits for its scheduler."""
    serve = ServeConfig(
        model_id=folder.name, load_format=load_format, disable_grammar_support=True, **options
    )
    config: EngineConfig = resolve(serve, model_facts(read_config(folder)), describe(kind), folder)
    if not graphs:
        config = replace(config, cuda_graphs=())
    with random_on(torch.device(kind)):
        worker = make_worker(config)
    return worker, SchedulerConfig.after_warmup(worker.warmup())


@dataclass(frozen=True)
class Steps:
    """Times of decode steps in seconds.

    Attributes:
        step: median from result to result.
        launch: median time of the host to launch a step and its sampling.
        graph: time of the CUDA graph alone, or None without graphs.
    """

    step: float
    launch: float
    graph: float | None


def decode_steps(
    worker: ModelWorker,
    limits: SchedulerConfig,
    contexts: Sequence[int],
    steps: int,
    sampling: SamplingParams = GREEDY,
    depth: int = 1,
) -> Steps:
    """Time decode steps of rows with ``contexts`` tokens each, in the middle of the run.

    The KV cache contains random values. Each row has its own blocks while there are enough.
    """
    runner, size, batch = worker.runner, limits.block_size, len(contexts)
    starts = [max(1, context - steps // 2) for context in contexts]
    held = [-(-(start + steps + 1) // size) for start in starts]
    for cache in (*worker.attention.key_cache, *worker.attention.value_cache):
        _noise(cache[: min(sum(held), limits.num_blocks)])
    pending: list[PendingResult] = []
    moments, launches = [], []
    for index in range(steps):
        step = Step(index, num_decodes=batch)
        if index == 0:
            first = 0
            for row, (start, count) in enumerate(zip(starts, held, strict=True)):
                blocks = [(first + i) % limits.num_blocks for i in range(count)]
                tokens = [3] * (start + 1)
                step.new.append(NewRow(row, row, tokens, start + 1, blocks, sampling))
                first += count
        step.rows = list(range(batch))
        step.starts = [start + index for start in starts]
        step.counts = [1] * batch
        step.samples = [1] * batch
        began = time.perf_counter()
        pending.append(runner.sample(runner.launch(step)))
        launches.append(time.perf_counter() - began)
        while len(pending) > depth:
            pending.pop(0).wait()
            moments.append(time.perf_counter())
    while pending:
        pending.pop(0).wait()
    settled = moments[len(moments) // 4 :]
    gaps = [later - earlier for earlier, later in pairwise(settled)]
    return Steps(
        statistics.median(gaps),
        statistics.median(launches[len(launches) // 4 :]),
        _graph_seconds(worker, contexts),
    )


@torch.inference_mode()
def _graph_seconds(worker: ModelWorker, contexts: Sequence[int], repeats: int = 30) -> float | None:
    graphs, batch = worker.runner.graphs, len(contexts)
    if graphs is None or batch > graphs.largest:
        return None
    step = Step(0, num_decodes=batch, rows=list(range(batch)))
    step.starts = [context - 1 for context in contexts]
    step.counts, step.samples = [1] * batch, [1] * batch
    decodes = StepBatch(step, np.arange(batch))
    return seconds_of(lambda: graphs.run(decodes), worker.attention.device, repeats)


def _noise(cache: Tensor) -> None:
    if cache.dtype.itemsize == 1:
        cache.view(torch.uint8).random_(0, 0x70)
    else:
        cache.normal_()


def prefill_seconds(
    worker: ModelWorker, limits: SchedulerConfig, tokens: int, repeats: int = 5
) -> float:
    """Return the median time of a prompt, in chunks of the budget, from its launch to its token."""
    blocks = list(range(-(-(tokens + 1) // limits.block_size)))
    budget = limits.max_batch_prefill_tokens
    times = []
    for index in range(repeats + 1):
        synchronize(worker.attention.device)
        began = time.perf_counter()
        for start in range(0, tokens, budget):
            count = min(budget, tokens - start)
            step = Step(0, rows=[0], starts=[start], counts=[count])
            step.samples = [int(start + count == tokens)]
            if not start:
                step.new = [NewRow(0, 0, [3 + index] * tokens, tokens, blocks, GREEDY)]
            pending = worker.sample(worker.launch(step))
        pending.wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


@dataclass
class Played:
    """The results of a workload.

    Attributes:
        seconds: from the first request to the last token.
        tokens: generated tokens by request.
        logprobs: log-probability of each token.
        moments: when each token arrived, in seconds since its request was sent.
    """

    seconds: float
    tokens: dict[int, list[int]]
    logprobs: dict[int, list[float]]
    moments: dict[int, list[float]]

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens.values()))

    def gaps(self) -> list[float]:
        """Seconds between the tokens of all requests, ascending."""
        times = self.moments.values()
        return sorted(later - earlier for each in times for earlier, later in pairwise(each))

    def first_tokens(self) -> list[float]:
        """Seconds to each request's first token, ascending."""
        return sorted(each[0] for each in self.moments.values())


@dataclass(frozen=True)
class Workload:
    """Requests for ``new`` tokens each.

    Attributes:
        prompts: token ids.
        new: tokens of each answer.
        sampling: of all of them.
        arrivals: seconds after which each prompt is sent, ascending. Default: all at once.
        adapter: folder of a LoRA adapter that all of them use.
    """

    prompts: Sequence[Sequence[int]]
    new: int
    sampling: SamplingParams = GREEDY
    arrivals: Sequence[float] | None = None
    adapter: Path | None = None


def play(
    worker: ModelWorker,
    limits: SchedulerConfig,
    workload: Workload,
    depth: int = 1,
    on_step: Callable[[StepStats], None] | None = None,
) -> Played:
    """Run a workload through the core loop, which runs on this thread."""
    prompts, arrivals = workload.prompts, workload.arrivals
    core = EngineCore(worker, replace(limits, prefix_caching=False), depth, on_step=on_step)
    tokens: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    logprobs: dict[int, list[float]] = {index: [] for index in tokens}
    moments: dict[int, list[float]] = {index: [] for index in tokens}
    sent: dict[int, float] = {}
    failures: list[str] = []
    last = [0.0]

    def collect() -> None:
        ended = 0
        while ended < len(prompts):
            try:
                outputs = core.outbox.get(timeout=STALL_SECONDS)
            except Empty:
                failures.append(f"no token for {STALL_SECONDS:.0f} s")
                break
            if outputs is None:
                return
            last[0] = time.perf_counter()
            for index, request_id in enumerate(outputs.request_ids):
                tokens[request_id].append(outputs.token_ids[index])
                logprobs[request_id].append(outputs.logprobs[index])
                moments[request_id].append(last[0] - sent[request_id])
            failures.extend(end.error for end in outputs.finished if end.error)
            ended += len(outputs.finished)
        core.inbox.put(Shutdown())

    def send() -> None:
        for index, prompt in enumerate(prompts):
            if arrivals is not None:
                time.sleep(max(0.0, began + arrivals[index] - time.perf_counter()))
            sent[index] = time.perf_counter()
            request = GenerationRequest(
                request_id=index,
                prompt_ids=tuple(prompt),
                sampling=workload.sampling,
                max_new_tokens=workload.new,
                ignore_eos=True,
                adapter_id=int(workload.adapter is not None),
            )
            core.inbox.put(request)

    if workload.adapter is not None:
        core.inbox.put(LoadAdapter(1, "adapter", str(workload.adapter)))
    reader = threading.Thread(target=collect, daemon=True)
    reader.start()
    began = time.perf_counter()
    if arrivals is None:
        send()
    else:
        threading.Thread(target=send, daemon=True).start()
    core.run()
    reader.join(STALL_SECONDS)
    if failures:
        raise RuntimeError(failures[0])
    return Played(last[0] - began, tokens, logprobs, moments)


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens that depend only on the seed."""
    choose = random.Random(seed)
    return [choose.choices(range(3, vocab), k=length) for _ in range(count)]
