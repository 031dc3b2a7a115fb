"""Externally driven steps beside the scheduler's own: exact results, and no leaks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.engine.fake_grammar import FakeCompiler, slots
from tests.unit.engine.fake_speculator import DRAFTERS, FakeSpeculator
from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.engine.test_core import Client, running
from tests.unit.engine.test_scheduler import limits, request, with_states
from tgi_cli.engine import reserved_sequences
from tgi_cli.engine.config import CapacityPolicy, SchedulerConfig
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import (
    Advance,
    Advanced,
    AdvanceError,
    AdvanceFault,
    Cancel,
    Drop,
    FinishReason,
    GenerationRequest,
    LoadAdapter,
    Shutdown,
)
from tgi_cli.engine.metrics import StepStats

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


class Caller:
    """Drives sequences of one engine and records their tokens."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, FinishReason] = {}
        self.pending: dict[int, int] = {}
        self.unanswered: set[Future[Advanced]] = set()

    def send(self, *new: GenerationRequest, **more: Any) -> Future[Advanced]:
        values: dict[str, Any] = {
            "new_targets": tuple(len(r.prompt_ids) for r in new),
            "prefill_budget": 64,
        }
        answer: Future[Advanced] = Future()
        self.unanswered.add(answer)
        answer.add_done_callback(self.unanswered.discard)
        self.core.inbox.put(Advance(new=new, answer=answer, **(values | more)))
        return answer

    def advance(self, *new: GenerationRequest, **more: Any) -> Advanced:
        done = self.send(*new, **more).result(timeout=60)
        for outputs in done.outputs:
            for request_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
                self.tokens.setdefault(request_id, []).append(token)
            self.ended |= {f.request_id: f.reason for f in outputs.finished}
        self.pending = done.pending
        return done

    def fits(self, *new: GenerationRequest, **more: Any) -> bool:
        """Whether an Advance fits."""
        try:
            self.advance(*new, **more)
        except AdvanceError as error:
            if error.fault is AdvanceFault.NO_CAPACITY:
                return False
            raise
        return True

    def run_out(self, *ids: int) -> None:
        """Advance these until all have ended."""
        while running := tuple(i for i in ids if i not in self.ended):
            self.advance(running=running)

    def drop(self, *ids: int) -> None:
        self.core.inbox.put(Drop(ids))


@contextmanager
def engine(
    bounds: SchedulerConfig,
    depth: int = 0,
    worker: FakeWorker | None = None,
    grammars: Any = None,
    **more: Any,
) -> Iterator[tuple[Caller, Client]]:
    """An engine with a client of either scheduler, checked for leaks when it has ended."""
    worker = worker or FakeWorker(bounds.block_size, state_slots=bounds.num_state_slots)
    with running(worker, bounds, depth, grammars, **more) as client:
        yield Caller(client.core), client
    assert client.core.metrics.load.used_blocks == 0, "blocks were lost"
    assert client.core.metrics.load.used_state_slots == 0, "state slots were lost"
    free_rows = client.core._scheduler.batch.resources.free_rows
    assert sorted(free_rows) == list(range(bounds.max_batch_size)), "rows were lost"


class Pace:
    """Lets the steps of a worker end only where a test has come so far.

    One ends if it is allowed, or while a call of ``caller`` waits for an answer.
    """

    def __init__(self, worker: FakeWorker, caller: Caller) -> None:
        self._caller = caller
        self._allowed = threading.Semaphore(0)
        self._hurries = False
        worker.fail_when = self._wait

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)

    def hurry(self) -> None:
        """Nothing waits from now on."""
        self._hurries = True

    def _wait(self, _step: object) -> None:
        end = time.monotonic() + 60
        while not (self._hurries or self._caller.unanswered):
            if self._allowed.acquire(timeout=0.01):
                return
            assert time.monotonic() < end, "nobody allows a step"


def fault_of(answer: Future[Advanced]) -> AdvanceError:
    with pytest.raises(AdvanceError) as caught:
        answer.result(timeout=60)
    return caught.value


def in_blocks(core: EngineCore) -> int:
    return core.metrics.load.used_blocks


