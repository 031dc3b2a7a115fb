"""Measure the host overhead of a decode step: scheduler, inputs, sampler, result, wire.

    python -m tests.benchmarks.host [--vocab 49152]

A fake model returns constant tensors, so that only the engine is measured, in CPU time of this
thread. Decoding is greedy with log-probabilities; a vocabulary of 64 shows the fixed cost of
``sample``. ``encode`` and ``decode`` handle the step's message in the model server and the router.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import cast

import torch
from torch import Tensor

from tgi_cli.attention import AttentionMetadata, PagedAttention
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.kernels import cpp_library
from tgi_cli.rpc import codec
from tgi_cli.rpc import engine_pb2 as pb
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.upload import Uploader

STEPS = 300
PROMPT = 100
CPU = torch.device("cpu")


class NoAttention:
    """Attention without a KV cache."""

    states = None

    def plan(self, metadata: AttentionMetadata) -> None: ...


class NoModel:
    """A model with constant hidden states and logits."""

    def __init__(self, vocab: int, rows: int) -> None:
        self._hidden = torch.zeros(rows * PROMPT, 1)
        self._logits = torch.randn(rows, vocab)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: PagedAttention, images: object = None
    ) -> Tensor:
        return self._hidden[: len(input_ids)]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)]


STAGES = ("schedule", "launch", "sample", "result", "update", "encode", "decode")


def measure(running: int, vocab: int) -> dict[str, float]:
    """Return the median microseconds of each stage of a decode step."""
    max_tokens = PROMPT + STEPS + 10
    scheduler = Scheduler(
        SchedulerConfig(
            max_total_tokens=max_tokens,
            max_batch_prefill_tokens=1 << 20,
            max_batch_size=running,
            block_size=16,
            num_blocks=running * (max_tokens // 16 + 1),
        )
    )
    upload = Uploader(CPU)
    rows = InputBatch(running, max_tokens, 16, upload)
    attention = cast(PagedAttention, NoAttention())
    runner = ModelRunner(NoModel(vocab, running), attention, rows, vocab)
    for i in range(running):
        request = GenerationRequest(
            request_id=i,
            prompt_ids=tuple(range(i, i + PROMPT)),
            sampling=SamplingParams(temperature=0.0),
            max_new_tokens=STEPS + 5,
        )
        scheduler.add(request)
    timed: dict[str, list[float]] = {stage: [] for stage in STAGES}
    clock = time.thread_time
    for number in range(STEPS):
        times = [clock()]
        step = scheduler.schedule()
        assert step is not None
        times.append(clock())
        launched = runner.launch(step)
        times.append(clock())
        pending = runner.sample(launched)
        times.append(clock())
        result = pending.wait()
        times.append(clock())
        outputs = scheduler.update(result)
        times.append(clock())
        content = codec.encode_step(outputs).SerializeToString()
        times.append(clock())
        codec.decode_step(pb.StepMessage.FromString(content))
        times.append(clock())
        if number > 10:
            for stage, begin, end in zip(STAGES, times, times[1:], strict=False):
                timed[stage].append(end - begin)
    return {name: statistics.median(values) * 1e6 for name, values in timed.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = "C++" if cpp_library() is not None else "torch"
    print(f"{options.threads} threads, kernels: {kernels}; median CPU us per decode step\n")
    print(f"| running sequences | vocabulary | {' | '.join(STAGES)} | all |")
    print("|---" * (len(STAGES) + 3) + "|")
    for running in (1, 32, 256):
        for vocab in (64, options.vocab):
            times = measure(running, vocab)
            stages = " | ".join(f"{times[stage]:.0f}" for stage in STAGES)
            print(f"| {running} | {vocab} | {stages} | {sum(times.values()):.0f} |", flush=True)


if __name__ == "__main__":
    main()
