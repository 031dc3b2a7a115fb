"""Requests with a grammar: compilation, allowed and forced tokens, and their ends."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.engine.fake_grammar import EOS, VOCAB, FakeCompiler, constrained, slots
from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.engine.test_core import running
from tests.unit.engine.test_scheduler import GREEDY, Harness, limits, request, with_states
from tgi_cli.engine.config import Batching, CapacityPolicy
from tgi_cli.engine.messages import FinishReason, GenerationRequest
from tgi_cli.engine.scheduler import Scheduler

CHOICE = range(100, 180)
OPEN = slots(CHOICE, CHOICE, [5], repeat=True)
RECORD = slots(CHOICE, [11], [12], [13], CHOICE, [14], [15])
"""A choice, three tokens without one, a choice, two tokens, and nothing more."""


class Constrained(Harness):
    def __init__(self, compiler: FakeCompiler | None = None, **changes: Any) -> None:
        super().__init__(bounds := limits(**changes))
        self.compiler = compiler or FakeCompiler()
        self.scheduler = Scheduler(bounds, None, self.compiler)
        self.batch = self.scheduler.batch

    def step(self) -> Any:
        for finished in self.batch.collect_grammars():
            self.finished[finished.request_id] = finished
        step = self.scheduler.schedule()
        if step is None:
            return None
        handle = self.worker.launch(step)
        masks = self.batch.grammars.masks() if self.batch.grammars.needs_mask else None
        outputs = self.scheduler.update(self.worker.sample(handle, masks).wait())
        self.take(outputs)
        return outputs


def asking(
    request_id: int, prompt: range | list[int], new: int, grammar: str | None, **more: Any
) -> GenerationRequest:
    stops = frozenset({EOS})
    return request(request_id, prompt, new, **{"stop_token_ids": stops, "grammar": grammar} | more)


def test_only_tokens_that_the_grammar_allows_are_chosen() -> None:
    harness = Constrained()
    harness.add(asking(1, range(9), 60, OPEN))
    harness.run()
    assert harness.tokens[1] == constrained(range(9), 60, OPEN)
    assert set(harness.tokens[1]) <= {*CHOICE, 5, EOS}


@pytest.mark.parametrize("grammar", [OPEN, RECORD, slots([20], [21], [22])])
@pytest.mark.parametrize("new", [1, 2, 3, 6, 8, 30])
def test_forced_tokens_change_the_number_of_steps_alone(grammar: str, new: int) -> None:
    steps = {}
    for jumps in (True, False):
        harness = Constrained(FakeCompiler(jumps=jumps))
        harness.add(asking(1, range(9), new, grammar))
        harness.run()
        assert harness.tokens[1] == constrained(range(9), new, grammar)
        steps[jumps] = len(harness.worker.steps)
        whole = grammar != OPEN and new >= len(json.loads(grammar)[0])
        ends = whole or harness.tokens[1][-1] == EOS
        reason = FinishReason.EOS_TOKEN if ends else FinishReason.LENGTH
        assert harness.finished[1].reason is reason
    assert steps[True] <= steps[False]
    if grammar is RECORD and new == 30:
        # Prompt and choice; a chunk of four and a choice; with it the end is known.
        assert (steps[True], steps[False]) == (2, 7)


@pytest.mark.parametrize(
    ("wishes", "reads"),
    [
        ({}, False),
        ({"grammar": OPEN}, True),
        ({"logits_processors": (lambda *_: None,)}, True),
        ({"return_generation_logits": True}, True),
        ({"prompt_logprobs": 2}, False),
    ],
)
def test_steps_say_whether_the_logits_of_what_they_choose_are_read(
    wishes: dict[str, Any], reads: bool
) -> None:
    """By one process of a model's several; chunks that choose nothing do not count."""
    harness = Constrained(max_batch_prefill_tokens=16)
    harness.add(request(1, range(3), 40))
    harness.step()
    harness.add(request(2, range(40), 3, **wishes))
    harness.run()
    steps = harness.worker.steps
    row = next(new.row for step in steps for new in step.new if new.request_id == 2)
    chosen = [step for step in steps if row in step.rows and step.samples[step.rows.index(row)]]
    assert 2 <= len(chosen) < len(steps)
    assert [step.reads_logits for step in chosen] == [reads] * len(chosen)
    assert not any(step.reads_logits for step in steps if step not in chosen)


