"""Thinking budgets: what counts as reasoning, and how the engine ends it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.engine.fake_grammar import EOS, FakeCompiler, slots
from tests.unit.engine.fake_thinking import CLOSE, budget, budgeted
from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.engine.test_core import running
from tests.unit.engine.test_grammar import Constrained
from tests.unit.engine.test_scheduler import GREEDY, Harness, limits, request, with_states
from tgi_cli.engine.config import Batching, CapacityPolicy
from tgi_cli.engine.messages import EngineInfo, FinishReason
from tgi_cli.engine.scheduler import Scheduler
from tgi_cli.engine.thinking import ThinkingBudget, ThinkingProgress
from tgi_cli.engine.validation import validate_request

PROMPT = list(range(9))


def progress(tokens: int, *given: int, **more: Any) -> ThinkingProgress:
    found = ThinkingProgress(budget(tokens, **{"open": (1, 2), "close": (3, 4)} | more))
    for token_id in given:
        found.accept(token_id)
    return found


# ---------------------------------------------------------------------- what counts


@pytest.mark.parametrize(
    ("inside", "given", "tokens", "ends_inside"),
    [
        (True, [], 0, True),
        (True, [8, 9], 2, True),
        (True, [8, 9, 3, 4], 2, False),
        (True, [8, 3, 4, 9, 9], 1, False),
        (True, [8, 3, 9, 3, 4], 3, False),
        (True, [3, 3, 4], 1, False),
        (False, [8, 9], 0, False),
        (False, [1, 1, 2, 8], 1, True),
        (False, [2, 1, 8], 0, False),
        (False, [1, 2, 8, 3, 4, 9, 1, 2, 8, 8, 3, 4], 3, False),
    ],
)
def test_tokens_between_the_markers_count(
    inside: bool, given: list[int], tokens: int, ends_inside: bool
) -> None:
    found = progress(100, *given, inside=inside)
    assert (found.tokens, found.inside) == (tokens, ends_inside)


def test_the_closing_marker_is_due_when_the_budget_is_spent() -> None:
    assert progress(3, 8, 9).due() == ()
    assert progress(3, 8, 9, 8).due() == (3, 4)
    assert progress(3, 8, 9, 8, inside=False).due() == ()


def test_a_marker_that_the_model_has_begun_is_only_completed() -> None:
    assert progress(3, 8, 9, 3).due() == (4,)
    assert progress(3, 8, 9, 3, 4).due() == ()


def test_what_only_looked_like_a_marker_does_not_exceed_the_budget() -> None:
    assert progress(3, 8, 3, 8).due() == (3, 4)


def test_reasoning_that_is_opened_again_spends_what_is_left() -> None:
    found = progress(3, 1, 2, 8, 3, 4, 1, 2, 8, inside=False)
    assert found.due() == ()
    found.accept(8)
    assert found.due() == (3, 4)


def test_behind_an_enforced_budget_the_answer_is_forced_too() -> None:
    found = progress(1, 8, then=(5,), answer=(6, 7))
    assert found.due() == (3, 4, 5)
    found.enforce()
    for token_id in (3, 4, 5, 1, 2):
        found.accept(token_id)
    assert found.due() == (3, 4, 5, 6, 7)


@pytest.mark.parametrize("wrong", [{"tokens": -1}, {"open": ()}, {"close": ()}])
def test_a_budget_without_markers_or_below_zero_is_invalid(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="thinking budget"):
        ThinkingBudget(**{"tokens": 1, "open": (1,), "close": (2,)} | wrong)


# ---------------------------------------------------------------------- what the engine does


@pytest.mark.parametrize("tokens", [0, 1, 5, 6, 7, 17])
def test_the_answer_is_that_to_the_prompt_with_reasoning_and_marker(tokens: int) -> None:
    harness = Harness(limits())
    harness.add(request(1, PROMPT, 30, thinking=budget(tokens)))
    harness.run()
    thought = continuation(PROMPT, tokens, 1000)
    begin = [*PROMPT, *thought, *CLOSE]
    answer = continuation(begin, 28 - tokens, 1000)
    assert harness.tokens[1] == [*thought, *CLOSE, *answer]
    assert harness.finished[1].reason is FinishReason.LENGTH


def test_a_budget_costs_no_masks_and_no_steps() -> None:
    harness = Harness(limits())
    harness.add(request(1, PROMPT, 30, thinking=budget(10)))
    harness.run()
    assert harness.worker.masked == 0
    assert len(harness.worker.steps) == 30 - len(CLOSE)


def test_a_budget_that_is_not_reached_changes_nothing() -> None:
    free = continuation(PROMPT, 30, 1000)
    harness = Harness(limits())
    harness.add(request(1, PROMPT, 30, thinking=budget(20, close=(free[4],))))
    harness.add(request(2, PROMPT, 30, thinking=budget(0, inside=False)))
    harness.run()
    assert harness.tokens[1] == harness.tokens[2] == free


def test_reasoning_that_the_model_opens_counts_from_there() -> None:
    free = continuation(PROMPT, 30, 1000)
    harness = Harness(limits())
    harness.add(request(1, PROMPT, 30, thinking=budget(5, inside=False, open=(free[3],))))
    harness.run()
    assert harness.tokens[1][:11] == [*free[:9], *CLOSE]


def test_forced_tokens_are_reported_with_logprob_zero() -> None:
    harness = Harness(limits())
    harness.worker.logprob = -2.5
    sampling = replace(GREEDY, top_logprobs=2)
    harness.add(replace(request(1, PROMPT, 30, thinking=budget(1)), sampling=sampling))
    outputs = harness.step()
    assert outputs is not None
    assert outputs.token_ids[1:] == list(CLOSE)
    assert outputs.logprobs == [-2.5, 0.0, 0.0]
    assert outputs.top_ids[1:] == [[1001], [1002]]


def test_a_budget_of_zero_is_enforced_before_anything_is_sampled() -> None:
    harness = Harness(limits())
    harness.worker.logprob = -2.5
    harness.add(request(1, PROMPT, 30, thinking=budget(0)))
    outputs = harness.step()
    assert outputs is not None
    assert outputs.token_ids[:2] == list(CLOSE)
    assert outputs.logprobs == [0.0, 0.0, -2.5]
    assert harness.worker.steps[0].counts == [len(PROMPT) + len(CLOSE)]


def test_a_budget_of_zero_needs_room_for_the_marker_and_a_token() -> None:
    free = continuation(PROMPT, 1, 1000)
    answer = continuation([*PROMPT, *CLOSE], 1, 1000)
    for new, expected in enumerate([free, [*free, CLOSE[0]], [*CLOSE, *answer]], 1):
        harness = Harness(limits())
        harness.add(request(1, PROMPT, new, thinking=budget(0)))
        harness.run()
        assert harness.tokens[1] == expected
        assert harness.finished[1].reason is FinishReason.LENGTH


def test_a_marker_that_does_not_fit_is_cut_off() -> None:
    harness = Harness(limits())
    harness.add(request(1, PROMPT, 6, thinking=budget(5)))
    harness.run()
    assert harness.tokens[1] == [*continuation(PROMPT, 5, 1000), CLOSE[0]]
    assert harness.finished[1].reason is FinishReason.LENGTH


@pytest.mark.parametrize("tokens", [0, 4])
def test_a_marker_that_is_a_stop_id_ends_the_request(tokens: int) -> None:
    harness = Harness(limits())
    stops = frozenset({CLOSE[0]})
    harness.add(request(1, PROMPT, 30, thinking=budget(tokens), stop_token_ids=stops))
    harness.run()
    assert harness.tokens[1] == [*continuation(PROMPT, max(tokens, 1), 1000), CLOSE[0]]
    assert harness.finished[1].reason is FinishReason.EOS_TOKEN


def test_a_stop_id_behind_forced_tokens_is_reported_with_them() -> None:
    answer = continuation([*PROMPT, *CLOSE], 1, 1000)
    harness = Harness(limits())
    stops = frozenset(answer)
    harness.add(request(1, PROMPT, 30, thinking=budget(0), stop_token_ids=stops))
    harness.run()
    assert harness.tokens[1] == [*CLOSE, *answer]
    assert harness.finished[1].reason is FinishReason.EOS_TOKEN


@pytest.mark.parametrize(
    "more",
    [
        {"logits_processors": (lambda *args: args[1],)},
        {"sampling": replace(GREEDY, bad_words=((1001,),))},
        {"sampling": replace(GREEDY, allowed_token_ids=tuple(range(1000)))},
        {"sampling": replace(GREEDY, min_new_tokens=20)},
    ],
)
def test_the_marker_is_forced_whatever_may_be_sampled(more: dict[str, Any]) -> None:
    harness = Harness(limits())
    harness.add(replace(request(1, PROMPT, 30, thinking=budget(4)), **more))
    harness.run()
    assert harness.tokens[1] == budgeted(PROMPT, 30, budget(4))


def test_raw_logits_of_every_token_exclude_a_budget() -> None:
    asked = request(1, PROMPT, 30, thinking=budget(4), return_generation_logits=True)
    refused = Scheduler(limits()).add(asked)
    assert refused is not None
    assert "forced tokens have no logits" in refused.error


@pytest.mark.parametrize("tokens", [0, 3])
def test_reasoning_that_the_model_opens_again_is_closed_by_the_answer(tokens: int) -> None:
    begin = [*continuation(PROMPT, tokens, 1000), *CLOSE]
    opened = continuation([*PROMPT, *begin], 1, 1000)
    thinking = budget(tokens, open=tuple(opened), answer=(1003,))
    harness = Harness(limits())
    harness.add(request(1, PROMPT, 30, thinking=thinking))
    harness.run()
    again = [*begin, *opened, *CLOSE, 1003]
    answer = continuation([*PROMPT, *again], 30 - len(again), 1000)
    assert harness.tokens[1] == [*again, *answer]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_samples_share_a_prompt_whose_reasoning_is_closed(block_size: int) -> None:
    harness = Harness(limits(block_size=block_size, num_blocks=512 // block_size))
    prompt = list(range(31))
    for first in (1, 4):  # the second time, the cache has the marker, too
        harness.add(request(first, prompt, 20, thinking=budget(0)))
        for other in (1, 2):
            harness.add(request(first + other, prompt, 20, thinking=budget(0), fork_of=first))
        cached = {}
        for _ in range(3):
            outputs = harness.step()
            assert outputs is not None
            cached |= {started.request_id: started.cached_tokens for started in outputs.started}
        computed = 30 // block_size * block_size if first > 1 else 0
        assert cached == {first: computed, first + 1: 30, first + 2: 30}
        harness.run()
    assert all(tokens == budgeted(prompt, 20, budget(0)) for tokens in harness.tokens.values())


@pytest.mark.parametrize("seed", range(30))
def test_budgets_hold_alone_and_together(seed: int) -> None:
    """Random budgets, prompts, depths, blocks and rules, in the loop, in its thread."""
    random_ = random.Random(seed)
    block_size = random_.choice([1, 4, 16])
    bounds = limits(
        block_size=block_size,
        num_blocks=-(-96 // block_size) + random_.choice([0, 2, 40]),
        max_total_tokens=96,
        max_batch_size=random_.choice([2, 4, 8]),
        max_batch_prefill_tokens=random_.choice([4, 32, 96]),
        batching=random_.choice(list(Batching)),
        capacity_policy=random_.choice(list(CapacityPolicy)),
        prefix_caching=random_.random() < 0.7,
    )
    bounds = with_states(bounds, [None, 0, 2, 20][seed // 2 % 4])
    expected = {}
    worker = FakeWorker(block_size, state_slots=bounds.num_state_slots)
    with running(worker, bounds, seed % 2) as client:
        for i in range(24):
            prompt = [random_.randrange(3)] * random_.randint(1, 12)
            new = random_.randint(1, 60)
            own = continuation(prompt, 40, 1000)
            thinking = random_.choice(
                [
                    None,
                    budget(random_.randrange(30)),
                    budget(random_.randrange(30), close=tuple(own[5:7]), then=(1003,)),
                    budget(random_.randrange(9), inside=False, open=tuple(own[8:10])),
                ]
            )
            expected[i] = (
                continuation(prompt, new, 1000)
                if thinking is None
                else budgeted(prompt, new, thinking)
            )
            client.core.inbox.put(request(i, prompt, new, thinking=thinking))
        client.read_until_finished(*range(24))
    for i, tokens in expected.items():
        assert client.tokens[i] == tokens, f"request {i}"


# ---------------------------------------------------------------------- with a grammar

FREE = range(100, 180)


def with_grammar(harness: Constrained, grammar: str, new: int = 30, **more: Any) -> list[int]:
    stops = frozenset({EOS})
    harness.add(request(1, PROMPT, new, grammar=grammar, stop_token_ids=stops, **more))
    harness.run()
    return harness.tokens[1]


def test_a_grammar_follows_the_forced_marker() -> None:
    grammar = slots(FREE, FREE, [*FREE, 5], [6], FREE, [11])
    harness = Constrained()
    tokens = with_grammar(harness, grammar, thinking=budget(2, close=(5, 6)))
    assert tokens[2:4] == [5, 6]
    assert (tokens[4] in FREE, tokens[5:]) == (True, [11, EOS])


def test_the_marker_waits_until_the_grammar_allows_it() -> None:
    grammar = slots(FREE, FREE, FREE, FREE, [*FREE, 5], [12])
    harness = Constrained()
    tokens = with_grammar(harness, grammar, thinking=budget(2, close=(5,)))
    assert set(tokens[:4]) <= set(FREE)
    assert tokens[4:] == [5, 12, EOS]


def test_a_grammar_begins_behind_a_marker_that_is_forced_at_once() -> None:
    grammar = slots([5], FREE, [11])
    harness = Constrained()
    tokens = with_grammar(harness, grammar, thinking=budget(0, close=(5,)))
    assert (tokens[0], tokens[1] in FREE, tokens[2:]) == (5, True, [11, EOS])


def test_a_grammar_that_refuses_a_marker_that_is_forced_at_once_fails_alone() -> None:
    harness = Constrained()
    harness.add(request(2, PROMPT, 5))
    assert with_grammar(harness, slots(FREE, FREE), thinking=budget(0, close=(5,))) == []
    assert harness.finished[1].reason is FinishReason.GRAMMAR
    assert harness.tokens[2] == continuation(PROMPT, 5, 1000)


def test_an_engine_without_grammars_has_budgets() -> None:
    harness = Harness(limits())
    assert harness.batch.grammars.eos_token_ids == ()
    harness.add(request(1, PROMPT, 30, thinking=budget(3)))
    harness.run()
    assert harness.tokens[1] == budgeted(PROMPT, 30, budget(3))


def test_a_budget_needs_no_result_before_the_next_step_is_sampled() -> None:
    """At depth 1, masks wait for the last result; a budget has none."""
    seen: list[str] = []

    class Told(FakeWorker):
        def sample(self, handle: object, masks: Any = None) -> Any:
            seen.append("sample")
            pending = super().sample(handle, masks)
            wait = pending.wait
            pending.wait = lambda: seen.append("wait") or wait()  # type: ignore[func-returns-value, method-assign]
            return pending

    with running(Told(4), limits(), 1, FakeCompiler()) as client:
        client.core.inbox.put(request(1, PROMPT, 12, thinking=budget(9)))
        client.read_until_finished(1)
    assert seen[:5] == ["sample", "sample", "wait", "sample", "wait"]
    assert client.tokens[1] == budgeted(PROMPT, 12, budget(9))


# ---------------------------------------------------------------------- what comes from outside


def info() -> EngineInfo:
    numbers = dict.fromkeys(
        ("max_batch_prefill_tokens", "max_batch_total_tokens", "max_batch_size", "block_size"), 1
    )
    return EngineInfo(
        model_id="", revision="", model_type="", dtype="", device="", vocab_size=1000,
        eos_token_ids=(), max_input_tokens=99, max_total_tokens=99, weight_bytes=1,
        load_seconds=1.0, **numbers,
    )  # fmt: skip


@pytest.mark.parametrize("markers", [{"close": (1000,)}, {"then": (5,) * 63}])
def test_markers_of_unknown_or_too_many_tokens_are_refused(markers: dict[str, Any]) -> None:
    thinking = ThinkingBudget(**{"tokens": 1, "open": (1,), "close": (2,)} | markers)
    with pytest.raises(ValueError, match=r"token id is not below|markers of more than 64"):
        validate_request(request(1, PROMPT, 5, thinking=thinking), info())
    validate_request(
        request(1, PROMPT, 5, thinking=ThinkingBudget(tokens=1, open=(1,), close=(999,))), info()
    )