@DEPTHS
def test_a_step_computes_exactly_the_named_sequences(depth: int) -> None:
    worker = FakeWorker(4)
    with engine(limits(), depth, worker) as (caller, _):
        caller.advance(request(1, range(10), 5))
        caller.advance(request(2, range(20, 26), 5))
        assert {i: len(tokens) for i, tokens in caller.tokens.items()} == {1: 1, 2: 1}
        caller.advance(running=(1,))
        caller.advance(running=(2, 1))
        assert {i: len(tokens) for i, tokens in caller.tokens.items()} == {1: 3, 2: 2}
        caller.run_out(1, 2)
    assert caller.ended == {1: FinishReason.LENGTH, 2: FinishReason.LENGTH}
    assert caller.tokens[1] == continuation(range(10), 5, 1000)
    assert caller.tokens[2] == continuation(range(20, 26), 5, 1000)
    assert [step.num_decodes for step in worker.steps[:4]] == [0, 0, 1, 2]


@DEPTHS
def test_a_prompt_is_computed_in_chunks_beside_decodes(depth: int) -> None:
    with engine(limits(max_batch_prefill_tokens=16), depth) as (caller, _):
        caller.advance(request(1, range(5), 30))
        caller.advance(request(2, range(50), 3), running=(1,), new_targets=(20,), prefill_budget=0)
        assert caller.pending == {2: 30}, "its first chunk was longer than one step may be"
        assert 2 not in caller.tokens
        caller.advance(running=(1, 2), prefill_budget=7)
        assert caller.pending == {2: 23}
        caller.advance(running=(1,))
        caller.advance(running=(1, 2), prefill_budget=23)
        assert caller.pending == {}
        caller.run_out(1, 2)
    assert caller.tokens[1] == continuation(range(5), 30, 1000)
    assert caller.tokens[2] == continuation(range(50), 3, 1000)


def test_prompts_share_their_callers_prefill_budget() -> None:
    with engine(limits()) as (caller, _):
        new = [request(i, range(i, i + 40), 2) for i in range(3)]
        caller.advance(*new, new_targets=(10, 20, 30))
        assert caller.pending == {0: 30, 1: 20, 2: 10}
        caller.advance(running=(0, 1, 2), prefill_budget=45)
        assert caller.pending == {1: 5, 2: 10}
        caller.run_out(0, 1, 2)
    for i in range(3):
        assert caller.tokens[i] == continuation(range(i, i + 40), 2, 1000)


class InOrder(FakeWorker):
    """Whose results must be waited for in the order of the launches, and are all the latest."""

    waited: int = 0

    def sample(self, handle: object, masks: Any = None) -> Any:
        pending, number = super().sample(handle, masks), len(self.steps)

        def wait() -> Any:
            self.waited += 1
            assert self.waited == number, "a step began before the one before it had ended"
            return pending.result

        return SimpleNamespace(wait=wait)


def test_steps_of_both_kinds_are_counted_and_timed() -> None:
    seen: list[StepStats] = []
    core = EngineCore(FakeWorker(4), limits(), 1, on_step=seen.append)
    loop = threading.Thread(target=core.run, daemon=True)
    loop.start()
    caller, client = Caller(core), Client(core)
    core.inbox.put(request(1, range(10), 5))
    caller.advance(request(100, range(20, 28), 3))
    caller.run_out(100)
    client.read_until_finished(1)
    core.inbox.put(Shutdown())
    loop.join(timeout=60)
    assert [stats["Iteration Counter"] for stats in seen] == list(range(1, 9))
    assert sum(int(stats["Total Context Tokens"]) for stats in seen) == 18
    assert sum(int(stats["Generation Requests"]) for stats in seen) == 4 + 2
    metrics = core.metrics
    assert not any(n for (name, _), n in metrics.counts.items() if name == "joined")
    assert metrics.load.prompt_tokens == metrics.load.context_tokens == 18
    assert sum(metrics.histograms["total", "prefill"].counts) == 2
    assert sum(metrics.histograms["total", "decode"].counts) == 6
    assert core.steps == 8


def test_results_in_flight_are_awaited_before_an_external_step() -> None:
    worker = InOrder(4)
    with engine(limits(), 1, worker) as (caller, client):
        client.core.inbox.put(request(1, range(10), 100))
        caller.advance(request(100, range(10), 20))
        caller.run_out(100)
        client.read_until_finished(1)
    assert client.tokens[1] == continuation(range(10), 100, 1000)


