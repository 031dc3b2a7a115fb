"""Benchmark the engine without HTTP: batching rules, prefill chunk sizes, prefix caching.

    python -m tests.tools.checkpoints --shape 60m /tmp/model
    python -m tests.benchmarks.engine /tmp/model batching
    python -m tests.benchmarks.engine /tmp/model chunks
    python -m tests.benchmarks.engine /tmp/model prefix

``batching`` runs one mixed workload (log-normal lengths, Poisson arrivals, seeded) under each
rule in turn, ``--rounds`` times. ``chunks`` adds long prompts while other requests decode, with
chunks that tokens or milliseconds bound.
``prefix`` measures two turns of a conversation. All figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from tgi_cli.config import ServeConfig
from tgi_cli.engine.config import Batching, SchedulerConfig
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import GenerationRequest, Shutdown
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.factory import load_worker
from tgi_cli.worker.worker import ModelWorker

MAX_TOTAL = 3072


@dataclass
class Arrival:
    """A request and its arrival time, in seconds from the start."""

    at: float
    prompt: list[int]
    new: int


@dataclass
class Run:
    """Token times of one workload, by request, in seconds from each request's arrival."""

    seconds: float = 0.0
    times: dict[int, list[float]] = field(default_factory=dict)

    @property
    def ttfts(self) -> list[float]:
        return [times[0] for times in self.times.values()]

    @property
    def gaps(self) -> list[float]:
        return [
            later - earlier for times in self.times.values() for earlier, later in pairwise(times)
        ]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.times.values()))


def play(worker: ModelWorker, limits: SchedulerConfig, arrivals: Sequence[Arrival]) -> Run:
    """Send each request at its arrival time; return when all have finished."""
    core = EngineCore(worker, limits)
    engine = threading.Thread(target=core.run, daemon=True)
    run = Run()
    start = time.perf_counter()

    def send() -> None:
        for i, arrival in enumerate(arrivals):
            time.sleep(max(0.0, start + arrival.at - time.perf_counter()))
            request = GenerationRequest(
                request_id=i,
                prompt_ids=tuple(arrival.prompt),
                sampling=SamplingParams(temperature=0.0),
                max_new_tokens=arrival.new,
            )
            core.inbox.put(request)

    engine.start()
    threading.Thread(target=send, daemon=True).start()
    finished = 0
    while finished < len(arrivals):
        outputs = core.outbox.get(timeout=120)
        if outputs is None:
            raise RuntimeError("the engine exited")
        now = time.perf_counter() - start
        for request_id in outputs.request_ids:
            run.times.setdefault(request_id, []).append(now - arrivals[request_id].at)
        finished += len(outputs.finished)
    run.seconds = time.perf_counter() - start
    core.inbox.put(Shutdown())
    engine.join()
    return run


def percentile(figures: Sequence[float], p: float) -> float:
    ordered = sorted(figures)
    return ordered[min(len(ordered) - 1, math.ceil(p / 100 * len(ordered)) - 1)]


def mixed_workload(requests: int, rate: float, vocab: int) -> list[Arrival]:
    random_ = random.Random(0)
    at, arrivals = 0.0, []
    for _ in range(requests):
        at += random_.expovariate(rate)
        prompt = int(min(1024, max(8, random_.lognormvariate(math.log(128), 0.9))))
        new = int(min(256, max(4, random_.lognormvariate(math.log(40), 0.8))))
        ids = [random_.randrange(3, vocab) for _ in range(prompt)]
        arrivals.append(Arrival(at, ids, new))
    return arrivals


def batching(
    worker: ModelWorker, limits: SchedulerConfig, vocab: int, options: argparse.Namespace
) -> None:
    arrivals = mixed_workload(options.requests, options.rate, vocab)
    prompt = sum(len(a.prompt) for a in arrivals)
    print(f"{len(arrivals)} requests at {options.rate}/s, {prompt} prompt tokens\n")
    rules = (Batching.STATIC, Batching.INFLIGHT, Batching.FUSED)
    runs: dict[Batching, list[Run]] = {rule: [] for rule in rules}
    for _ in range(options.rounds):
        for rule in rules:
            # Without chunked prefill, a whole prompt must fit into the prefill budget.
            budget = 1024 if rule is Batching.INFLIGHT else limits.max_batch_prefill_tokens
            changed = replace(limits, batching=rule, max_batch_prefill_tokens=budget)
            runs[rule].append(play(worker, changed, arrivals))
    print("| batching | output tok/s | TTFT p50 / p99 ms | ITL p50 / p99 ms |")
    print("|---|---|---|---|")
    for rule in rules:
        rate = statistics.median(run.tokens / run.seconds for run in runs[rule])
        cells = [
            " / ".join(f"{1000 * _median(runs[rule], pick, p):.0f}" for p in (50, 99))
            for pick in (lambda run: run.ttfts, lambda run: run.gaps)
        ]
        print(f"| {rule.value} | {rate:.0f} | {cells[0]} | {cells[1]} |")


