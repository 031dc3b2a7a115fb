"""Adapters in the scheduler: slots, the host's cache, waiting, loading and unloading."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.engine.test_core import Client, running
from tests.unit.engine.test_scheduler import Harness, limits, request
from tgi_cli.engine.config import Batching
from tgi_cli.engine.core import EngineCore
from tgi_cli.engine.messages import (
    AdapterAnswer,
    Cancel,
    FinishReason,
    LoadAdapter,
    UnloadAdapter,
)
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.waiting_queue import MAX_OVERTAKEN
from tgi_cli.errors import CheckpointError


class Adapted(Harness):
    """A harness with loaded adapters 1..count."""

    def __init__(self, count: int, **changes: Any) -> None:
        bounds = limits(**({"max_loras": 2} | changes))
        super().__init__(bounds)
        self.scheduler = Scheduler(bounds, self.worker)
        self.batch = self.scheduler.batch
        self.answers: list[AdapterAnswer] = []
        for adapter_id in range(1, count + 1):
            self.load(adapter_id)
        assert self.answers == [AdapterAnswer(i) for i in range(1, count + 1)]

    def load(self, adapter_id: int) -> None:
        self.batch.adapters.load(LoadAdapter(adapter_id, f"name-{adapter_id}", "/nowhere"))
        self.settle()

    def settle(self) -> None:
        """What the loop does between steps."""
        self.batch.adapters.read_wanted()
        for finished in self.batch.fail_adapters(self.batch.adapters.collect()):
            self.finished[finished.request_id] = finished
        self.answers += self.batch.adapters.take_answers()

    def step(self) -> Any:
        outputs = super().step()
        self.settle()
        if outputs is not None:
            self.answers += outputs.adapters
        return outputs

    def run(self) -> None:
        for _ in range(10_000):
            if self.step() is None and not self.batch.live:
                return
        raise AssertionError("no end in sight")

    def slots_of_steps(self) -> list[set[int]]:
        """For each step, the slots of its rows that have one."""
        slots: dict[int, int] = {}
        used = []
        for step in self.worker.steps:
            slots |= {new.row: new.adapter_slot for new in step.new}
            used.append({slots[row] for row in step.rows} - {-1})
        return used


def check(harness: Adapted, request_id: int, prompt: range | list[int], new: int, a: int) -> None:
    assert harness.tokens[request_id] == continuation(list(prompt), new, 1000, a)


def test_each_request_gets_its_own_adapter_in_one_step() -> None:
    harness = Adapted(2)
    for i, adapter_id in enumerate([0, 1, 2, 1]):
        harness.add(request(i, range(9), 6, adapter_id=adapter_id))
    harness.run()
    assert harness.worker.steps[0].adapters == [(0, 1), (1, 2)]
    assert [new.adapter_slot for new in harness.worker.steps[0].new] == [-1, 0, 1, 0]
    assert not any(step.adapters for step in harness.worker.steps[1:]), "they stay there"
    for i, adapter_id in enumerate([0, 1, 2, 1]):
        check(harness, i, range(9), 6, adapter_id)


def test_more_adapters_than_slots_take_turns_and_let_others_pass() -> None:
    harness = Adapted(4)
    for i in range(1, 5):
        harness.add(request(i, [i, i], 10, adapter_id=i))
    harness.add(request(9, [9], 3))
    harness.step()
    started = [new.request_id for new in harness.worker.steps[0].new]
    assert started == [1, 2, 9], "the base model's request passes those without a slot"
    harness.run()
    assert all(len(used) <= 2 for used in harness.slots_of_steps())
    for i in range(1, 5):
        check(harness, i, [i, i], 10, i)


def test_requests_that_lack_a_slot_do_not_block_one_that_needs_none() -> None:
    harness = Adapted(2, max_loras=1)
    harness.add(request(0, [1], 100, adapter_id=1))
    harness.step()
    for i in range(1, 60):
        harness.add(request(i, [i], 2, adapter_id=2))
    harness.add(request(99, [9], 2))
    harness.step()
    assert [new.request_id for new in harness.worker.steps[-1].new] == [99]


def test_the_least_recently_used_slot_is_evicted() -> None:
    harness = Adapted(3)
    put = []
    for i, adapter_id in enumerate([1, 2, 1, 3, 1, 2]):
        harness.add(request(i, [i], 2, adapter_id=adapter_id))
        harness.run()
        check(harness, i, [i], 2, adapter_id)
    for step in harness.worker.steps:
        put += step.adapters
    assert put == [(0, 1), (1, 2), (1, 3), (1, 2)]


def test_a_request_that_waits_for_a_slot_is_not_overtaken_for_ever() -> None:
    harness = Adapted(2, max_loras=1, max_batch_size=4)
    harness.add(request(0, [1], 2, adapter_id=1))
    harness.step()
    harness.add(request(1000, [5], 3, adapter_id=2))
    for i in range(1, 200):
        harness.add(request(i, [i], 3, adapter_id=1))
    harness.run()
    order = [new.request_id for step in harness.worker.steps for new in step.new]
    assert order.index(1000) <= MAX_OVERTAKEN + 6
    check(harness, 1000, [5], 3, 2)


def test_an_evicted_adapter_is_read_again_while_others_run() -> None:
    harness = Adapted(3, max_loras=1, max_cpu_loras=1)
    assert harness.worker.held == {3}
    harness.worker.slow = True
    harness.add(request(1, [1], 4, adapter_id=1))
    harness.add(request(2, [2], 4))
    harness.step()
    assert [new.request_id for new in harness.worker.steps[-1].new] == [2]
    assert harness.worker.read == [1, 2, 3, 1]
    harness.step()
    assert harness.worker.read == [1, 2, 3, 1], "an adapter that is being read is not read twice"
    harness.worker.finish_reading(1)
    harness.run()
    check(harness, 1, [1], 4, 1)
    check(harness, 2, [2], 4, 0)


def test_the_host_does_not_evict_adapters_that_requests_wait_for() -> None:
    harness = Adapted(4, max_loras=1, max_cpu_loras=2)
    harness.add(request(0, [0], 30, adapter_id=4))
    harness.step()
    for i in (1, 2, 3):
        harness.add(request(i, [i], 3, adapter_id=i))
    for _ in range(10):
        harness.step()
    read = list(harness.worker.read)
    assert len(harness.worker.held) == 2
    for _ in range(10):
        harness.step()
    assert harness.worker.read == read, "no adapter is thrown out for another that waits, too"
    harness.run()
    for i in (1, 2, 3):
        check(harness, i, [i], 3, i)


def test_an_adapter_that_cannot_be_read_again_fails_its_requests_alone() -> None:
    harness = Adapted(2, max_loras=1, max_cpu_loras=1)
    harness.worker.broken[1] = CheckpointError("the file is gone", "put it back")
    harness.add(request(1, [1], 4, adapter_id=1))
    harness.add(request(2, [2], 4, adapter_id=2))
    harness.run()
    assert harness.finished[1].reason is FinishReason.ERROR
    assert harness.finished[1].error == "adapter 'name-1': the file is gone; put it back"
    check(harness, 2, [2], 4, 2)
    del harness.worker.broken[1]
    harness.add(request(3, [1], 4, adapter_id=1))
    harness.run()
    check(harness, 3, [1], 4, 1)


def test_adapters_share_no_cached_prefix_and_one_adapters_requests_do() -> None:
    harness = Adapted(2)
    prompt = range(40)
    cached = {}
    for i, adapter_id in enumerate([0, 1, 2, 1, 0]):
        harness.add(request(i, prompt, 3, adapter_id=adapter_id))
        outputs = harness.step()
        cached[i] = outputs.started[0].cached_tokens
        harness.run()
        check(harness, i, prompt, 3, adapter_id)
    assert cached == {0: 0, 1: 0, 2: 0, 3: 36, 4: 36}


def test_a_salt_cannot_pose_as_an_adapter() -> None:
    harness = Adapted(1)
    harness.add(request(1, range(20), 1, adapter_id=1))
    harness.run()
    harness.add(request(2, range(20), 1, cache_salt=(1).to_bytes(8, "little")))
    assert harness.step().started[0].cached_tokens == 0


def test_preempted_sequences_get_their_adapter_back() -> None:
    harness = Adapted(3, num_blocks=16, max_total_tokens=64, max_loras=2, prefix_caching=False)
    for i in range(8):
        harness.add(request(i, [i] * 6, 40, adapter_id=i % 4))
    harness.run()
    assert harness.batch.preemptions > 0
    assert all(len(used) <= 2 for used in harness.slots_of_steps())
    for i in range(8):
        check(harness, i, [i] * 6, 40, i % 4)


def test_forks_stay_with_their_adapter() -> None:
    harness = Adapted(2)
    harness.add(request(1, range(10), 5, adapter_id=1))
    harness.add(request(2, range(10), 5, adapter_id=1, fork_of=1))
    refused = harness.scheduler.add(request(3, range(10), 5, adapter_id=2, fork_of=1))
    assert refused is not None
    assert "another adapter" in refused.error
    harness.run()
    check(harness, 1, range(10), 5, 1)
    check(harness, 2, range(10), 5, 1)


@pytest.mark.parametrize("batching", list(Batching))
def test_every_batching_policy_serves_adapters(batching: Batching) -> None:
    harness = Adapted(3, max_loras=1, max_cpu_loras=1, batching=batching)
    for i in range(9):
        harness.add(request(i, [i, 3], 5, adapter_id=i % 4))
    harness.run()
    for i in range(9):
        check(harness, i, [i, 3], 5, i % 4)


def test_unknown_and_unloaded_adapters_are_refused_by_name() -> None:
    harness = Adapted(2)
    refused = harness.scheduler.add(request(1, [1], 4, adapter_id=7))
    assert refused is not None
    assert (refused.reason, refused.error) == (
        FinishReason.ERROR,
        "adapter id 7 is not loaded",
    )
    harness.add(request(2, [2], 4, adapter_id=1))
    harness.step()
    harness.batch.adapters.unload(1)
    refused = harness.scheduler.add(request(3, [1], 4, adapter_id=1))
    assert refused is not None
    assert refused.error == "adapter 'name-1' is being unloaded"


def test_unloading_waits_for_those_that_run_and_frees_the_slot() -> None:
    harness = Adapted(3, max_loras=1)
    harness.answers.clear()
    harness.add(request(1, [1], 4, adapter_id=1))
    harness.add(request(2, [2], 4, adapter_id=1))
    harness.step()
    harness.batch.adapters.unload(1)
    harness.step()
    assert not harness.answers
    harness.run()
    assert harness.answers == [AdapterAnswer(1)]
    assert harness.worker.held == {2, 3}
    check(harness, 2, [2], 4, 1)
    harness.batch.adapters.unload(1)
    harness.settle()
    assert harness.answers[1].error == "adapter id 1 is not loaded"
    harness.load(1)
    assert "used before" in harness.answers[2].error
    harness.load(8)
    harness.add(request(3, [1], 4, adapter_id=8))
    harness.run()
    check(harness, 3, [1], 4, 8)


def test_unloading_answers_in_order_even_while_it_is_read() -> None:
    harness = Adapted(0)
    harness.worker.slow = True
    harness.load(1)
    harness.batch.adapters.unload(1)
    harness.settle()
    assert not harness.answers
    harness.worker.finish_reading(1)
    harness.settle()
    assert harness.answers == [AdapterAnswer(1), AdapterAnswer(1)]
    assert not harness.worker.held


def test_unloading_an_adapter_that_is_not_read_yet() -> None:
    harness = Adapted(0, max_cpu_loras=1)
    harness.worker.slow = True
    harness.load(1)
    harness.load(2)
    assert harness.worker.read == [1]
    harness.batch.adapters.unload(2)
    harness.settle()
    assert harness.answers == [
        AdapterAnswer(2, "it was unloaded before it was read"),
        AdapterAnswer(2),
    ]
    harness.worker.finish_reading(1)
    harness.settle()
    assert harness.worker.read == [1]


def test_a_failing_load_is_answered_with_the_cause_and_leaves_nothing() -> None:
    harness = Adapted(0)
    harness.worker.broken[1] = ValueError("no such thing\nat all")
    harness.worker.slow = True
    harness.load(1)
    harness.add(request(1, [1], 4, adapter_id=1))
    assert harness.step() is None
    harness.worker.finish_reading(1)
    harness.settle()
    error = "adapter 'name-1': ValueError: no such thing"
    assert harness.answers == [AdapterAnswer(1, error)]
    assert harness.finished[1].error == error
    refused = harness.scheduler.add(request(2, [1], 4, adapter_id=1))
    assert refused is not None
    assert refused.error == "adapter id 1 is not loaded"


def test_without_slots_nothing_can_be_loaded() -> None:
    harness = Harness(limits())
    harness.batch.adapters.load(LoadAdapter(1, "a", "/nowhere"))
    (answer,) = harness.batch.adapters.take_answers()
    assert "--max-loras" in answer.error


# -------------------------------------------------------------------- the loop


@pytest.mark.parametrize("depth", [0, 1])
def test_the_loop_loads_serves_and_unloads(depth: int) -> None:
    random_ = random.Random(depth)
    bounds = limits(max_loras=2, max_cpu_loras=2, num_blocks=24, max_total_tokens=60)
    answers: list[AdapterAnswer] = []
    worker, go_on = FakeWorker(4), threading.Event()

    def wait(_step: object) -> None:
        go_on.wait(60)

    with running(worker, bounds, depth) as client:
        for adapter_id in range(1, 6):
            client.core.inbox.put(LoadAdapter(adapter_id, str(adapter_id), ""))
        for i in range(60):
            if i == 59:  # uses the adapter that is to be unloaded
                worker.fail_when = wait
            prompt = [i % 3] * random_.choice([1, 5, 20])
            client.core.inbox.put(request(i, prompt, 12, adapter_id=i % 6))
            if i % 9 == 8:
                client.core.inbox.put(Cancel(i - 3))
        client.core.inbox.put(UnloadAdapter(5))
        client.core.inbox.put(request(99, [1], 3, adapter_id=5))
        go_on.set()
        while len(client.finished) < 61 or len(answers) < 6:
            outputs = client.read()
            assert outputs is not None
            answers += outputs.adapters
    assert sorted(a.adapter_id for a in answers) == [1, 2, 3, 4, 5, 5]
    assert not any(answer.error for answer in answers)
    assert client.finished[99] == (FinishReason.ERROR, "adapter '5' is being unloaded")
    random_ = random.Random(depth)
    for i in range(60):
        prompt = [i % 3] * random_.choice([1, 5, 20])
        answer = continuation(prompt, 12, 1000, i % 6)
        seen = client.tokens.get(i, [])
        if client.finished[i][0] is FinishReason.CANCELLED:
            assert seen == answer[: len(seen)]
        else:
            assert seen == answer


def test_the_loop_polls_for_an_adapter_and_expires_requests_meanwhile() -> None:
    worker = FakeWorker(4, slow=True)
    with running(worker, limits(max_loras=1)) as client:
        client.core.inbox.put(LoadAdapter(1, "one", ""))
        client.core.inbox.put(request(1, [1], 3, adapter_id=1, timeout_seconds=0.05))
        client.read_until_finished(1)
        assert client.finished[1][0] is FinishReason.TIMEOUT
        client.core.inbox.put(request(2, [1], 3, adapter_id=1))
        worker.finish_reading(1)
        client.read_until_finished(2)
    assert client.tokens[2] == continuation([1], 3, 1000, 1)


def test_a_client_that_only_loads_is_answered() -> None:
    core_answers: list[AdapterAnswer] = []
    worker = FakeWorker(4)
    with running(worker, limits(max_loras=1)) as client:
        assert isinstance(client, Client)
        assert isinstance(client.core, EngineCore)
        client.core.inbox.put(LoadAdapter(1, "one", ""))
        client.core.inbox.put(UnloadAdapter(1))
        while len(core_answers) < 2:
            outputs = client.read()
            assert outputs is not None
            core_answers += outputs.adapters
    assert core_answers == [AdapterAnswer(1), AdapterAnswer(1)]
    assert not worker.held