def test_both_schedulers_find_prefixes_that_the_other_cached() -> None:
    worker = FakeWorker(4)
    with engine(limits(), 0, worker) as (caller, client):
        caller.advance(request(1, range(40), 1))
        client.core.inbox.put(request(2, range(40), 1))
        client.read_until_finished(2)
        caller.advance(request(3, [*range(40), 41, 42], 2), new_targets=(8,))
        assert caller.pending == {3: 1}, "a first chunk within the cached prefix computes one token"
        caller.run_out(3)
    assert [sum(step.counts) for step in worker.steps] == [40, 4, 1, 1, 1]
    assert caller.tokens[3] == continuation([*range(40), 41, 42], 2, 1000)


@DEPTHS
def test_a_reserved_sequence_takes_all_its_blocks_at_once_and_returns_them(depth: int) -> None:
    with engine(limits(), depth) as (caller, _):
        caller.advance(request(1, range(10), 11), request(2, range(3), 100))
        assert in_blocks(caller.core) == 5 + 26
        caller.drop(2)
        caller.advance(running=(1,))
        assert in_blocks(caller.core) == 5
        assert fault_of(caller.send(running=(1, 2))).request_id == 2
        caller.advance(running=(1,))
        assert caller.tokens[1] == continuation(range(10), 3, 1000)
        caller.drop(1, 99)


@DEPTHS
def test_scheduled_sequences_are_preempted_for_reserved_ones_without_change(depth: int) -> None:
    worker = FakeWorker(4)
    with engine(limits(num_blocks=32, max_batch_size=3), depth, worker) as (caller, client):
        pace = Pace(worker, caller)
        for i in range(3):
            client.core.inbox.put(request(i, [i, 7], 60))
        pace.allow(5)
        while not all(len(client.tokens.get(i, [])) > 1 for i in range(3)):
            client.read()
        caller.advance(request(100, range(30), 60))
        pace.hurry()
        caller.run_out(100)
        client.read_until_finished(0, 1, 2)
        assert client.core.metrics.load.preemptions > 0
    assert caller.tokens[100] == continuation(range(30), 60, 1000)
    for i in range(3):
        assert client.tokens[i] == continuation([i, 7], 60, 1000)


def test_no_sequence_is_preempted_in_vain() -> None:
    worker = FakeWorker(4)
    with engine(limits(num_blocks=32), 0, worker) as (caller, client):
        pace = Pace(worker, caller)
        client.core.inbox.put(request(1, range(10), 30))
        pace.allow(1)
        client.read()
        caller.advance(request(100, range(100, 150), 30))
        error = fault_of(caller.send(request(101, range(200, 260), 30), running=(100,)))
        assert (error.fault, error.request_id) == (AdvanceFault.NO_CAPACITY, 101)
        pace.hurry()
        client.read_until_finished(1)
        caller.run_out(100)
        assert client.core.metrics.load.preemptions == 0
    assert client.tokens[1] == continuation(range(10), 30, 1000)


def test_sequences_with_the_guarantee_are_not_preempted() -> None:
    policy = CapacityPolicy.GUARANTEED_NO_EVICT
    worker = FakeWorker(4)
    bounds = limits(num_blocks=32, capacity_policy=policy)
    with engine(bounds, 0, worker) as (caller, client):
        pace = Pace(worker, caller)
        client.core.inbox.put(request(1, range(10), 100))
        pace.allow(1)
        client.read()
        error = fault_of(caller.send(request(100, range(10), 40)))
        assert error.fault is AdvanceFault.NO_CAPACITY
        assert error.request_id == 100
        caller.advance(request(101, range(8), 2))
        pace.hurry()
        client.read_until_finished(1)
        caller.run_out(101)
        assert client.core.metrics.load.preemptions == 0
    assert client.tokens[1] == continuation(range(10), 100, 1000)


@pytest.mark.parametrize(
    ("bounds", "fits", "cause"),
    [
        ({"num_blocks": 10}, 0, "it needs 35 tokens of the KV cache, and of its 40 only 4"),
        ({"max_batch_size": 1}, 0, "all 1 rows of the batch are in use"),
        ({"max_batch_size": 2}, 1, "all 2 rows of the batch are in use"),
    ],
)
def test_a_refusal_names_the_first_request_that_does_not_fit(
    bounds: dict[str, Any], fits: int, cause: str
) -> None:
    with engine(limits(**bounds)) as (caller, _):
        caller.advance(request(1, range(30), 7))
        before = in_blocks(caller.core)
        new = [request(10 + i, range(30), 6) for i in range(2)]
        error = fault_of(caller.send(*new, running=(1,)))
        assert (error.fault, error.request_id) == (AdvanceFault.NO_CAPACITY, 10 + fits)
        assert cause in error.cause
        assert in_blocks(caller.core) == before, "no sequence got blocks"
        caller.run_out(1)
        caller.advance(new[0])
        caller.run_out(10)
    assert caller.tokens[1] == continuation(range(30), 7, 1000)
    assert caller.tokens[10] == continuation(range(30), 6, 1000)


