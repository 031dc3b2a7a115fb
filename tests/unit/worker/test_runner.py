from __future__ import annotations

import pytest
import torch

from tests.unit.worker.fakes import GREEDY, make_runner, new_row, next_token, run, step_of
from tgi_cli.engine.step import BlockAppend
from tgi_cli.errors import OutOfMemoryError
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker import runner as runner_module


def test_a_step_of_prefill_chunks_alone_samples_nothing():
    runner, _, _ = make_runner()
    tokens = [5, 6, 7, 8, 9, 10]
    result = run(runner, step_of((0, 0, 4, False), new=[new_row(0, tokens, [3, 1])]))
    assert result.token_ids == result.logprobs == result.top_ids == []
    result = run(runner, step_of((0, 4, 2, True)))
    assert result.token_ids == [next_token(tokens)]


def test_the_next_step_may_be_launched_before_the_result_is_awaited():
    runner, _, _ = make_runner()
    tokens = [1, 2, 3]
    pending = [
        runner.sample(runner.launch(step_of((2, 0, 3, True), new=[new_row(2, tokens, [0])])))
    ]
    pending.append(runner.sample(runner.launch(step_of((2, 3, 1, True)))))
    grown = step_of((2, 4, 1, True), appended=[BlockAppend(2, 1, [9])])
    pending.append(runner.sample(runner.launch(grown)))
    for result in pending:
        tokens.append(next_token(tokens))
        assert result.wait().token_ids == [tokens[-1]]


def test_a_reused_row_knows_nothing_of_its_last_sequence():
    runner, _, _ = make_runner()
    sampled = SamplingParams(temperature=2.0, seed=5, repetition_penalty=9.0, top_logprobs=2)
    run(runner, step_of((1, 0, 6, True), new=[new_row(1, [9] * 6, [4, 5], sampled)]))
    result = run(runner, step_of((1, 0, 2, True), freed=[1], new=[new_row(1, [7, 8], [6])]))
    assert result.token_ids == [next_token([7, 8])]
    assert result.top_ids == [[]]


def test_only_sampled_positions_reach_the_head_and_in_bounded_parts(monkeypatch):
    monkeypatch.setitem(runner_module.MAX_LOGITS, "cpu", 2 * 211)
    runner, model, _ = make_runner()
    new = [new_row(row, [row, 3, 4 + row], [row]) for row in range(6)]
    entries = [(row, 0, 3, True) if row != 2 else (row, 0, 2, False) for row in range(6)]
    result = run(runner, step_of(*entries, new=new))
    assert model.hidden_rows == [2, 2, 1]
    assert result.token_ids == [next_token([r, 3, 4 + r]) for r in (0, 1, 3, 4, 5)]


def test_top_logprobs_are_given_to_the_rows_that_ask(monkeypatch):
    monkeypatch.setitem(runner_module.MAX_LOGITS, "cpu", 2 * 211)
    runner, _, _ = make_runner()
    wanted = [GREEDY, SamplingParams(temperature=0.0, top_logprobs=2), GREEDY]
    wanted.append(SamplingParams(temperature=0.0, top_logprobs=4))
    new = [new_row(row, [row], [row], wanted[row]) for row in range(4)]
    result = run(runner, step_of(*((row, 0, 1, True) for row in range(4)), new=new))
    assert [len(ids) for ids in result.top_ids] == [0, 2, 0, 4]
    assert [len(values) for values in result.top_logprobs] == [0, 2, 0, 4]
    for row in (1, 3):
        assert result.top_ids[row][0] == result.token_ids[row]
        assert result.top_logprobs[row][0] == pytest.approx(result.logprobs[row])
        assert result.top_logprobs[row] == sorted(result.top_logprobs[row], reverse=True)


@pytest.mark.parametrize("rows_at_once", [1, 100])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=1, top_p=0.5, top_logprobs=2)])
def test_a_poisoned_row_is_reported_alone(monkeypatch, sampling, rows_at_once):
    monkeypatch.setitem(runner_module.MAX_LOGITS, "cpu", rows_at_once * 211)
    runner, model, _ = make_runner()
    prompts = [[row + 1, 50 + row] for row in range(4)]
    model.poisoned = {next_token(prompts[2])}
    new = [new_row(row, prompts[row], [row], sampling) for row in range(4)]
    entries = [(0, 0, 1, False), *((row, 0, 2, True) for row in (1, 2, 3))]
    result = run(runner, step_of(*entries, new=new))
    assert list(result.errors) == [1], "errors count sampled entries"
    assert "NaN" in result.errors[1]
    assert result.token_ids[0] == next_token(prompts[1])
    assert result.token_ids[2] == next_token(prompts[3])
    assert result.top_ids[1] == []
    assert all(value == value for value in result.logprobs)


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nmore"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_lack_of_memory_has_its_own_error_and_the_row_changes_hold(failure):
    runner, model, _ = make_runner()
    model.failure = failure
    step = step_of((0, 0, 2, True), new=[new_row(0, [1, 2], [7])])
    with pytest.raises(OutOfMemoryError) as caught:
        runner.launch(step)
    assert "\n" not in str(caught.value)
    assert "--max-batch-prefill-tokens" in caught.value.remedy
    assert run(runner, step_of((0, 0, 2, True))).token_ids == [next_token([1, 2])]


def test_other_errors_are_raised_unchanged():
    runner, model, _ = make_runner()
    model.failure = RuntimeError("the device is lost")
    with pytest.raises(RuntimeError, match="the device is lost"):
        runner.launch(step_of((0, 0, 1, True), new=[new_row(0, [1], [7])]))


def test_a_seed_gives_a_sequence_the_same_tokens_in_any_row_and_after_resuming():
    def tokens_of(row: int, resume_at: int | None, others: int) -> list[int]:
        runner, model, _ = make_runner()
        model.logits = lambda hidden: torch.zeros(len(hidden), 211)  # type: ignore[method-assign]
        wanted = SamplingParams(seed=11, top_p=0.9, temperature=0.8)
        tokens = [4, 5]
        new = [new_row(row, tokens, [row * 6 + i for i in range(5)], wanted)]
        mates = [other for other in range(6) if other != row][:others]
        new += [new_row(other, tokens, [other * 6], SamplingParams(seed=other)) for other in mates]
        entries = [(row, 0, 2, True), *((other, 0, 2, True) for other in mates)]
        tokens.append(run(runner, step_of(*entries, new=new)).token_ids[0])
        while len(tokens) < 12:
            start, changes = len(tokens) - 1, {}
            if len(tokens) == resume_at:
                blocks = [row * 6 + i for i in range(5)]
                changes = {"freed": [row], "new": [new_row(row, tokens, blocks, wanted, 2)]}
                start = 0
            step = step_of((row, start, len(tokens) - start, True), **changes)
            tokens += run(runner, step).token_ids
        return tokens

    alone = tokens_of(0, None, 0)
    assert len(set(alone)) > 5
    assert tokens_of(3, None, 4) == alone
    assert tokens_of(1, 7, 2) == alone
