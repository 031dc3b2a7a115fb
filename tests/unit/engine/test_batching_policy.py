"""The dials of the scheduler: batching, capacity, priority, queue bounds, deadlines."""

from __future__ import annotations

import pytest

from tests.unit.engine.fake_worker import continuation
from tests.unit.engine.test_scheduler import Harness, limits, request
from tgi_cli.engine.config import Batching, CapacityPolicy
from tgi_cli.engine.messages import FinishReason
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.step import Step
from tgi_cli.engine.waiting_queue import MAX_OVERTAKEN


def kinds(step: Step) -> tuple[int, int]:
    """How many decodes and how many prefills a step holds."""
    return step.num_decodes, len(step.rows) - step.num_decodes


def joined(harness: Harness) -> list[list[int]]:
    """Who got a row in each step."""
    return [[new.request_id for new in step.new] for step in harness.worker.steps]


@pytest.mark.parametrize("batching", [Batching.INFLIGHT, Batching.STATIC])
def test_prefills_run_alone_when_they_are_not_fused(batching: Batching) -> None:
    harness = Harness(limits(batching=batching))
    for i in range(12):
        harness.add(request(i, range(i, i + 9), 3 + i))
    harness.run()
    assert all(0 in kinds(step) for step in harness.worker.steps)
    for i in range(12):
        assert harness.tokens[i] == continuation(range(i, i + 9), 3 + i, 1000)


def test_a_static_batch_admits_none_until_it_has_finished() -> None:
    harness = Harness(limits(batching=Batching.STATIC, max_batch_prefill_tokens=8))
    for i in range(3):
        harness.add(request(i, range(10), 2 + 4 * i))
    harness.step()
    harness.add(request(9, [1], 2))
    harness.run()
    groups = [group for group in joined(harness) if group]
    assert groups == [[0, 1, 2], [9]], "gathered at once, whatever the prefill budget"


def test_inflight_admits_when_enough_wait_or_after_max_waiting_tokens() -> None:
    harness = Harness(
        limits(batching=Batching.INFLIGHT, waiting_served_ratio=0.5, max_waiting_tokens=5)
    )
    for i in range(4):
        harness.add(request(i, [i], 40))
    harness.step()
    harness.add(request(10, [10], 40))
    for _ in range(3):
        harness.step()
    assert [group for group in joined(harness) if group] == [[0, 1, 2, 3]], "one is too few"
    harness.add(request(11, [11], 40))
    harness.step()
    assert joined(harness)[-1] == [10, 11], "two are half of four"
    harness.add(request(12, [12], 40))
    for _ in range(4):
        harness.step()
    assert joined(harness)[-4:] == [[], [], [], []]
    harness.step()
    assert joined(harness)[-1] == [12], "patience ran out"


def test_inflight_prefills_whole_prompts_within_the_budget() -> None:
    harness = Harness(limits(batching=Batching.INFLIGHT, max_batch_prefill_tokens=20))
    for i in range(4):
        harness.add(request(i, range(100 * i, 100 * i + 9), 2))
    harness.run()
    prefills = [step.counts for step in harness.worker.steps if kinds(step)[1]]
    assert prefills == [[9, 9], [9, 9]]


def test_no_sequence_with_the_guarantee_is_preempted() -> None:
    harness = Harness(
        limits(
            num_blocks=24,
            max_total_tokens=64,
            capacity_policy=CapacityPolicy.GUARANTEED_NO_EVICT,
        )
    )
    for i in range(10):
        harness.add(request(i, [i] * 5, 40))
    most = 0
    while harness.step() is not None:
        most = max(most, len(harness.batch.running))
    assert most == 2, "11 of 24 blocks each"
    assert harness.batch.preemptions == 0
    assert len(harness.finished) == 10


def test_higher_priority_is_served_first_and_preempted_last() -> None:
    harness = Harness(limits(num_blocks=16, max_total_tokens=64, max_batch_size=3))
    for i, priority in enumerate([0, 0, 5, 5, 1]):
        harness.add(request(i, [i] * 5, 50, priority=priority))
    harness.run()
    order = [new for group in joined(harness) for new in group]
    assert order[:3] == [2, 3, 4]
    assert harness.batch.preemptions > 0
    assert order.count(2) == 1, "the first in rank keeps its row"
    for i in range(5):
        assert harness.tokens[i] == continuation([i] * 5, 50, 1000)


def test_a_low_priority_is_overtaken_a_bounded_number_of_times() -> None:
    harness = Harness(limits(max_batch_size=1))
    harness.add(request(0, [0], 2, priority=-1))
    for i in range(1, 200):
        harness.add(request(i, [i], 2, priority=1))
    harness.run()
    order = [new for group in joined(harness) for new in group]
    assert order.index(0) == MAX_OVERTAKEN + 1