@pytest.mark.parametrize(
    ("sent", "cause"),
    [
        ((request(2, [], 5),), "the prompt has no tokens"),
        ((request(2, [1], 5), request(3, range(250), 9)), "more than max_total_tokens (256)"),
        ((request(2, [1], 5), request(1, [1], 5)), "request id 1 is in use"),
        ((request(2, [1], 5, adapter_id=4),), "adapter id 4 is not loaded"),
        ((request(2, [1], 5, grammar="x"),), "no support for grammars"),
    ],
)
def test_an_invalid_request_refuses_its_whole_step(
    sent: Sequence[GenerationRequest], cause: str
) -> None:
    with engine(limits()) as (caller, _):
        caller.advance(request(1, range(4), 3))
        error = fault_of(caller.send(*sent, running=(1,)))
        assert error.fault is AdvanceFault.INVALID
        assert error.request_id == sent[-1].request_id
        assert cause in error.cause
        caller.run_out(1)
        assert caller.core.driven_requests == 0
    assert caller.tokens[1] == continuation(range(4), 3, 1000)


@DEPTHS
def test_a_failing_step_ends_its_own_sequences_alone(depth: int) -> None:
    worker = FakeWorker(4)
    worker.fail_when = lambda step: (
        RuntimeError("the device said no\nand more") if len(step.rows) == 2 else None
    )
    with engine(limits(), depth, worker) as (caller, client):
        client.core.inbox.put(request(5, [5], 50))
        caller.advance(request(1, range(4), 30))
        caller.advance(request(2, range(6), 30))
        caller.advance(request(3, range(7), 4))
        caller.advance(request(4, range(30), 4), new_targets=(9,))
        error = fault_of(caller.send(running=(1, 2, 4), prefill_budget=0))
        assert error.fault is AdvanceFault.FAILED
        assert error.cause == "RuntimeError: the device said no"
        for gone in (1, 2, 4):
            assert fault_of(caller.send(running=(gone,))).fault is AdvanceFault.INVALID
        caller.run_out(3)
        client.read_until_finished(5)
    assert caller.tokens[3] == continuation(range(7), 4, 1000)
    assert client.tokens[5] == continuation([5], 50, 1000)


def test_a_failing_row_ends_its_sequence_alone() -> None:
    worker = FakeWorker(4)
    worker.poison = {2}
    with engine(limits(), 0, worker) as (caller, _):
        caller.advance(request(1, range(4), 3), request(2, range(5), 3))
        assert caller.ended == {2: FinishReason.ERROR}
        caller.run_out(1)
    assert caller.tokens[1] == continuation(range(4), 3, 1000)


@DEPTHS
def test_idle_sequences_are_parked_and_resume(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserved_sequences, "IDLE_SECONDS", 0.2)
    with engine(limits(num_blocks=32), depth) as (caller, client):
        caller.advance(request(1, range(20), 100))  # 30 of the 32 blocks
        caller.advance(running=(1,))
        client.core.inbox.put(request(2, range(50, 90), 60))  # waits till the other is idle
        client.read_until_finished(2)
        assert in_blocks(caller.core) == 0
        assert caller.core.driven_requests == 0
        caller.run_out(1)
    assert caller.tokens[1] == continuation(range(20), 100, 1000)
    assert client.tokens[2] == continuation(range(50, 90), 60, 1000)


def test_a_parked_prompt_resumes_at_its_callers_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserved_sequences, "IDLE_SECONDS", 0.0)
    bounds = limits(num_blocks=16, max_batch_prefill_tokens=8, prefix_caching=False)
    with engine(bounds) as (caller, client):
        caller.advance(request(1, range(30), 4), new_targets=(20,))
        assert caller.pending == {1: 10}
        client.core.inbox.put(request(2, range(50, 90), 20))
        client.read_until_finished(2)
        caller.advance(running=(1,), prefill_budget=4)
        assert caller.pending == {1: 6}
        caller.run_out(1)
    assert caller.tokens[1] == continuation(range(30), 4, 1000)


