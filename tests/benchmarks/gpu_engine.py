"""Runs the engine for the GPU benchmark: random weights, single steps, whole workloads."""

from __future__ import annotations

import json
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

from tests.benchmarks.gpu_device import synchronize
from tgi_cli.config import EngineConfig, ServeConfig, resolve
from tgi_cli.device import describe
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import GenerationRequest, Shutdown
from tgi_cli.engine.metrics import StepStats
from tgi_cli.engine.step import NewRow, PendingResult, Step
from tgi_cli.models import loader, model_facts, read_config
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.factory import make_worker
from tgi_cli.worker.step_inputs import StepBatch
from tgi_cli.worker.worker import ModelWorker

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "dtype": "bfloat16",
}

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
    },
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
    },
}

GREEDY = SamplingParams(temperature=0.0)
STALL_SECONDS = 60.0
"""Time without a token after which a workload fails."""


@dataclass(frozen=True)
class Shape:
    """A model configuration, from which rooflines are computed."""

    config: dict[str, Any]
    weight_bytes: int
    """Bytes that a decode step reads: all weights but the embedding."""

    @property
    def kv_bytes(self) -> int:
        """KV cache bytes of one token, at two bytes per element."""
        c = self.config
        return 4 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]

    def decode_bytes(self, batch: int, context: int) -> int:
        """Bytes that a decode step has to read."""
        return self.weight_bytes + batch * context * self.kv_bytes

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt: matrix products of the layers, and causal attention."""
        c = self.config
        head = c["vocab_size"] * c["hidden_size"]
        layers = self.weight_bytes / 2 - head
        width = c["num_attention_heads"] * c["head_dim"]
        attention = 4 * c["num_hidden_layers"] * width * tokens * tokens / 2
        return 2 * layers * tokens + 2 * head + attention


def write_shape(name: str, folder: Path, **changes: Any) -> Shape:
    """Write the config.json of a shape into ``folder``."""
    config = {**LLAMA, **SHAPES[name], **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    c = config
    heads = c["num_attention_heads"] + 2 * c["num_key_value_heads"]
    layer = c["hidden_size"] * c["head_dim"] * (heads + c["num_attention_heads"])
    layer += 3 * c["hidden_size"] * c["intermediate_size"]
    head = c["vocab_size"] * c["hidden_size"]
    return Shape(config, 2 * (layer * c["num_hidden_layers"] + head))


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
    capacity = worker.warmup()
    return worker, SchedulerConfig.of(
        capacity.config, capacity.num_blocks, capacity.kv_window, capacity.num_state_slots
    )


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
    batch: int,
    context: int,
    steps: int,
    sampling: SamplingParams = GREEDY,
    depth: int = 1,
) -> Steps:
    """Time decode steps of ``batch`` rows, with ``context`` tokens in the middle of the run.

    The KV cache contains random values. Each row has its own blocks while there are enough.
    """
    runner, size = worker.runner, limits.block_size
    start = max(1, context - steps // 2)
    per_row = -(-(start + steps + 1) // size)
    for cache in (*worker.attention.key_cache, *worker.attention.value_cache):
        _noise(cache[: min(batch * per_row, limits.num_blocks)])
    pending: list[PendingResult] = []
    moments, launches = [], []
    for index in range(steps):
        step = Step(index, num_decodes=batch)
        for row in range(batch):
            if index == 0:
                blocks = [(row * per_row + i) % limits.num_blocks for i in range(per_row)]
                tokens = [3] * (start + 1)
                step.new.append(NewRow(row, row, tokens, start + 1, blocks, sampling))
        step.rows = list(range(batch))
        step.starts = [start + index] * batch
        step.counts = [1] * batch
        step.samples = [True] * batch
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
        _graph_seconds(worker, batch, context),
    )


@torch.inference_mode()
def _graph_seconds(
    worker: ModelWorker, batch: int, context: int, repeats: int = 30
) -> float | None:
    graphs = worker.runner.graphs
    if graphs is None or batch > graphs.largest:
        return None
    step = Step(0, num_decodes=batch, rows=list(range(batch)), starts=[context - 1] * batch)
    step.counts, step.samples = [1] * batch, [True] * batch
    decodes = StepBatch(step, np.arange(batch))
    graphs.run(decodes)
    synchronize(worker.attention.device)
    began = time.perf_counter()
    for _ in range(repeats):
        graphs.run(decodes)
    synchronize(worker.attention.device)
    return (time.perf_counter() - began) / repeats


def _noise(cache: Tensor) -> None:
    if cache.dtype.itemsize == 1:
        cache.view(torch.uint8).random_(0, 0x70)
    else:
        cache.normal_()


def prefill_seconds(
    worker: ModelWorker, limits: SchedulerConfig, tokens: int, repeats: int = 5
) -> float:
    """Return the median time of a step with one prompt, from its launch to its token."""
    blocks = list(range(-(-(tokens + 1) // limits.block_size)))
    times = []
    for index in range(repeats + 1):
        row = NewRow(0, 0, [3 + index] * tokens, tokens, blocks, GREEDY)
        step = Step(0, new=[row], rows=[0], starts=[0], counts=[tokens], samples=[True])
        synchronize(worker.attention.device)
        began = time.perf_counter()
        worker.sample(worker.launch(step)).wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


@dataclass
class Played:
    """The results of a workload.

    Attributes:
        seconds: from the first request to the last token.
        tokens: generated tokens by request.
        logprobs: log-probability of each token.
    """

    seconds: float
    tokens: dict[int, list[int]]
    logprobs: dict[int, list[float]]

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens.values()))


def play(
    worker: ModelWorker,
    limits: SchedulerConfig,
    prompts: Sequence[Sequence[int]],
    new: int,
    depth: int = 1,
    sampling: SamplingParams = GREEDY,
    on_step: Callable[[StepStats], None] | None = None,
) -> Played:
    """Run all prompts at once through the core loop, which runs on this thread."""
    core = EngineCore(worker, replace(limits, prefix_caching=False), depth, on_step=on_step)
    tokens: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    logprobs: dict[int, list[float]] = {index: [] for index in tokens}
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
            failures.extend(end.error for end in outputs.finished if end.error)
            ended += len(outputs.finished)
        core.inbox.put(Shutdown())

    reader = threading.Thread(target=collect, daemon=True)
    reader.start()
    began = time.perf_counter()
    for index, prompt in enumerate(prompts):
        request = GenerationRequest(
            request_id=index,
            prompt_ids=tuple(prompt),
            sampling=sampling,
            max_new_tokens=new,
            ignore_eos=True,
        )
        core.inbox.put(request)
    core.run()
    reader.join(STALL_SECONDS)
    if failures:
        raise RuntimeError(failures[0])
    return Played(last[0] - began, tokens, logprobs)


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens that depend only on the seed."""
    choose = random.Random(seed)
    return [choose.choices(range(3, vocab), k=length) for _ in range(count)]
