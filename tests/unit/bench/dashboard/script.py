"""Runs that never ran: the same records and events whenever they are asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tgi_cli.bench.events import (
    BatchDone,
    BatchRecord,
    BenchRequestRecord,
    BenchRun,
    BenchStep,
    BenchTarget,
    ClientHealth,
    Event,
    RequestDone,
    RunEnded,
    StepEnded,
    StepProgress,
    StepRecord,
    StepStarted,
)

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def batch_run(sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32), runs: int = 10) -> BenchRun:
    """A batch sweep on a shard, as text-generation-benchmark does it."""
    return BenchRun(
        created=1_800_000_000.0,
        command=["tgi", "bench"],
        tgi="1.0",
        machine={"processor": "one", "cores": 2},
        target=BenchTarget(kind="shard-v3", address="/tmp/socket-0", model=MODEL),
        workload={"sequence_length": 10, "decode_length": 8},
        steps=[batch_step(size, runs) for size in sizes],
    )


def batch_step(size: int, runs: int = 10, slower: float = 1.0) -> StepRecord:
    """One size of it; one warm-up run more."""
    noise = random.Random(size)
    batches = [
        BatchRecord(
            batch_size=size,
            sequence_length=10,
            decode_length=8,
            prefill=slower * (0.020 + 0.004 * size) * noise.uniform(0.95, 1.15),
            decodes=[slower * (0.011 + 0.0004 * size) * noise.uniform(0.9, 1.3) for _ in range(7)],
            warmup=number == 0,
        )
        for number in range(runs + 1)
    ]
    step = BenchStep(kind="batch", value=size, label=str(size), warmup=1, requests=runs + 1)
    return StepRecord(step=step, began=0.0, duration=2.0, batches=batches)


def http_run(
    clients: tuple[int, ...] = (1, 4, 16), requests: int = 60, slower: float = 1.0
) -> BenchRun:
    """A concurrency sweep over HTTP; at 16 clients some requests are refused."""
    return BenchRun(
        created=1_800_000_000.0,
        command=["tgi", "bench", "--url", "http://127.0.0.1:3000"],
        tgi="1.0",
        machine={"processor": "one", "cores": 2},
        target=BenchTarget(kind="tgi", address="http://127.0.0.1:3000", model=MODEL),
        workload={"prompts": "fixed 64", "seed": 0},
        steps=[http_step(number, requests, slower) for number in clients],
        slo={"ttft": 100.0, "tpot": 30.0},
    )


def http_step(
    clients: int, requests: int = 60, slower: float = 1.0, behind: bool = False
) -> StepRecord:
    """So many clients, each waiting for its answer before it asks again."""
    noise = random.Random(clients)
    free = [0.0] * clients
    records = []
    for index in range(requests):
        who = min(range(clients), key=free.__getitem__)
        due = free[who]
        sent = due + noise.uniform(0.0, 0.004) * clients
        first = sent + slower * (0.03 + 0.004 * clients) * noise.uniform(0.9, 1.6)
        refused = clients >= 16 and index % 9 == 4
        arrivals, now = [], first
        for _ in range(24):
            arrivals.append(now)
            now += slower * (0.010 + 0.0005 * clients) * noise.uniform(0.9, 1.2)
        last = first if refused else arrivals[-1] + 0.001
        free[who] = last
        records.append(
            BenchRequestRecord(
                index=index,
                scheduled=due,
                dispatched=sent,
                arrivals=[] if refused else arrivals,
                counts=[] if refused else [1] * 24,
                finished=last,
                input_tokens=64,
                output_tokens=0 if refused else 24,
                counted_by="usage",
                error="http 429" if refused else None,
                detail="Model is overloaded" if refused else "",
                finish_reason="" if refused else "length",
                warmup=index < clients // 4,
            )
        )
    step = BenchStep(kind="concurrency", value=clients, label=str(clients), requests=requests)
    return StepRecord(
        step=step,
        began=1_800_000_000.0,
        duration=max(record.finished for record in records),
        requests=sorted(records, key=lambda record: record.finished),
        client=ClientHealth(behind=behind, reason="its clock ticked 0.2 s late" if behind else ""),
        server={"tgi_queue_size": 1.5, "tgi_batch_current_size": float(clients)},
    )


def events(run: BenchRun, ended: bool = True) -> Iterator[Event]:
    """What a driver tells of a run, in its order."""
    for index, record in enumerate(run.steps):
        yield from step_events(index, len(run.steps), record)
    if ended:
        yield RunEnded(run)


def step_events(
    index: int, total: int, record: StepRecord, upto: int | None = None
) -> Iterator[Event]:
    """Those of one step; with ``upto`` only its first so many results, and no end."""
    yield StepStarted(index, total, record.step)
    done: list[BatchDone | RequestDone] = [BatchDone(index, batch) for batch in record.batches]
    done += [RequestDone(index, request) for request in record.requests]
    errors = 0
    for number, event in enumerate(done[:upto], start=1):
        yield event
        if isinstance(event, RequestDone):
            errors += event.record.error is not None
        if number % 5 == 0 or number == upto:
            yield StepProgress(
                index=index,
                done=number,
                expected=len(done),
                elapsed=number * 0.1,
                in_flight=int(record.step.value),
                errors=errors,
                tokens_per_second=123.4,
            )
    if upto is None:
        yield StepEnded(index, record)