def test_adapters_are_awaited_and_separate_cached_prefixes() -> None:
    worker = FakeWorker(4)
    with engine(limits(max_loras=1, max_cpu_loras=1), 0, worker) as (caller, client):
        for adapter_id in (1, 2):
            client.core.inbox.put(LoadAdapter(adapter_id, f"name-{adapter_id}", "/nowhere"))
        worker.slow = True
        first = caller.send(request(1, range(12), 5, adapter_id=1))
        while 1 not in worker.readings:
            pass
        client.core.inbox.put(request(50, range(12), 9))
        client.read_until_finished(50)  # the loop makes progress meanwhile
        worker.slow = False
        worker.finish_reading(1)
        first.result(timeout=60)
        caller.advance(running=(1,))
        error = fault_of(caller.send(request(2, range(12), 5, adapter_id=2)))
        assert (error.fault, error.request_id) == (AdvanceFault.NO_CAPACITY, 2)
        assert error.cause == "all slots for adapters are in use"
        caller.run_out(1)
        caller.advance(request(2, range(12), 5, adapter_id=2))
        caller.run_out(2)
    assert caller.tokens[1] == continuation(range(12), 5, 1000, 1)[1:]
    assert caller.tokens[2] == continuation(range(12), 5, 1000, 2)


def test_an_adapter_that_cannot_be_read_again_refuses_its_request() -> None:
    worker = FakeWorker(4)
    with engine(limits(max_loras=1, max_cpu_loras=1), 0, worker) as (caller, client):
        for adapter_id in (1, 2):
            client.core.inbox.put(LoadAdapter(adapter_id, f"name-{adapter_id}", "/nowhere"))
        while 2 not in worker.held:
            pass
        worker.broken[1] = RuntimeError("it is gone")
        error = fault_of(caller.send(request(1, range(12), 5, adapter_id=1)))
        assert (error.fault, error.request_id) == (AdvanceFault.INVALID, 1)
        assert "it is gone" in error.cause


@DEPTHS
def test_grammars_constrain_each_step_by_one_token(depth: int) -> None:
    compiler = FakeCompiler()
    grammar = slots([1, 2, 3], [5], [9, 10])
    with engine(limits(), depth, grammars=compiler) as (caller, client):
        free = request(2, range(5), 10)
        bound = request(1, range(8), 10, grammar=grammar, stop_token_ids=frozenset({7}))
        client.core.inbox.put(request(3, range(8), 10, grammar=grammar))
        caller.advance(bound, free)
        assert len(caller.tokens[1]) == 1, "what follows without a choice is not jumped over"
        caller.run_out(1, 2)
        client.read_until_finished(3)
        error = fault_of(caller.send(request(4, range(8), 10, grammar="no grammar")))
        assert (error.fault, error.request_id) == (AdvanceFault.INVALID, 4)
    first, second, third = caller.tokens[1][:3]
    assert (first in (1, 2, 3), second, third in (9, 10)) == (True, 5, True)
    assert caller.tokens[1][:3] == client.tokens[3][:3]
    assert caller.tokens[2] == continuation(range(5), 10, 1000)


@DEPTHS
def test_the_end_of_the_loop_answers_pending_calls(depth: int) -> None:
    worker = FakeWorker(4)
    with engine(limits(max_loras=1, max_cpu_loras=1), depth, worker) as (caller, client):
        worker.slow = True
        client.core.inbox.put(LoadAdapter(1, "name", "/nowhere"))
        caller.advance(request(2, range(4), 5))  # is given back as well
        waiting = caller.send(request(1, range(4), 5, adapter_id=1))
        caller.core.inbox.put(Cancel(12345))
        while not caller.core.live_requests:
            pass
    assert fault_of(waiting).fault is AdvanceFault.ENDED