def test_a_full_queue_refuses_by_requests_and_by_tokens() -> None:
    by_requests = Scheduler(limits(max_queued_requests=2))
    by_tokens = Scheduler(limits(max_queued_tokens=100))
    for i in range(2):
        assert by_requests.add(request(i, range(50), 1)) is None
        assert by_tokens.add(request(i, range(50), 1)) is None
    for scheduler, cause in ((by_requests, "2 requests"), (by_tokens, "100 tokens")):
        refused = scheduler.add(request(9, [1], 1))
        assert refused is not None
        assert refused.reason is FinishReason.OVERLOADED
        assert cause in refused.error
        scheduler.schedule()
        assert scheduler.add(request(9, [1], 1)) is None, "the queue is free once they run"


@pytest.mark.parametrize("running", [True, False])
def test_a_request_ends_at_its_timeout(running: bool) -> None:
    harness = Harness(limits())
    harness.add(request(1, [1], 100, timeout_seconds=0.0))
    harness.add(request(2, [2], 100, timeout_seconds=1000.0))
    if running:
        harness.step()
    (ended,) = harness.scheduler.expire()
    assert (ended.request_id, ended.reason) == (1, FinishReason.TIMEOUT)
    assert "0 s" in ended.error
    assert harness.scheduler.expire() == []
    assert len(harness.batch.live) == 1


@pytest.mark.parametrize("prompt_tokens", [1, 4, 5, 30])
@pytest.mark.parametrize("batching", list(Batching))
def test_forks_share_the_prompt_and_write_apart(prompt_tokens: int, batching: Batching) -> None:
    harness = Harness(limits(prefix_caching=False, batching=batching, max_batch_prefill_tokens=16))
    prompt = list(range(prompt_tokens))
    harness.add(request(1, prompt, 10))
    for i in (2, 3, 4):
        harness.add(request(i, prompt, 10 + i, fork_of=1))
    harness.run()
    computed = sum(step.num_tokens for step in harness.worker.steps)
    generated = sum(len(tokens) for tokens in harness.tokens.values())
    # Each sample's last token is not computed; each fork computes the prompt's last one again.
    forked = batching is not Batching.STATIC
    assert computed == prompt_tokens + (3 if forked else 3 * prompt_tokens) + generated - 4
    for i in (2, 3, 4):
        assert harness.tokens[i] == continuation(prompt, 10 + i, 1000)
    assert harness.batch.pool.num_used == 0


def test_a_fork_of_an_ended_or_preempted_request_computes_its_own_prompt() -> None:
    harness = Harness(limits(num_blocks=16, max_total_tokens=64, prefix_caching=False))
    harness.add(request(0, [7] * 20, 40))
    harness.add(request(1, [1] * 5, 2))
    harness.add(request(2, [1] * 5, 40, fork_of=1))
    harness.add(request(3, [1] * 5, 40, fork_of=2))
    harness.add(request(4, [1] * 5, 40, fork_of=99))
    harness.run()
    for i in (2, 3, 4):
        assert harness.tokens[i] == continuation([1] * 5, 40, 1000)
    assert harness.batch.pool.num_used == 0


def test_a_fork_of_another_prompt_is_refused() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request(1, [1], 1))
    refused = scheduler.add(request(2, [2], 1, fork_of=1))
    assert refused is not None
    assert "another prompt" in refused.error


def test_step_stats_have_the_batch_managers_fields() -> None:
    harness = Harness(limits(max_batch_prefill_tokens=20))
    harness.add(request(1, [5], 30))
    harness.add(request(2, [6], 30))
    harness.step()
    harness.add(request(3, range(40), 5))
    step = harness.scheduler.schedule()
    assert step is not None
    stats = harness.scheduler.stats(step)
    assert str(stats["Timestamp"]).count(":") == 2
    expected = {
        "Iteration Counter": 2,
        "Active Request Count": 3,
        "Max Request Count": 8,
        "Max KV cache blocks": 128,
        "Free KV cache blocks": 128 - 12,
        "Used KV cache blocks": 12,
        "Tokens per KV cache block": 4,
        "Scheduled Requests": 3,
        "Context Requests": 1,
        "Generation Requests": 2,
        "Total Context Tokens": 18,
    }
    assert stats.items() >= expected.items()


@pytest.mark.parametrize("window", [1, 4, 7, 30])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_blocks_behind_a_sliding_window_are_released(window: int, prefix_caching: bool) -> None:
    harness = Harness(
        limits(
            window=window,
            num_blocks=40,
            max_total_tokens=160,
            max_batch_prefill_tokens=16,
            prefix_caching=prefix_caching,
        )
    )
    harness.worker.window = window
    for i in range(3):
        harness.add(request(i, range(i, i + 20), 120))
    harness.add(request(3, range(20), 60, fork_of=0))
    harness.run()
    assert harness.batch.preemptions == 0, "40 blocks would not hold 3 x 35 at once"
    for i in range(3):
        assert harness.tokens[i] == continuation(range(i, i + 20), 120, 1000)
    assert harness.tokens[3] == continuation(range(20), 60, 1000)
    assert harness.batch.pool.num_used == 0