def test_forced_tokens_are_reported_at_once_with_logprob_zero() -> None:
    harness = Constrained()
    harness.worker.logprob = -2.5
    sampling = replace(GREEDY, top_logprobs=2)
    harness.add(replace(asking(1, range(9), 30, RECORD), sampling=sampling))
    outputs = harness.step()
    assert outputs.token_ids[1:] == [11, 12, 13]
    assert outputs.logprobs == [-2.5, 0.0, 0.0, 0.0]
    assert outputs.top_ids[1:] == [[11], [12], [13]]
    assert outputs.top_logprobs[1:] == [[0.0]] * 3
    step = harness.scheduler.schedule()
    assert step is not None
    assert (step.counts, step.starts, step.samples) == ([4], [9], [True])
    assert [(given.start, given.token_ids) for given in step.forced_tokens] == [(10, [11, 12, 13])]


def test_a_complete_grammar_ends_its_request_without_another_step() -> None:
    harness = Constrained()
    harness.add(asking(1, range(9), 30, slots(CHOICE)))
    outputs = harness.step()
    assert outputs.token_ids[1:] == [EOS]
    assert harness.finished[1].reason is FinishReason.EOS_TOKEN
    assert harness.step() is None


def test_completing_the_grammar_with_the_last_token_is_an_eos() -> None:
    harness = Constrained()
    harness.add(asking(1, range(9), 1, slots(CHOICE)))
    harness.run()
    assert len(harness.tokens[1]) == 1
    assert harness.finished[1].reason is FinishReason.EOS_TOKEN


@pytest.mark.parametrize("grammar", [OPEN, RECORD])
def test_a_grammar_ends_a_request_that_ignores_its_stop_ids(grammar: str) -> None:
    harness = Constrained()
    harness.add(asking(1, range(9), 200, grammar, ignore_eos=True))
    harness.run()
    expected = constrained(range(9), 200, grammar)
    assert harness.finished[1].reason is FinishReason.EOS_TOKEN
    # The stop id is reported where the model chose it, not where it would have been forced.
    assert harness.tokens[1] == (expected if grammar is OPEN else expected[:-1])


def test_a_stop_id_among_forced_tokens_ends_the_request() -> None:
    harness = Constrained()
    harness.add(asking(1, range(9), 30, RECORD, stop_token_ids=frozenset({12, EOS})))
    harness.run()
    assert harness.tokens[1] == constrained(range(9), 30, RECORD)[:3]
    assert harness.finished[1].reason is FinishReason.EOS_TOKEN


def test_a_premature_stop_id_is_not_forced() -> None:
    harness = Constrained()
    sampling = replace(GREEDY, min_new_tokens=4)
    stops = frozenset({12, EOS})
    harness.add(replace(asking(1, range(9), 30, RECORD, stop_token_ids=stops), sampling=sampling))
    assert harness.step().token_ids[1:] == [11]


@pytest.mark.parametrize(
    "more",
    [
        {"return_generation_logits": True},
        {"logits_processors": (lambda *args: args[1],)},
        {"sampling": replace(GREEDY, bad_words=((900, 901),))},
        {"sampling": replace(GREEDY, allowed_token_ids=tuple(range(1000)))},
    ],
)
def test_processors_and_token_lists_get_every_token(more: dict[str, Any]) -> None:
    harness = Constrained()
    harness.add(replace(asking(1, range(9), 30, RECORD), **more))
    harness.run()
    assert harness.tokens[1] == constrained(range(9), 30, RECORD)[:-1]
    assert len(harness.worker.steps) == 7
    assert not any(step.forced_tokens for step in harness.worker.steps)


