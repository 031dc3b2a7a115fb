"""What a decode step costs beside the model: scheduler, inputs, sampler, result. On the CPU.

    python -m tests.benchmarks.host [--vocab 49152]

The model is a stand-in that returns ready-made tensors, so that all that is timed is ours.
``scheduler`` is schedule() and update() alone, without torch; ``worker`` is launch(), sample()
and wait() around a model and an attention that do nothing, greedy, with log-probabilities.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, cast

import torch
from torch import Tensor

from tgi_cli.attention import AttentionMetadata, PagedAttention
from tgi_cli.engine.limits import Limits
from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.rows import Rows
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.staging import Uploader

STEPS = 300
PROMPT = 100
CPU = torch.device("cpu")


class NoAttention:
    """Holds no cache and attends to nothing."""

    def plan(self, metadata: AttentionMetadata) -> None: ...


class NoModel:
    """Hidden states and logits that are always the same."""

    def __init__(self, vocab: int, rows: int) -> None:
        self._hidden = torch.zeros(rows * PROMPT, 1)
        self._logits = torch.randn(rows, vocab)

    def forward(self, input_ids: Tensor, positions: Tensor, attention: PagedAttention) -> Tensor:
        return self._hidden[: len(input_ids)]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)]


def measure(running: int, vocab: int) -> dict[str, float]:
    """Median microseconds per decode step with so many running sequences."""
    max_tokens = PROMPT + STEPS + 10
    scheduler = Scheduler(
        Limits(
            max_total_tokens=max_tokens,
            max_batch_prefill_tokens=1 << 20,
            max_batch_size=running,
            block_size=16,
            num_blocks=running * (max_tokens // 16 + 1),
        )
    )
    upload = Uploader(CPU)
    rows = Rows(running, max_tokens, 16, CPU, upload)
    attention = cast(PagedAttention, NoAttention())
    runner = ModelRunner(NoModel(vocab, running), attention, rows, vocab, CPU, upload)
    for i in range(running):
        request = GenerationRequest(
            request_id=i,
            prompt_ids=tuple(range(i, i + PROMPT)),
            sampling=SamplingParams(temperature=0.0),
            max_new_tokens=STEPS + 5,
        )
        scheduler.add(request)
    timed: dict[str, list[float]] = {"scheduler": [], "worker": []}
    for number in range(STEPS):
        begin = time.perf_counter()
        step = scheduler.schedule()
        assert step is not None
        scheduled = time.perf_counter()
        result: Any = runner.sample(runner.launch(step)).wait()
        ran = time.perf_counter()
        scheduler.update(result)
        end = time.perf_counter()
        if number > 10:
            timed["scheduler"].append(scheduled - begin + end - ran)
            timed["worker"].append(ran - scheduled)
    return {name: statistics.median(values) * 1e6 for name, values in timed.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"vocabulary {options.vocab}, {options.threads} threads; median us per decode step\n")
    print("| running sequences | scheduler | worker, sampler included | with a vocabulary of 64 |")
    print("|---|---|---|---|")
    for running in (1, 32, 256):
        whole, bare = measure(running, options.vocab), measure(running, 64)
        row = f"{running} | {whole['scheduler']:.0f} | {whole['worker']:.0f} | {bare['worker']:.0f}"
        print(f"| {row} |")


if __name__ == "__main__":
    main()
