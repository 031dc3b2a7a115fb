"""Slots for recurrent states: what is reused, what is not, and that nothing is lost.

Wrong states fail in the fake worker, whose states are digests of all tokens that they have taken.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from tests.unit.engine.fake_grammar import EOS, FakeCompiler, constrained, slots
from tests.unit.engine.fake_thinking import budget, budgeted
from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.engine.test_scheduler import Harness, limits, request, with_states
from tgi_cli.engine.config import Batching, SchedulerConfig
from tgi_cli.engine.messages import FinishReason, LoadAdapter
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.step import FRESH, PendingResult, Step

SIZE = 4


def stateful(spare: int = 20, **changes: Any) -> SchedulerConfig:
    return with_states(limits(block_size=SIZE, **changes), spare)


def computed(harness: Harness, request_id: int) -> int:
    """How many tokens of a request were computed."""
    rows: dict[int, int] = {}
    count = 0
    for step in harness.worker.steps:
        rows |= {new.row: new.request_id for new in step.new}
        count += sum(
            tokens
            for row, tokens in zip(step.rows, step.counts, strict=True)
            if rows[row] == request_id
        )
    return count


def answer(harness: Harness, request_id: int, prompt: list[int], new: int, **more: Any) -> int:
    """Run a request alone; returns how many of its tokens were computed."""
    harness.add(request(request_id, prompt, new, **more))
    harness.run()
    assert harness.tokens[request_id] == continuation(prompt, new, 1000)
    return computed(harness, request_id)


def words(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


def test_a_model_without_states_has_no_slots() -> None:
    harness = Harness(limits())
    answer(harness, 1, words(10), 10)
    assert all(step.state_in == step.state_out == [] for step in harness.worker.steps)
    assert harness.scheduler.load().used_state_slots == 0


def test_a_sequence_stays_in_its_slot_if_none_is_spare() -> None:
    harness = Harness(stateful(spare=0))
    answer(harness, 1, words(10), 30)
    first, *others = [(*step.state_in, *step.state_out) for step in harness.worker.steps]
    assert first[0] == FRESH
    assert set(others) == {(first[1], first[1])}
    assert not any(step.snapshots for step in harness.worker.steps)
    assert harness.scheduler.load().cached_states == 0


def test_a_decode_moves_to_another_slot_behind_each_block_and_nowhere_else() -> None:
    harness = Harness(stateful())
    answer(harness, 1, words(10), 30)
    for step, after in zip(harness.worker.steps[1:], harness.worker.steps[2:], strict=False):
        moved = step.state_out != after.state_out
        assert moved == ((step.starts[0] + 1) % SIZE == 0)
        assert after.state_in == step.state_out


@pytest.mark.parametrize(("length", "reused"), [(3, 0), (4, 0), (5, 4), (40, 36), (41, 40)])
def test_a_prompt_is_reused_up_to_the_last_block_before_its_last_token(
    length: int, reused: int
) -> None:
    harness = Harness(stateful())
    prompt = words(length)
    answer(harness, 1, prompt, 1)
    assert answer(harness, 2, prompt, 1) == length - reused
    assert harness.scheduler.load().reused_tokens == reused


def test_the_last_block_of_an_answer_is_reused_by_the_next_turn() -> None:
    harness = Harness(stateful())
    prompt = words(10)
    answer(harness, 1, prompt, 21)
    turn = [*prompt, *harness.tokens[1], *words(9, seed=1)]
    assert answer(harness, 2, turn, 5) == len(turn) - 28 + 4, "30 tokens of it were computed"


def test_an_answer_leaves_one_snapshot_beside_that_of_its_prompt() -> None:
    harness = Harness(stateful())
    answer(harness, 1, words(10), 100)
    assert harness.scheduler.load().cached_states == 2


def test_a_common_beginning_is_reused_from_its_third_use_on() -> None:
    harness = Harness(stateful())
    common = words(50)
    assert answer(harness, 1, common + words(20, 1), 1) == 70
    assert answer(harness, 2, common + words(20, 2), 1) == 70, "there is KV, and no state"
    assert [step.counts for step in harness.worker.steps[-2:]] == [[48], [22]]
    assert answer(harness, 3, common + words(20, 3), 1) == 22


def test_a_short_common_beginning_costs_no_step_of_its_own() -> None:
    harness = Harness(stateful())
    common = words(20)
    for i in range(3):
        answer(harness, i, common + words(20, i), 1)
    assert [step.counts for step in harness.worker.steps] == [[40], [40], [40]]


def test_a_snapshot_whose_kv_was_evicted_is_not_used() -> None:
    harness = Harness(stateful(num_blocks=30, max_total_tokens=100))
    prompt = words(41)
    answer(harness, 1, prompt, 1)
    answer(harness, 2, words(90, seed=1), 5)
    assert answer(harness, 3, prompt, 1) > 1


def test_the_least_recently_used_snapshots_are_replaced() -> None:
    harness = Harness(stateful(spare=4, max_batch_size=1))
    prompts = [words(9, seed) for seed in range(6)]
    for i, prompt in enumerate(prompts):
        answer(harness, i, prompt, 1)
        assert answer(harness, 100 + i, prompts[0], 1) == 1
    assert answer(harness, 200, prompts[5], 1) == 1
    assert answer(harness, 201, prompts[1], 1) == 9


@pytest.mark.parametrize("spare", [1, 2, 3])
def test_rolling_snapshots_of_many_answers_do_not_replace_those_of_prompts(spare: int) -> None:
    harness = Harness(stateful(spare=2 * spare, num_blocks=400))
    prompt = words(41)
    answer(harness, 1, prompt, 1)
    for i in range(2, 10):
        harness.add(request(i, [i], 60))
    harness.run()
    assert harness.scheduler.load().cached_states >= spare
    assert answer(harness, 20, prompt, 1) == 1


def test_salts_and_adapters_have_states_of_their_own() -> None:
    bounds = stateful(max_loras=2)
    harness = Harness(bounds)
    harness.scheduler = Scheduler(bounds, harness.worker)
    harness.batch = harness.scheduler.batch
    for adapter_id in (1, 2):
        harness.batch.adapters.load(LoadAdapter(adapter_id, str(adapter_id), ""))
    prompt = words(41)
    kinds: list[dict[str, Any]] = [
        {},
        {"cache_salt": b"a"},
        {"cache_salt": b"b"},
        {"adapter_id": 1},
        {"adapter_id": 2},
        {"adapter_id": 2, "cache_salt": b"a"},
    ]
    for expected in (41, 1):
        for number, kind in enumerate(kinds):
            request_id = 100 * expected + number
            harness.add(request(request_id, prompt, 3, **kind))
            harness.batch.adapters.read_wanted()
            assert not harness.batch.adapters.collect()
            harness.run()
            alone = continuation(prompt, 3, 1000, kind.get("adapter_id", 0))
            assert harness.tokens[request_id] == alone
            assert computed(harness, request_id) == expected + 2


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("length", [3, 4, 5, 30, 33, 100])
def test_forks_start_from_the_last_block_of_the_prompt(length: int, reuse: bool) -> None:
    harness = Harness(stateful(prefix_caching=reuse))
    prompt = words(length)
    harness.add(request(1, prompt, 10))
    for i in (2, 3, 4):
        harness.add(request(i, prompt, 10 + i, fork_of=1))
    harness.run()
    tail = length - (length - 1) // SIZE * SIZE
    for i in (2, 3, 4):
        assert harness.tokens[i] == continuation(prompt, 10 + i, 1000)
        assert computed(harness, i) == tail + 10 + i - 1
    assert computed(harness, 1) == length + 9
    assert harness.scheduler.load().used_state_slots == 0


@pytest.mark.parametrize("spare", [0, 1, 2, 20])
def test_forks_that_wait_for_rows_or_outlive_their_parent_are_right(spare: int) -> None:
    harness = Harness(stateful(spare, max_batch_size=2))
    prompt = words(30)
    harness.add(request(1, prompt, 2))
    for i in range(2, 8):
        harness.add(request(i, prompt, 20 + i, fork_of=1 if i % 2 else i - 1))
    harness.run()
    for i in range(2, 8):
        assert harness.tokens[i] == continuation(prompt, 20 + i, 1000)
    assert harness.scheduler.load().used_state_slots == 0


def test_a_prompt_keeps_no_state_for_forks_that_have_ended() -> None:
    harness = Harness(stateful(max_batch_size=2, prefix_caching=False))
    prompt = words(30)
    harness.add(request(1, prompt, 50))
    harness.add(request(2, words(5), 50))
    harness.add(request(3, prompt, 50, fork_of=1))
    harness.step()
    assert harness.scheduler.load().used_state_slots == 3
    stats = harness.scheduler.stats(harness.worker.steps[-1])
    assert (stats["Used state slots"], stats["Cached states"]) == (3, 0)
    harness.batch.cancel(3)
    assert harness.scheduler.load().used_state_slots == 2


def test_a_preempted_sequence_resumes_from_the_last_block_that_it_has_passed() -> None:
    harness = Harness(stateful())
    harness.add(request(1, words(10), 50))
    for _ in range(21):
        harness.step()
    (sequence,) = harness.batch.running
    assert sequence.num_computed == 30
    harness.batch.preempt(sequence)
    harness.step()
    assert harness.worker.steps[-1].starts == [28]
    harness.run()
    assert harness.tokens[1] == continuation(words(10), 50, 1000)


@pytest.mark.parametrize("spare", [0, 1, 20])
@pytest.mark.parametrize("steps", range(1, 40))
def test_preemption_after_any_step_changes_nothing(steps: int, spare: int) -> None:
    harness = Harness(stateful(spare, max_batch_prefill_tokens=7))
    prompt = words(30)
    harness.add(request(1, prompt, 30))
    for _ in range(steps):
        harness.step()
    for sequence in list(harness.batch.running):
        harness.batch.preempt(sequence)
    harness.run()
    assert harness.tokens[1] == continuation(prompt, 30, 1000)


def test_a_long_prompt_resumes_from_its_last_chunk() -> None:
    harness = Harness(stateful(max_batch_prefill_tokens=18))
    harness.add(request(1, words(100), 3))
    harness.step()
    harness.step()
    harness.batch.preempt(harness.batch.running[0])
    harness.step()
    assert harness.worker.steps[-1].starts == [36]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("spare", [0, 1, 20])
def test_a_state_takes_no_token_that_a_forced_one_replaces(spare: int, depth: int) -> None:
    """Thinking budgets and grammars, cut off at every position of blocks, a step ahead."""
    grammar = slots(range(100, 120), [11], [12], [13], range(30), repeat=True)
    cases: list[tuple[list[int], dict[str, Any]]] = []
    expected = []
    for length in range(1, 2 * SIZE + 1):
        prompt = words(length, seed=length)
        for tokens in range(6):
            cases.append((prompt, {"thinking": budget(tokens)}))
            expected.append(budgeted(prompt, 20, budget(tokens)))
        cases.append((prompt, {"grammar": grammar, "stop_token_ids": frozenset({EOS})}))
        expected.append(constrained(prompt, 20, grammar))
    worker, tokens_of = _run_ahead(stateful(spare), cases, depth)
    assert tokens_of == expected
    assert any(step.forced_tokens for step in worker.steps)


def _run_ahead(
    bounds: SchedulerConfig, cases: list[tuple[list[int], dict[str, Any]]], depth: int
) -> tuple[FakeWorker, list[list[int]]]:
    """Run requests together with ``depth`` steps ahead of the oldest result."""
    worker = FakeWorker(bounds.block_size, state_slots=bounds.num_state_slots)
    scheduler = Scheduler(bounds, None, FakeCompiler())
    tokens: list[list[int]] = [[] for _ in cases]
    for i, (prompt, more) in enumerate(cases):
        assert scheduler.add(request(i, prompt, 20, **more)) is None
    scheduler.batch.collect_grammars()
    pending: deque[PendingResult] = deque()

    def collect() -> None:
        outputs = scheduler.update(pending.popleft().wait())
        for request_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            tokens[request_id].append(token)

    while scheduler.batch.live or pending:
        step = scheduler.schedule()
        if step is not None:
            handle = worker.launch(step)
            masks = None
            if scheduler.batch.grammars.needs_mask:
                while pending:
                    collect()
                masks = scheduler.batch.grammars.masks()
            pending.append(worker.sample(handle, masks))
        while pending and (step is None or len(pending) > depth):
            collect()
    assert scheduler.load().used_state_slots == 0
    return worker, tokens


@pytest.mark.parametrize("spare", [0, 1, 20])
def test_a_cancelled_sequence_leaves_its_slot_to_one_that_starts_a_step_ahead(spare: int) -> None:
    bounds = stateful(spare, max_batch_size=1)
    worker = FakeWorker(SIZE, state_slots=bounds.num_state_slots)
    scheduler = Scheduler(bounds)
    tokens: list[int] = []
    for steps in range(1, 12):
        scheduler.add(request(steps, words(9), 20))
        pending: deque[PendingResult] = deque()
        for _ in range(steps):
            pending.append(worker.sample(worker.launch(_next(scheduler))))
            if len(pending) > 1:
                scheduler.update(pending.popleft().wait())
        scheduler.batch.cancel(steps)
        scheduler.add(request(100 + steps, words(7, steps), 20))
        tokens = []
        while scheduler.batch.live:
            if (step := scheduler.schedule()) is not None:
                pending.append(worker.sample(worker.launch(step)))
            outputs = scheduler.update(pending.popleft().wait())
            tokens += outputs.token_ids
        while pending:
            scheduler.update(pending.popleft().wait())
        assert tokens == continuation(words(7, steps), 20, 1000)
        assert scheduler.load().used_state_slots == 0


def _next(scheduler: Scheduler) -> Step:
    step = scheduler.schedule()
    assert step is not None
    return step


def test_a_failing_step_makes_no_snapshot() -> None:
    harness = Harness(stateful())
    prompt = words(41)
    harness.add(request(1, prompt, 5))
    assert harness.scheduler.schedule() is not None
    harness.take(harness.scheduler.fail("broke"))
    assert harness.finished[1].reason is FinishReason.ERROR
    load = harness.scheduler.load()
    assert (load.used_state_slots, load.cached_states) == (0, 0)


def test_a_failing_row_makes_no_snapshot() -> None:
    harness = Harness(stateful())
    harness.worker.poison = {1}
    harness.add(request(1, words(41), 5))
    harness.run()
    load = harness.scheduler.load()
    assert (load.used_state_slots, load.cached_states) == (0, 0)


def test_a_chain_of_growing_prompts_computes_two_blocks_at_most_each() -> None:
    """As beam search sends them, one token longer each time."""
    harness = Harness(stateful())
    prompt = words(30)
    answer(harness, 0, prompt, 1)
    for i in range(1, 40):
        prompt = [*prompt, *harness.tokens[i - 1]]
        assert answer(harness, i, prompt, 1) <= 2 * SIZE


@pytest.mark.parametrize("batching", list(Batching))
@pytest.mark.parametrize("spare", [0, 1, 3])
def test_a_snapshot_is_written_over_rather_than_lost_without_use(
    spare: int, batching: Batching
) -> None:
    """All spare slots may be in use for a moment; rows must not wait for them."""
    harness = Harness(stateful(spare, batching=batching, max_batch_size=4))
    prompts = [words(20, seed) for seed in range(4)]
    request_id = 0
    for _ in range(4):
        for prompt in prompts:
            request_id += 1
            harness.add(request(request_id, prompt, 8))
        harness.run()
    assert len(harness.finished) == request_id
    if spare:
        assert harness.scheduler.load().reused_tokens > 0


def test_too_few_slots_for_the_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="7 state slots are too few for 8 rows"):
        Scheduler(limits(num_state_slots=7))


def test_each_of_many_answers_in_turn_leaves_a_snapshot() -> None:
    harness = Harness(stateful(spare=2, num_blocks=400))
    for i in range(0, 20, 2):
        prompt = words(3, seed=i)
        answer(harness, i, prompt, 30)
        assert answer(harness, i + 1, [*prompt, *harness.tokens[i], 5], 1) == 34 - 32
