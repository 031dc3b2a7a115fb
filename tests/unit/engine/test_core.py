"""The loop as its clients see it: inbox in, outbox out, in a thread of its own."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.unit.engine.fake_speculator import DRAFTERS, FakeSpeculator
from tests.unit.engine.fake_worker import FakeWorker, continuation, unhurried
from tests.unit.engine.test_scheduler import limits, request, with_states
from tgi_cli.engine import core as core_module
from tgi_cli.engine.config import Batching, CapacityPolicy, SchedulerConfig
from tgi_cli.engine.core import MAX_CONSECUTIVE_FAILURES, EngineCore
from tgi_cli.engine.messages import (
    Cancel,
    Fail,
    FinishReason,
    GenerationRequest,
    Shutdown,
    StepOutputs,
)
from tgi_cli.engine.metrics import METHODS, STAGES, StepStats
from tgi_cli.engine.step import GrammarCompiler, Step, StepResult
from tgi_cli.errors import ShardError


class Client:
    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, tuple[FinishReason, str]] = {}

    def read(self) -> StepOutputs | None:
        outputs = self.core.outbox.get(timeout=60)
        if outputs is not None:
            for request_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
                self.tokens.setdefault(request_id, []).append(token)
            for finished in outputs.finished:
                assert finished.request_id not in self.finished, "a request ends once"
                self.finished[finished.request_id] = (finished.reason, finished.error)
        return outputs

    def read_until_finished(self, *request_ids: int) -> None:
        while not set(request_ids) <= set(self.finished):
            assert self.read() is not None, "the engine ended"


@contextmanager
def running(
    worker: FakeWorker,
    limits: SchedulerConfig,
    depth: int = 0,
    grammars: GrammarCompiler | None = None,
    requests: Iterable[GenerationRequest] = (),
    **more: Any,
) -> Iterator[Client]:
    """A client of an engine whose loop finds ``requests`` in its inbox when it starts."""
    core = EngineCore(worker, limits, depth, grammars, **more)
    for each in requests:
        core.inbox.put(each)
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    client = Client(core)
    try:
        yield client
    finally:
        core.inbox.put(Shutdown())
        while client.read() is not None:
            pass
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_from_the_inbox_are_answered_in_the_outbox(depth: int) -> None:
    with running(FakeWorker(4), limits(), depth) as client:
        for i in range(20):
            client.core.inbox.put(request(i, [i, i + 1], 5 + i))
        client.read_until_finished(*range(20))
        assert client.core.live_requests == 0
    for i in range(20):
        assert client.tokens[i] == continuation([i, i + 1], 5 + i, 1000)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_shutdown_cancels_what_is_live_and_closes_the_outbox(depth: int) -> None:
    worker = FakeWorker(4)
    unhurried(worker)
    with running(worker, limits(), depth) as client:
        client.core.inbox.put(request(1, [1], 200))
        client.read()
    assert client.finished[1][0] is FinishReason.CANCELLED


@pytest.mark.tgi_pain(2)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_failing_step_fails_only_its_requests(depth: int) -> None:
    worker = FakeWorker(4)
    bad = 66

    def fail(step: object) -> Exception | None:
        news = [new.request_id for new in worker.steps[-1].new]
        return RuntimeError("the device said no\nand more") if bad in news else None

    worker.fail_when = fail
    with running(worker, limits(max_batch_size=2), depth) as client:
        client.core.inbox.put(request(bad, [1], 5))
        client.core.inbox.put(request(1, [2], 5))
        client.core.inbox.put(request(2, [3], 5))
        client.read_until_finished(bad, 1, 2)
    assert client.finished[bad] == (FinishReason.ERROR, "RuntimeError: the device said no")
    assert client.finished[2][0] is FinishReason.LENGTH
    assert client.tokens[2] == continuation([3], 5, 1000)


def test_an_engine_whose_every_step_fails_ends() -> None:
    worker = FakeWorker(4, fail_when=lambda step: RuntimeError("lost"))
    core = EngineCore(worker, limits(max_batch_size=1))
    for i in range(MAX_CONSECUTIVE_FAILURES + 2):
        core.inbox.put(request(i, [1], 1))
    with pytest.raises(RuntimeError, match="in a row"):
        core.run()
    client = Client(core)
    while client.read() is not None:
        pass
    reasons = [client.finished[i][0] for i in range(MAX_CONSECUTIVE_FAILURES + 2)]
    assert reasons == [FinishReason.ERROR] * MAX_CONSECUTIVE_FAILURES + [FinishReason.CANCELLED] * 2


@pytest.mark.tgi_pain(4)
@pytest.mark.parametrize("seed", range(24))
def test_random_arrivals_and_cancellations_change_no_tokens(seed: int) -> None:
    """The property that matters, over every switch the engine has."""
    random_ = random.Random(seed)
    block_size = random_.choice([1, 4, 16])
    bounds = limits(
        block_size=block_size,
        num_blocks=-(-96 // block_size) + random_.choice([0, 2, 40]),
        max_total_tokens=96,
        max_batch_prefill_tokens=random_.choice([1, 3, 16, 64]),
        max_batch_size=random_.choice([1, 3, 8]),
        prefix_caching=random_.random() < 0.7,
        batching=random_.choice(list(Batching)),
        capacity_policy=random_.choice(list(CapacityPolicy)),
    )
    bounds = with_states(bounds, [None, 0, 2, 20][seed % 4])
    families = [[random_.randrange(1000) for _ in range(40)] for _ in range(3)]
    worker = FakeWorker(block_size, state_slots=bounds.num_state_slots)
    with running(worker, bounds, depth=random_.choice([0, 1])) as client:
        expected: dict[int, list[int]] = {}
        live: list[int] = []
        for i in range(60):
            prompt = random_.choice(families)[: random_.randint(1, 40)]
            prompt = prompt + [random_.randrange(1000) for _ in range(random_.randint(0, 12))]
            new = random_.randint(1, 96 - len(prompt))
            expected[i] = continuation(prompt, new, 1000)
            client.core.inbox.put(request(i, prompt, new, priority=random_.choice([0, 0, 1])))
            live.append(i)
            if random_.random() < 0.2:
                client.core.inbox.put(Cancel(random_.choice(live)))
            if random_.random() < 0.5 and client.core.live_requests:
                client.read()
        client.read_until_finished(*expected)
        assert client.core.metrics.load.used_blocks == 0
        assert client.core.metrics.load.used_state_slots == 0
    for i, answer in expected.items():
        seen = client.tokens.get(i, [])
        if client.finished[i][0] is FinishReason.CANCELLED:
            assert seen == answer[: len(seen)]
        else:
            assert seen == answer


def test_on_step_is_called_for_every_step() -> None:
    seen: list[StepStats] = []
    core = EngineCore(FakeWorker(4), limits(), on_step=seen.append)
    core.inbox.put(request(1, range(8), 5))
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    client = Client(core)
    client.read_until_finished(1)
    core.inbox.put(Shutdown())
    thread.join(timeout=60)
    assert [stats["Iteration Counter"] for stats in seen] == [1, 2, 3, 4, 5]
    assert [stats["Total Context Tokens"] for stats in seen] == [8, 0, 0, 0, 0]
    assert [stats["Generation Requests"] for stats in seen] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("depth", [0, 1])
def test_every_step_is_counted_and_timed(depth: int) -> None:
    worker = FakeWorker(
        4, fail_when=lambda step: RuntimeError() if len(worker.steps) == 6 else None
    )
    core = EngineCore(worker, limits(), depth)
    core.inbox.put(request(1, range(8), 30))
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    client = Client(core)
    client.read_until_finished(1)
    core.inbox.put(request(2, range(8), 3))
    client.read_until_finished(2)
    core.inbox.put(Shutdown())
    thread.join(timeout=60)
    metrics = core.metrics
    histograms, counts = metrics.histograms, metrics.counts
    timed = {method: sum(histograms["total", method].counts) for method in METHODS}
    assert sum(timed.values()) + 1 == core.steps == metrics.load.steps
    assert (counts["failed", "prefill"], counts["failed", "decode"]) == (0, 1)
    assert counts["launched", "decode"] == timed["decode"] + 1
    assert counts["launched", "prefill"] == timed["prefill"] == 2
    assert sum(histograms["schedule", "join"].counts) == 2
    for method in METHODS:
        sums = [histograms[stage, method].sum for stage in STAGES]
        assert min(sums) >= 0
        assert sums[0] == pytest.approx(sum(sums[1:]))
        for stage in STAGES:
            assert sum(histograms[stage, method].counts) == timed[method]


@pytest.mark.parametrize(("depth", "rests"), [(0, 0.0), (1, 0.0), (1, 0.7)])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafts_change_no_tokens(kind: str, depth: int, rests: float) -> None:
    prompts = {i: list(range(100 * (i % 3), 100 * (i % 3) + 5 + 7 * i)) for i in range(1, 9)}
    answers = {i: continuation(prompt, 40, 1000) for i, prompt in prompts.items()}
    speculator = FakeSpeculator(kind, answers.__getitem__, rests=rests)
    timed: list[Step] = []
    speculator.timed = lambda step, seconds: timed.append(step)  # type: ignore[method-assign]
    core = EngineCore(FakeWorker(4), limits(), depth, speculator=speculator)
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    client = Client(core)
    for i, prompt in prompts.items():
        core.inbox.put(request(i, prompt, 40))
    client.read_until_finished(*prompts)
    core.inbox.put(Shutdown())
    thread.join(timeout=60)
    assert client.tokens == answers
    assert (speculator.accepted > 30) == (kind in ("perfect", "partly"))
    load = core.metrics.load
    assert (load.drafted_tokens, load.accepted_tokens) == (speculator.drafted, speculator.accepted)
    assert load.context_tokens == load.prompt_tokens - load.reused_tokens
    assert len(timed) == core.steps, "each step that has been applied"
    assert sum(step.num_drafts for step in timed) == speculator.drafted


class _Counting(FakeWorker):
    """Counts the steps in flight at each launch."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.in_flight = 0
        self.beside: list[int] = []

    def launch(self, step: Step) -> list[tuple[int, int, bytes]]:
        self.beside.append(self.in_flight)
        self.in_flight += 1
        return super().launch(step)

    def sample(self, handle: object, masks: object = None) -> Any:
        pending = super().sample(handle, masks)

        def wait() -> StepResult:
            self.in_flight -= 1
            return pending.result

        pending.wait = wait  # type: ignore[method-assign]
        return pending


