"""What each step computes, and what becomes of requests that do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.engine.fake_images import seen
from tests.unit.engine.fake_worker import FakeWorker, continuation
from tgi_cli.engine.config import SchedulerConfig
from tgi_cli.engine.messages import Finished, FinishReason, GenerationRequest, StepOutputs
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.waiting_queue import MAX_OVERTAKEN
from tgi_cli.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def limits(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "max_total_tokens": 256,
        "max_batch_prefill_tokens": 64,
        "max_batch_size": 8,
        "block_size": 4,
        "num_blocks": 128,
    }
    return SchedulerConfig(**(values | changes))


def with_states(bounds: SchedulerConfig, spare: int | None) -> SchedulerConfig:
    """With so many slots for recurrent states beyond one per row, or for a model without."""
    if spare is None:
        return bounds
    return replace(bounds, num_state_slots=bounds.max_batch_size + spare)


def request(request_id: int, prompt: range | list[int], new: int, **more: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        sampling=GREEDY,
        max_new_tokens=new,
        **more,
    )


class Harness:
    """A scheduler and a fake worker, stepped by hand."""

    def __init__(self, limits: SchedulerConfig) -> None:
        self.scheduler = Scheduler(limits)
        self.batch = self.scheduler.batch
        self.worker = FakeWorker.of(limits)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}

    def add(self, request: GenerationRequest) -> None:
        whole = self.worker.whole_prompts
        if request.images or whole:
            self.worker.seen[request.request_id] = seen(request, whole)
        assert self.scheduler.add(request) is None
        self.tokens[request.request_id] = []

    def step(self) -> StepOutputs | None:
        step = self.scheduler.schedule()
        if step is None:
            return None
        result = self.worker.sample(self.worker.launch(step)).wait()
        outputs = self.scheduler.update(result)
        self.take(outputs)
        return outputs

    def take(self, outputs: StepOutputs) -> None:
        for request_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            self.tokens[request_id].append(token)
        for finished in outputs.finished:
            self.finished[finished.request_id] = finished

    def run(self) -> None:
        for _ in range(10_000):
            if self.step() is None:
                assert not self.batch.live
                return
        raise AssertionError("no end in sight")


def test_a_request_generates_its_continuation_and_returns_its_resources() -> None:
    harness = Harness(limits())
    harness.add(request(1, range(10), 20))
    harness.run()
    assert harness.tokens[1] == continuation(range(10), 20, 1000)
    assert harness.finished[1].reason is FinishReason.LENGTH
    assert harness.batch.pool.num_used == 0


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    harness = Harness(limits(max_batch_prefill_tokens=16))
    harness.add(request(1, range(50), 1))
    harness.run()
    assert [step.counts for step in harness.worker.steps] == [[16], [16], [16], [2]]
    assert [step.samples for step in harness.worker.steps] == [[False], [False], [False], [True]]


def test_decodes_come_first_and_prefill_chunks_fill_what_they_leave() -> None:
    harness = Harness(limits(max_batch_prefill_tokens=16))
    for i in range(3):
        harness.add(request(i, [i], 30))
    harness.step()
    harness.add(request(9, range(40), 5))
    harness.step()
    step = harness.worker.steps[-1]
    assert step.num_decodes == 3
    assert step.counts == [1, 1, 1, 13]


def test_many_decodes_leave_a_quarter_of_the_budget_to_prefills() -> None:
    harness = Harness(limits(max_batch_prefill_tokens=8))
    for i in range(7):
        harness.add(request(i, [i], 100))
    while harness.batch.waiting:
        harness.step()
    harness.step()
    harness.add(request(9, range(40), 5))
    harness.step()
    assert harness.worker.steps[-1].counts == [1] * 7 + [2]


def test_new_requests_join_between_steps_and_finished_ones_leave_at_once() -> None:
    harness = Harness(limits())
    harness.add(request(1, [1, 2], 2))
    harness.step()
    harness.add(request(2, [3, 4], 5))
    outputs = harness.step()
    assert outputs is not None
    assert sorted(outputs.request_ids) == [1, 2]
    assert [f.request_id for f in outputs.finished] == [1]
    harness.step()
    assert harness.worker.steps[-1].freed == [harness.worker.steps[0].new[0].row]


def test_no_more_sequences_run_than_there_are_rows() -> None:
    harness = Harness(limits(max_batch_size=2))
    for i in range(5):
        harness.add(request(i, [i], 3))
    harness.step()
    assert len(harness.batch.running) == 2
    harness.run()
    assert len(harness.finished) == 5
    assert all(len(step.rows) <= 2 for step in harness.worker.steps)


def test_a_stop_id_ends_the_request_and_is_part_of_the_output() -> None:
    answer = continuation([5], 10, 1000)
    harness = Harness(limits())
    harness.add(request(1, [5], 10, stop_token_ids=frozenset({answer[3]})))
    harness.add(request(2, [5], 10, stop_token_ids=frozenset({answer[3]}), ignore_eos=True))
    harness.run()
    assert harness.tokens[1] == answer[:4]
    assert harness.finished[1].reason is FinishReason.EOS_TOKEN
    assert harness.tokens[2] == answer
    assert harness.finished[2].reason is FinishReason.LENGTH


@pytest.mark.parametrize("while_waiting", [True, False])
def test_a_cancelled_request_frees_its_row_and_blocks(while_waiting: bool) -> None:
    harness = Harness(limits())
    harness.add(request(1, range(30), 30))
    if not while_waiting:
        harness.step()
        assert harness.batch.pool.num_used > 0
    finished = harness.batch.cancel(1)
    assert finished == Finished(1, FinishReason.CANCELLED)
    assert harness.batch.pool.num_used == 0
    assert harness.scheduler.schedule() is None
    assert harness.batch.cancel(1) is None


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (request(2, [], 4), "no tokens"),
        (request(2, [1], 0), "at least 1"),
        (request(2, range(250), 7), "max_total_tokens"),
        (request(1, [1], 1), "in use"),
    ],
)
def test_an_impossible_request_is_refused_with_the_cause(
    bad: GenerationRequest, cause: str
) -> None:
    scheduler = Scheduler(limits())
    assert scheduler.add(request(1, [1], 1)) is None
    finished = scheduler.add(bad)
    assert finished is not None
    assert finished.reason is FinishReason.ERROR
    assert cause in finished.error
    assert len(scheduler.batch.live) == 1


@pytest.mark.tgi_pain(2)
def test_preemption_is_invisible_in_the_output() -> None:
    harness = Harness(limits(num_blocks=16, max_total_tokens=64, prefix_caching=False))
    prompts = {i: [i * 7 + j for j in range(6)] for i in range(6)}
    for i, prompt in prompts.items():
        harness.add(request(i, prompt, 40))
    harness.run()
    assert harness.batch.preemptions > 0
    for i, prompt in prompts.items():
        assert harness.tokens[i] == continuation(prompt, 40, 1000)
    assert harness.batch.pool.num_used == 0


def test_an_older_sequence_is_not_preempted_for_a_younger_one() -> None:
    harness = Harness(limits(num_blocks=16, max_total_tokens=64))
    for i in range(4):
        harness.add(request(i, [i] * 5, 50))
    harness.run()
    assert harness.batch.preemptions > 0
    resumed = [new.request_id for step in harness.worker.steps for new in step.new]
    assert resumed.count(0) == 1, "the oldest kept its row from start to end"


def test_a_request_that_does_not_fit_lets_smaller_ones_pass_a_bounded_number_of_times() -> None:
    harness = Harness(limits(num_blocks=20, max_total_tokens=80, max_batch_size=4))
    harness.add(request(0, range(30), 30))  # holds 8 blocks and grows
    harness.step()
    harness.add(request(1, range(100, 175), 4))  # 19 blocks: does not fit beside it
    order: list[int] = []
    for i in range(2, 200):
        harness.add(request(i, [i], 2))
    while harness.batch.live:
        harness.step()
    for step in harness.worker.steps:
        order += [new.request_id for new in step.new]
    assert order.index(2) < order.index(1), "small ones pass"
    assert order.index(1) <= MAX_OVERTAKEN + 3, "the large one's turn comes"
    assert harness.tokens[1] == continuation(range(100, 175), 4, 1000)


def test_a_common_prefix_is_computed_once() -> None:
    harness = Harness(limits())
    prefix = list(range(40))
    harness.add(request(1, [*prefix, 100], 4))
    harness.run()
    before = len(harness.worker.steps)
    harness.add(request(2, [*prefix, 200], 4))
    outputs = harness.step()
    assert outputs is not None
    assert outputs.started[0].cached_tokens == 40
    assert harness.worker.steps[before].counts == [1]
    harness.run()
    assert harness.tokens[2] == continuation([*prefix, 200], 4, 1000)


def test_generated_tokens_are_reused_by_the_next_turn() -> None:
    harness = Harness(limits())
    first = list(range(10))
    harness.add(request(1, first, 30))
    harness.run()
    second = [*first, *harness.tokens[1], 7, 8]
    harness.add(request(2, second, 4))
    outputs = harness.step()
    assert outputs is not None
    # 39 of the 40 tokens were computed (the last one was only chosen): 9 full blocks of 4.
    assert outputs.started[0].cached_tokens == 36
    harness.run()
    assert harness.tokens[2] == continuation(second, 4, 1000)


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    harness = Harness(limits())
    for i in (1, 2):
        harness.add(request(i, range(16), 3))
        harness.run()
    assert harness.tokens[1] == harness.tokens[2] == continuation(range(16), 3, 1000)


@pytest.mark.tgi_pain(4)
def test_sequences_of_different_salts_share_nothing() -> None:
    harness = Harness(limits())
    harness.add(request(1, range(20), 1, cache_salt=b"one"))
    harness.run()
    harness.add(request(2, range(20), 1, cache_salt=b"two"))
    outputs = harness.step()
    assert outputs is not None
    assert outputs.started[0].cached_tokens == 0


def test_a_poisoned_row_fails_alone() -> None:
    harness = Harness(limits())
    for i in (1, 2, 3):
        harness.add(request(i, [i], 5))
    harness.worker.poison = {2}
    harness.run()
    assert harness.finished[2].reason is FinishReason.ERROR
    assert "not numbers" in harness.finished[2].error
    assert harness.tokens[1] == continuation([1], 5, 1000)
    assert harness.tokens[3] == continuation([3], 5, 1000)
    assert harness.batch.pool.num_used == 0


def test_a_second_step_can_be_scheduled_before_the_first_result() -> None:
    harness = Harness(limits())
    harness.add(request(1, [1, 2, 3], 4))
    harness.add(request(2, [4], 2))
    scheduler, worker = harness.scheduler, harness.worker
    pending = []
    for _ in range(20):
        step = scheduler.schedule()
        if step is not None:
            pending.append(worker.sample(worker.launch(step)))
        if pending and (step is None or len(pending) > 1):
            harness.take(scheduler.update(pending.pop(0).wait()))
    assert harness.tokens[1] == continuation([1, 2, 3], 4, 1000)
    assert harness.tokens[2] == continuation([4], 2, 1000)
    assert len(worker.steps) == 4, "no step beyond the known end"
    assert scheduler.batch.pool.num_used == 0