def test_a_grammar_without_a_next_token_fails_its_request_alone() -> None:
    harness = Constrained()
    harness.add(asking(1, range(9), 30, slots(CHOICE, CHOICE, [], CHOICE)))
    harness.add(asking(2, range(9), 30, OPEN))
    harness.run()
    assert harness.finished[1].reason is FinishReason.ERROR
    assert harness.finished[1].error
    assert len(harness.tokens[1]) == 2
    assert harness.tokens[2] == constrained(range(9), 30, OPEN)


def test_a_failing_matcher_ends_its_request_with_the_cause() -> None:
    compiler = FakeCompiler()
    compiler.error_at = 1
    harness = Constrained(compiler)
    harness.add(asking(1, range(9), 30, OPEN))
    harness.run()
    assert harness.finished[1].reason is FinishReason.GRAMMAR
    assert harness.finished[1].error == "the grammar cannot be completed: not at position 1"


def test_a_grammar_that_cannot_be_compiled_ends_its_request_with_the_cause() -> None:
    harness = Constrained()
    harness.add(asking(1, range(9), 30, "nonsense"))
    harness.add(asking(2, range(9), 5, None))
    harness.run()
    assert harness.finished[1].reason is FinishReason.GRAMMAR
    assert harness.finished[1].error == "invalid grammar: what is nonsense?"
    assert harness.tokens[2] == continuation(range(9), 5, VOCAB)
    assert harness.batch.grammars.live == 0


def test_an_engine_without_grammars_refuses_them() -> None:
    refused = Scheduler(limits()).add(asking(1, range(9), 30, OPEN))
    assert refused is not None
    assert refused.reason is FinishReason.ERROR
    assert "no support for grammars" in refused.error


@pytest.mark.tgi_pain(7)
@pytest.mark.parametrize("batching", Batching)
def test_others_pass_while_a_grammar_is_compiled(batching: Batching) -> None:
    harness = Constrained(FakeCompiler(slow=True), batching=batching)
    harness.add(asking(1, range(9), 30, OPEN))
    harness.add(asking(2, range(20, 29), 3, None))
    for _ in range(10):
        harness.step()
    assert harness.finished[2].reason is FinishReason.LENGTH
    assert not harness.tokens[1]
    assert harness.batch.grammars.compiling
    harness.compiler.finish()
    harness.run()
    assert harness.tokens[1] == constrained(range(9), 30, OPEN)


def test_cancelling_during_compilation_leaves_nothing_behind() -> None:
    harness = Constrained(FakeCompiler(slow=True))
    harness.add(asking(1, range(9), 30, OPEN))
    assert harness.batch.cancel(1) is not None
    assert not harness.batch.grammars.compiling
    harness.compiler.finish()
    assert harness.step() is None
    assert harness.batch.grammars.live == 0


def test_samples_of_one_prompt_each_have_their_own_matcher() -> None:
    harness = Constrained()
    harness.add(asking(1, range(9), 30, OPEN))
    harness.add(asking(2, range(9), 20, RECORD, fork_of=1))
    harness.add(asking(3, range(9), 10, OPEN, fork_of=1))
    harness.run()
    assert harness.tokens[1] == constrained(range(9), 30, OPEN)
    assert harness.tokens[2] == constrained(range(9), 20, RECORD)
    assert harness.tokens[3] == constrained(range(9), 10, OPEN)
    assert sum(sum(step.counts) for step in harness.worker.steps[:2]) < 18


def test_forced_tokens_preempt_a_sequence_of_lower_priority_for_blocks() -> None:
    """Thirteen blocks: two sequences fit until one of them jumps over forty tokens."""
    long = slots(CHOICE, *([i] for i in range(300, 340)), CHOICE)
    harness = Constrained(num_blocks=15, max_total_tokens=60)
    harness.add(asking(1, range(8), 50, long))
    harness.add(asking(2, range(50, 58), 40, None))
    harness.run()
    begun = [new.request_id for step in harness.worker.steps for new in step.new]
    assert (begun.count(1), begun.count(2)) == (1, 2), "the first in priority is not preempted"
    assert harness.tokens[1] == constrained(range(8), 50, long)
    assert harness.tokens[2] == continuation(range(50, 58), 40, VOCAB)


