"""A server that is arithmetic: so many places, each takes a request, the rest wait in a queue."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tgi_cli.bench.events import (
    BatchRecord,
    BenchRequestRecord,
    BenchRun,
    BenchStep,
    BenchTarget,
    StepRecord,
)
from tgi_cli.bench.plan import BenchPlan


@dataclass(frozen=True)
class Server:
    """First come, first served, in ``places`` at once.

    Attributes:
        prefill, token: seconds to the first token, and for each after it.
        spread: of both, as a share; exponential where it is 1.
        slowed: factor on all times.
    """

    places: int = 4
    prefill: float = 0.05
    token: float = 0.01
    tokens: int = 20
    spread: float = 0.05
    slowed: float = 1.0
    seed: int = 0

    @property
    def service(self) -> float:
        """Seconds that a request takes in the mean once it has a place."""
        return self.slowed * (self.prefill + self.token * (self.tokens - 1))

    @property
    def capacity(self) -> float:
        """Requests per second at most."""
        return self.places / self.service

    def answer(self, step: BenchStep) -> StepRecord:
        """The record of a step; bounded by requests, else by seconds."""
        dice = Random(f"{self.seed} {step.kind} {step.value}")
        if step.kind == "concurrency":
            requests = self._closed(step, dice)
        else:
            requests = self._open(step, dice)
        counted = [request for request in requests if not request.warmup]
        start = min(request.scheduled for request in counted)
        end = max(request.finished for request in counted)
        return StepRecord(step=step, began=1e9, duration=end - start, requests=requests)

    def _closed(self, step: BenchStep, dice: Random) -> list[BenchRequestRecord]:
        clients = [0.0] * int(step.value)
        free = [0.0] * self.places
        requests: list[BenchRequestRecord] = []
        while not self._over(step, clients[0], len(requests)):
            asked = heapq.heappop(clients)
            record = self._serve(len(requests), asked, free, dice, step)
            requests.append(record)
            heapq.heappush(clients, record.finished)
        return requests

    def _open(self, step: BenchStep, dice: Random) -> list[BenchRequestRecord]:
        free = [0.0] * self.places
        requests: list[BenchRequestRecord] = []
        now = 0.0
        while not self._over(step, now, len(requests)):
            now += dice.expovariate(step.value)
            requests.append(self._serve(len(requests), now, free, dice, step))
        return requests

    def _over(self, step: BenchStep, now: float, done: int) -> bool:
        if step.requests is not None and done >= step.requests:
            return True
        return step.seconds is not None and now >= step.seconds and done > step.warmup

    def _serve(
        self, index: int, asked: float, free: list[float], dice: Random, step: BenchStep
    ) -> BenchRequestRecord:
        now = max(asked, heapq.heappop(free))
        arrivals = []
        for number in range(self.tokens):
            mean = self.slowed * (self.token if number else self.prefill)
            now += mean * (1 - self.spread) + dice.expovariate(1 / (mean * self.spread))
            arrivals.append(now)
        heapq.heappush(free, now)
        return BenchRequestRecord(
            index=index,
            scheduled=asked,
            dispatched=asked,
            arrivals=arrivals,
            counts=[1] * self.tokens,
            finished=now,
            input_tokens=100,
            output_tokens=self.tokens,
            counted_by="usage",
            warmup=index < step.warmup,
        )

    def batch(self, step: BenchStep) -> StepRecord:
        """The record of closed batches."""
        dice = Random(f"{self.seed} {step.value}")

        def call(mean: float) -> float:
            return mean * self.slowed * dice.uniform(1 - self.spread, 1 + self.spread)

        runs = [
            BatchRecord(
                batch_size=int(step.value),
                sequence_length=10,
                decode_length=8,
                prefill=call(self.prefill * step.value),
                decodes=[call(self.token) for _ in range(7)],
                warmup=number < step.warmup,
            )
            for number in range(step.requests or 0)
        ]
        return StepRecord(step=step, began=1e9, duration=1.0, batches=runs)


def played(
    plan: BenchPlan, answer: Callable[[BenchStep], StepRecord]
) -> tuple[list[StepRecord], list[str]]:
    """A plan's steps as a server answers them, and what the plan found."""
    search = plan.search()
    records = [answer(next(search))]
    while True:
        try:
            step = search.send(records[-1])
        except StopIteration as end:
            return records, list(end.value)
        records.append(answer(step))
        assert len(records) < 100, "the search does not end"


def saved(steps: list[StepRecord], **fields: Any) -> BenchRun:
    """A whole run of these steps."""
    about: dict[str, Any] = {
        "created": 1.7e9,
        "command": ["tgi", "bench"],
        "tgi": "1.0",
        "machine": {"processor": "a processor", "cores": 2},
        "target": BenchTarget(kind="tgi", address="http://127.0.0.1:3000", model="a/model"),
        "workload": {"load": "concurrency", "seed": 0},
    }
    return BenchRun(steps=steps, **{**about, **fields})


def request(
    index: int = 0,
    *,
    at: float = 0.0,
    late: float = 0.0,
    arrivals: tuple[float, ...] = (1.0, 2.0, 4.0),
    counts: tuple[int, ...] | None = None,
    error: str | None = None,
    **fields: Any,
) -> BenchRequestRecord:
    """A request whose times can be reckoned by hand."""
    given = counts or (1,) * len(arrivals)
    about: dict[str, Any] = {
        "finished": (arrivals[-1] if arrivals else at + late) + 0.5,
        "input_tokens": 10,
        "output_tokens": sum(given),
        "counted_by": "usage",
    }
    return BenchRequestRecord(
        index=index,
        scheduled=at,
        dispatched=at + late,
        arrivals=list(arrivals),
        counts=list(given),
        error=error,
        **{**about, **fields},
    )