def _median(runs: Sequence[Run], pick: Callable[[Run], list[float]], p: float) -> float:
    return statistics.median(percentile(pick(run), p) for run in runs)


def chunks(
    worker: ModelWorker, limits: SchedulerConfig, vocab: int, options: argparse.Namespace
) -> None:
    """Decode eight streams while a 1024-token prompt arrives every 0.8 seconds."""
    random_ = random.Random(1)

    def prompt(length: int) -> list[int]:
        return [random_.randrange(3, vocab) for _ in range(length)]

    print("| tokens | delay ms | ITL of the streams p50 / p99 / max ms | TTFT of the prompts ms |")
    print("|---|---|---|---|")
    bounds = [(chunk, 0) for chunk in (32, 64, 128, 256, 512, 1024)]
    for chunk, delay in bounds + [(512, delay) for delay in (50, 100, 200)]:
        runs = []
        for _ in range(options.rounds):
            arrivals = [Arrival(0.0, prompt(16), 160) for _ in range(8)]
            arrivals += [Arrival(1.0 + 0.8 * i, prompt(1024), 2) for i in range(4)]
            changed = replace(limits, max_batch_prefill_tokens=chunk, max_prefill_delay=delay)
            runs.append(play(worker, changed, arrivals))
        gaps = [
            [later - earlier for i in range(8) for earlier, later in pairwise(run.times[i])]
            for run in runs
        ]
        figures = [statistics.median(percentile(gap, p) for gap in gaps) for p in (50, 99, 100)]
        ttft = statistics.median(run.times[i][0] for run in runs for i in range(8, 12))
        shown = " / ".join(f"{1000 * figure:.0f}" for figure in figures)
        print(f"| {chunk} | {delay or 'any'} | {shown} | {1000 * ttft:.0f} |", flush=True)


def prefix(
    worker: ModelWorker, limits: SchedulerConfig, vocab: int, options: argparse.Namespace
) -> None:
    """Send a 2,000-token conversation, then its next turn of 20 more tokens."""
    random_ = random.Random(2)
    print("| | first turn, TTFT ms | second turn, TTFT ms | share |")
    print("|---|---|---|---|")
    for enabled in (True, False):
        first, second = [], []
        for _ in range(options.rounds):
            history = [random_.randrange(3, vocab) for _ in range(2000)]
            more = [random_.randrange(3, vocab) for _ in range(20)]
            arrivals = [Arrival(0.0, history, 8), Arrival(options.pause, history + more, 8)]
            run = play(worker, replace(limits, prefix_caching=enabled), arrivals)
            first.append(run.times[0][0])
            second.append(run.times[1][0])
        a, b = statistics.median(first) * 1000, statistics.median(second) * 1000
        print(f"| prefix cache {'on' if enabled else 'off'} | {a:.0f} | {b:.0f} | {b / a:.3f} |")


@contextmanager
def loaded(model: Path, dtype: str | None) -> Iterator[tuple[ModelWorker, SchedulerConfig, int]]:
    serve = ServeConfig(
        model_id=str(model),
        dtype=dtype,
        max_total_tokens=MAX_TOTAL,
        max_batch_prefill_tokens=1024,
        max_batch_total_tokens=32 * MAX_TOTAL,
        max_batch_size=32,
        max_prefill_delay=0,
    )
    worker, _ = load_worker(serve, model)
    limits = SchedulerConfig.after_warmup(worker.warmup())
    yield worker, replace(limits, max_batch_prefill_tokens=256), worker.info().vocab_size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("what", choices=["batching", "chunks", "prefix"])
    parser.add_argument("--dtype")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rate", type=float, default=8.0, help="arrivals per second")
    parser.add_argument("--pause", type=float, default=6.0, help="seconds between the two turns")
    options = parser.parse_args()
    with loaded(options.model, options.dtype) as (worker, limits, vocab):
        {"batching": batching, "chunks": chunks, "prefix": prefix}[options.what](
            worker, limits, vocab, options
        )


if __name__ == "__main__":
    main()
