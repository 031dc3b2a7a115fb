"""Blocks that leave the cache for the host's memory, and come back."""

from __future__ import annotations

from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.engine.test_prefix_loads import computed, finish
from tests.unit.engine.test_scheduler import limits, request
from tgi_cli.engine.host_blocks import HostBlocks
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.step import Step

PROMPT, OTHER = list(range(33)), list(range(100, 133))


def engine(num_host_blocks: int) -> tuple[Scheduler, FakeWorker]:
    """One whose cache holds one of the two prompts with its answer."""
    bounds = limits(num_blocks=9, num_host_blocks=num_host_blocks)
    worker = FakeWorker.of(bounds)
    return Scheduler(bounds), worker


def ask(scheduler: Scheduler, worker: FakeWorker, request_id: int, prompt: list[int]) -> int:
    """The tokens of a prompt that were computed for its answer, which is right."""
    before = computed(worker)
    assert scheduler.add(request(request_id, prompt, 4)) is None
    assert finish(scheduler, worker) == {request_id: continuation(prompt, 4, 1000)}
    return computed(worker) - before


def test_a_prompt_comes_back_after_another_took_its_memory() -> None:
    scheduler, worker = engine(num_host_blocks=100)
    assert ask(scheduler, worker, 1, PROMPT) == 33
    assert ask(scheduler, worker, 2, OTHER) == 33
    assert ask(scheduler, worker, 3, PROMPT) == 1
    assert ask(scheduler, worker, 4, OTHER) == 1
    assert scheduler.load().reused_tokens == 64
    offloads = [pair for step in worker.steps for pair in step.offloads]
    assert len({slot for _, slot in offloads}) == len(offloads), "a block is copied once"


def test_without_it_the_prompt_is_computed_again() -> None:
    scheduler, worker = engine(num_host_blocks=0)
    for number, prompt in enumerate([PROMPT, OTHER, PROMPT]):
        assert ask(scheduler, worker, number, prompt) == 33
    assert not any(step.offloads or step.restores for step in worker.steps)


def test_the_least_recently_used_are_overwritten() -> None:
    scheduler, worker = engine(num_host_blocks=4)
    ask(scheduler, worker, 1, PROMPT)
    ask(scheduler, worker, 2, OTHER)
    assert ask(scheduler, worker, 3, PROMPT) == 33 - 16, "its first blocks were the last to leave"
    used = {slot for step in worker.steps for _, slot in step.offloads}
    assert used <= set(range(4))


def test_what_a_step_reads_is_not_overwritten_before() -> None:
    host = HostBlocks(2)
    first, second = Step(0), Step(1)
    host.offload(b"a", 10)
    host.offload(b"b", 11)
    host.commit(first)
    assert first.offloads == [(10, 0), (11, 1)]
    assert host.hold([b"a", b"x", b"b"]) == 1, "a run ends at the first that is not there"
    host.offload(b"c", 12)
    host.offload(b"d", 13)
    host.restore(second, [b"a"], [5])
    host.commit(second)
    assert second.restores == [(0, 5)]
    assert second.offloads == [(12, 1), (13, 1)], "in this order"
    assert host.hold([b"d"]) == 1
    assert host.hold([b"c"]) == host.hold([b"b"]) == 0
    host.offload(b"e", 14)
    assert host.hold([b"a"]) == 0, "it was held for one step"


def test_with_all_slots_held_a_block_is_dropped() -> None:
    host = HostBlocks(1)
    host.offload(b"a", 10)
    host.commit(Step(0))
    host.hold([b"a"])
    host.offload(b"b", 11)
    step = Step(1)
    host.commit(step)
    assert step.offloads == []
    assert host.hold([b"b"]) == 0
    assert host.hold([b"a"]) == 1