@pytest.mark.parametrize(("rests", "most"), [(0.0, 0), (1.0, 1)])
def test_a_step_stays_in_flight_where_nothing_is_drafted(rests: float, most: int) -> None:
    """Without drafts it is scheduled before the tokens of the one before it are known."""
    worker = _Counting(4)
    speculator = FakeSpeculator("perfect", lambda key: answers[key], rests=rests)
    answers = {key: continuation([key, 2], 40, 1000) for key in range(3)}
    with running(worker, limits(), 1, speculator=speculator) as client:
        for key in answers:
            client.core.inbox.put(request(key, [key, 2], 40))
        client.read_until_finished(*answers)
    assert client.tokens == answers
    decodes = [
        beside
        for beside, step in zip(worker.beside, worker.steps, strict=True)
        if step.num_decodes and not step.num_prefill_tokens
    ]
    assert max(decodes) == most
    assert (speculator.drafted > 0) == (rests < 1)
    if rests:
        assert sum(decodes) > len(decodes) / 2


class _Lost(FakeWorker):
    """Loses a shard in its third step, at launch or when the result is awaited."""

    at_launch = True

    def launch(self, step: Step) -> list[tuple[int, int, bytes]]:
        if self.at_launch and len(self.steps) == 2:
            raise ShardError("shard 1 was killed", "see its log")
        return super().launch(step)

    def sample(self, handle: object, masks: object = None) -> Any:
        pending = super().sample(handle, masks)
        if not self.at_launch and len(self.steps) == 3:

            def wait() -> StepResult:
                raise ShardError("shard 1 was killed", "see its log")

            pending.wait = wait  # type: ignore[method-assign]
        return pending


