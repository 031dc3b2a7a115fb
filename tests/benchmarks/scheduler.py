"""Host cost of scheduling a step: schedule() and update(), no model, no torch.

python -m tests.benchmarks.scheduler
"""

from __future__ import annotations

import statistics
import time

from tgi_cli.engine.limits import Limits
from tgi_cli.engine.messages import GenerationRequest
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.step import StepResult
from tgi_cli.sampling.params import SamplingParams

STEPS = 400


def step_microseconds(running: int) -> list[float]:
    """One figure per decode step with so many running sequences."""
    scheduler = Scheduler(
        Limits(
            max_total_tokens=4096,
            max_batch_prefill_tokens=1 << 20,
            max_batch_size=running,
            block_size=16,
            num_blocks=running * 256,
        )
    )
    greedy = SamplingParams(temperature=0.0)
    for i in range(running):
        scheduler.add(
            GenerationRequest(
                request_id=i,
                prompt_ids=tuple(range(i, i + 100)),
                sampling=greedy,
                max_new_tokens=STEPS + 10,
            )
        )
    nothing: list[list[int]] = [[] for _ in range(running)]
    no_logprobs: list[list[float]] = [[] for _ in range(running)]
    result = StepResult([1] * running, [0.0] * running, nothing, no_logprobs)
    scheduler.schedule()
    scheduler.update(result)
    figures = []
    for _ in range(STEPS):
        start = time.perf_counter()
        scheduler.schedule()
        scheduler.update(result)
        figures.append((time.perf_counter() - start) * 1e6)
    return figures


def main() -> None:
    print("| running sequences | median us per step | p99 us |")
    print("|---|---|---|")
    for running in (1, 32, 256):
        figures = step_microseconds(running)
        p99 = statistics.quantiles(figures, n=100)[98]
        print(f"| {running} | {statistics.median(figures):.0f} | {p99:.0f} |")


if __name__ == "__main__":
    main()