def test_forced_tokens_beyond_the_budget_take_several_steps() -> None:
    long = slots(CHOICE, *([i] for i in range(300, 340)), CHOICE)
    harness = Constrained(max_batch_prefill_tokens=16)
    harness.add(asking(1, range(8), 50, long))
    harness.run()
    assert harness.tokens[1] == constrained(range(8), 50, long)
    assert [step.num_tokens for step in harness.worker.steps] == [8, 16, 16, 9]


@pytest.mark.parametrize("seed", range(30))
def test_constrained_requests_generate_the_same_alone_and_together(seed: int) -> None:
    """Random grammars, prompts, depths, blocks and rules, in the loop, in its thread."""
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
    worker = FakeWorker(block_size, state_slots=bounds.num_state_slots)
    expected = {}
    with running(worker, bounds, seed % 2, FakeCompiler()) as client:
        for i in range(24):
            prompt = [random_.randrange(3)] * random_.randint(1, 12)
            new = random_.randint(1, 60)
            grammar = random_.choice([None, _random_grammar(random_), _random_grammar(random_)])
            if grammar is None:
                expected[i] = continuation(prompt, new, VOCAB)
                client.core.inbox.put(request(i, prompt, new))
            else:
                expected[i] = constrained(prompt, new, grammar)
                client.core.inbox.put(asking(i, prompt, new, grammar))
        client.read_until_finished(*range(24))
    for i, tokens in expected.items():
        assert client.finished[i][0] in (FinishReason.LENGTH, FinishReason.EOS_TOKEN)
        assert client.tokens[i] == tokens, f"request {i}"


def _random_grammar(random_: random.Random) -> str:
    some = [
        random_.choice([CHOICE, [random_.randrange(200, 900)], [random_.randrange(200, 900)]])
        for _ in range(random_.randint(1, 20))
    ]
    return slots(*some, repeat=random_.random() < 0.5)


def test_the_loop_polls_for_a_compiled_grammar() -> None:
    compiler = FakeCompiler(slow=True)
    with running(FakeWorker(4), limits(), grammars=compiler) as client:
        client.core.inbox.put(asking(1, range(4), 9, RECORD))
        end = time.monotonic() + 60
        while not compiler.waiting and time.monotonic() < end:
            time.sleep(0.001)
        before = client.core.progress
        while client.core.progress < before + 3 and time.monotonic() < end:
            time.sleep(0.001)
        assert client.core.progress >= before + 3, "it counts as moving meanwhile"
        assert client.core.steps == 0
        compiler.finish()
        client.read_until_finished(1)
    assert client.tokens[1] == constrained(range(4), 9, RECORD)


@pytest.mark.parametrize("depth", [0, 1])
def test_masks_are_made_between_launch_and_sample(depth: int) -> None:
    """At depth 1 the device has a step to work on while the last result is taken in."""
    seen: list[str] = []

    class Told(FakeWorker):
        def launch(self, step: Any) -> Any:
            seen.append(f"launch {step.step_id}")
            return super().launch(step)

        def sample(self, handle: object, masks: Any = None) -> Any:
            seen.append("masked" if masks is not None else "free")
            pending = super().sample(handle, masks)
            wait = pending.wait
            number = seen[-2]
            pending.wait = lambda: seen.append(f"wait {number}") or wait()  # type: ignore[func-returns-value, method-assign]
            return pending

    with running(Told(4), limits(), depth, FakeCompiler()) as client:
        client.core.inbox.put(asking(1, range(4), 3, slots(CHOICE, CHOICE, CHOICE, CHOICE)))
        client.read_until_finished(1)
    order = ["launch 0", "masked", "launch 1", "wait 0"] if depth else ["launch 0", "masked"]
    assert [word.replace("wait launch", "wait") for word in seen][: len(order)] == order