def _run_to_its_end(core: EngineCore) -> tuple[Client, BaseException]:
    """What clients saw of a loop that fails, and how it failed."""
    client, failures = Client(core), []

    def run() -> None:
        try:
            core.run()
        except ShardError as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while client.read() is not None:
        pass
    thread.join(timeout=60)
    return client, failures[0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("at_launch", [True, False])
def test_a_lost_shard_ends_all_requests_and_the_loop_at_once(at_launch: bool, depth: int) -> None:
    worker = _Lost(4)
    worker.at_launch = at_launch
    core = EngineCore(worker, limits(max_batch_size=2), depth)
    for i in range(3):  # two run, one waits
        core.inbox.put(request(i, [i], 50))
    client, failure = _run_to_its_end(core)
    cause = "shard 1 was killed"
    assert client.finished == dict.fromkeys(range(3), (FinishReason.ERROR, cause))
    assert isinstance(failure, ShardError)
    assert (failure.cause, failure.remedy) == (cause, "see its log")


def test_a_fail_message_ends_an_idle_loop() -> None:
    core = EngineCore(FakeWorker(4), limits())
    core.inbox.put(request(1, [1], 50))
    core.inbox.put(request(2, [1], 50))
    core.inbox.put(Cancel(2))
    core.inbox.put(Fail("shard 2 has not answered", "it hangs"))
    client, failure = _run_to_its_end(core)
    assert client.finished[1] == (FinishReason.ERROR, "shard 2 has not answered")
    assert client.finished[2][0] is FinishReason.CANCELLED, "ended before the failure"
    assert str(failure) == "shard 2 has not answered"


def test_progress_stops_during_a_step_that_does_not_end() -> None:
    """What a watchdog sees of it; and nothing moves, nor has to, in an idle engine."""
    stuck, go_on = threading.Event(), threading.Event()

    def wait(_step: Step) -> None:
        stuck.set()
        go_on.wait(60)

    worker = FakeWorker(4, fail_when=wait)
    with running(worker, limits()) as client:
        assert (client.core.progress, client.core.live_requests) == (0, 0)
        client.core.inbox.put(request(1, [1], 2))
        assert stuck.wait(60)
        before = client.core.progress
        time.sleep(0.05)
        assert (client.core.progress, client.core.live_requests) == (before, 1)
        go_on.set()
        client.read_until_finished(1)
        assert client.core.progress == 2


def test_memory_may_be_returned_some_steps_after_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "IDLE_SECONDS", 60.0)
    called = threading.Semaphore(0)
    with running(FakeWorker(8), limits(), on_idle=called.release) as client:
        for number, length in enumerate((core_module.SETTLED_STEPS, 30, 30)):
            client.core.inbox.put(request(number, [1], length))
            client.read_until_finished(number)
            assert called.acquire(blocking=False) == (number > 0)
            assert not called.acquire(blocking=False), "once after each prompt"


def test_an_engine_without_requests_rests_once_after_each_time_of_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_module, "IDLE_SECONDS", 0.01)
    rested = threading.Semaphore(0)
    with running(FakeWorker(4), limits(), on_idle=rested.release) as client:
        assert rested.acquire(timeout=60), "it may have worked before there were requests"
        for number in range(3):
            client.core.inbox.put(request(number, [1], 5))
            client.read_until_finished(number)
            assert rested.acquire(timeout=60)
        assert not rested.acquire(timeout=0.1), "it rests already"
    assert client.tokens[2] == continuation([1], 5, 1000)