@DEPTHS
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", list(CapacityPolicy))
def test_both_schedulers_at_once_generate_what_each_generates_alone(
    depth: int, seed: int, policy: CapacityPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random arrivals, ends, drops and pauses on both sides of a pool that is too small."""
    dice = random.Random(seed)
    monkeypatch.setattr(reserved_sequences, "IDLE_SECONDS", dice.choice([0.0, 0.01, 2.0]))
    bounds = limits(
        num_blocks=40,
        max_batch_size=5,
        max_batch_prefill_tokens=dice.choice([8, 32]),
        max_total_tokens=80,
        capacity_policy=policy,
    )
    bounds = with_states(bounds, [None, 0, 1, 4, 30, None][seed])
    shared = [dice.randrange(1000) for _ in range(40)]

    def prompt() -> list[int]:
        return shared[: dice.randrange(40)] + [dice.randrange(1000) for _ in range(1, 20)]

    prompts: dict[int, tuple[list[int], int]] = {}
    with engine(bounds, depth) as (caller, client):
        scheduled = []
        for i in range(30):
            prompts[i] = (prompt(), dice.randrange(1, 20))
            scheduled.append(request(i, *prompts[i]))
        feeder = threading.Thread(target=lambda: [client.core.inbox.put(r) for r in scheduled])
        feeder.start()
        held: list[int] = []
        refused = 0
        for i in range(100, 160):
            prompts[i] = (prompt(), dice.randrange(1, 20))
            upto = dice.randrange(1, len(prompts[i][0]) + 1)
            old = tuple(held) if dice.random() < 0.6 else ()
            if caller.fits(
                request(i, *prompts[i]), running=old, new_targets=(upto,), prefill_budget=10
            ):
                held.append(i)
            else:
                refused += 1
            held = [i for i in held if i not in caller.ended]
            for _ in range(dice.randrange(5)):
                some = tuple(dice.sample(held, dice.randrange(len(held) + 1)))
                if some:  # they may have been parked, and others have their blocks
                    caller.fits(running=some, prefill_budget=dice.randrange(1, 20))
                held = [i for i in held if i not in caller.ended]
            if held and dice.random() < 0.4:
                gone = dice.choice(held)
                caller.drop(gone)
                held.remove(gone)
        feeder.join(timeout=60)
        assert refused < 60
        caller.drop(*held)
        client.read_until_finished(*range(30))
    for i, tokens in (caller.tokens | client.tokens).items():
        words, new = prompts[i]
        assert tokens == continuation(words, new, 1000)[: len(tokens)], i
        if i in client.finished or i in caller.ended:
            assert len(tokens) == new
    assert any(len(tokens) > 5 for i, tokens in caller.tokens.items() if i >= 100)


@DEPTHS
@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafts_change_no_tokens_of_callers(kind: str, depth: int) -> None:
    prompts = {i: list(range(100 * i, 100 * i + 5 + 3 * i)) for i in range(1, 5)}
    answers = {i: continuation(prompt, 40, 1000) for i, prompt in prompts.items()}
    speculator = FakeSpeculator(kind, answers.__getitem__)
    worker = FakeWorker(4)
    more = {"speculator": speculator, "external_drafts": True}
    with engine(limits(max_batch_prefill_tokens=16), depth, worker, **more) as (caller, _):
        caller.advance(*(request(i, prompt, 40) for i, prompt in prompts.items()))
        assert all(len(tokens) == 1 for tokens in caller.tokens.values()), "of a prefill"
        caller.run_out(*prompts)
        load = caller.core.metrics.load
    assert caller.tokens == answers
    assert set(caller.ended.values()) == {FinishReason.LENGTH}
    assert (speculator.accepted > 50) == (kind in ("perfect", "partly"))
    assert (load.drafted_tokens, load.accepted_tokens) == (speculator.drafted, speculator.accepted)
    assert sorted(speculator.finished) == sorted(prompts)
    if kind == "perfect":
        assert len(worker.steps) < 40, "a step gives several tokens"


def test_callers_get_one_token_a_step_unless_drafts_are_asked_for() -> None:
    prompt = list(range(9))
    expected = continuation(prompt, 20, 1000)
    speculator = FakeSpeculator("perfect", lambda _: expected)
    with engine(limits(), speculator=speculator) as (caller, _):
        caller.advance(request(1, prompt, 20))
        for count in range(2, 21):
            caller.advance(running=(1,))
            assert caller.tokens[1] == expected[:count]
    assert speculator.drafted == 0


def test_a_prompt_whose_last_token_alone_is_left_is_not_drafted_for() -> None:
    """A prefill gives one token, whatever of the prompt was cached."""
    prompt = list(range(9))
    expected = continuation(prompt, 20, 1000)
    speculator = FakeSpeculator("perfect", lambda _: expected)
    more = {"speculator": speculator, "external_drafts": True}
    with engine(limits(block_size=4), **more) as (caller, _):
        for request_id in (1, 2, 3, 4, 5, 6):
            caller.advance(request(request_id, prompt, 20))
            assert len(caller.tokens[request_id]) == 1
        caller.run_out(1, 2, 3, 4, 5, 6)
    assert all(tokens == expected for tokens in caller.tokens.values())
