"""What few requests ask for: prompt scores, raw logits, logits processors, grammar masks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.tools.checkpoints import make_llama
from tests.unit.worker.fakes import GREEDY, VOCAB, make_runner, new_row, next_token, run, step_of
from tgi_cli.config import ServeConfig
from tgi_cli.engine.step import NewRow, OptionalOutputs
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker import runner as runner_module
from tgi_cli.worker.factory import load_worker
from tgi_cli.worker.worker import ModelWorker


def asking(
    row: int,
    tokens: Sequence[int],
    blocks: Sequence[int],
    sampling: SamplingParams = GREEDY,
    prompt: int | None = None,
    **extras: Any,
) -> NewRow:
    count = len(tokens) if prompt is None else prompt
    request_id = 100 + row
    return NewRow(
        row, request_id, list(tokens), count, list(blocks), sampling, OptionalOutputs(**extras)
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("extras") / "llama", seed=2)


@pytest.fixture(scope="module")
def worker(checkpoint: Path) -> ModelWorker:
    said: dict[str, Any] = {"max_batch_prefill_tokens": 64, "max_batch_size": 4}
    serve = ServeConfig(model_id="tiny", dtype="float32", **said)
    worker = load_worker(serve, checkpoint)[0]
    worker.warmup()
    return worker


def reference_logits(checkpoint: Path, tokens: list[int]) -> Tensor:
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.tgi_pain(14)
@pytest.mark.parametrize("logits_at_once", [3, 1000])
@pytest.mark.parametrize("chunks", [[20], [7, 13], [1, 1, 17, 1]])
@pytest.mark.parametrize("top", [0, 3])
def test_a_prompt_is_scored_chunk_by_chunk_as_by_transformers(
    worker, checkpoint, monkeypatch, chunks, top, logits_at_once
):
    monkeypatch.setattr(worker.runner, "logits_at_once", logits_at_once)
    monkeypatch.setattr(worker.runner, "scores_at_once", 2)
    prompt = torch.randint(3, 256, (20,), generator=torch.Generator().manual_seed(5)).tolist()
    expected = reference_logits(checkpoint, prompt).log_softmax(-1)
    logprobs: list[float] = []
    top_ids: list[list[int]] = []
    top_logprobs: list[list[float]] = []
    start = 0
    for chunk in chunks:
        # Beside a sequence that asks for nothing and decodes, so that places and rows differ.
        new = [new_row(0, [9], [1])] if start == 0 else []
        new += [asking(2, prompt, [4, 6], prompt_logprobs=top)] if start == 0 else []
        ends = start + chunk == len(prompt)
        result = run(worker, step_of((0, 0, 1, True), (2, start, chunk, ends), new=new))
        last = min(start + chunk, len(prompt) - 1)
        if last == start:
            assert not result.prompt_logprobs
        else:
            assert list(result.prompt_logprobs) == [1]
            scores = result.prompt_logprobs[1]
            assert scores.start == start + 1 == len(logprobs) + 1
            assert len(scores.logprobs) == last - start
            logprobs += scores.logprobs
            top_ids += scores.top_ids
            top_logprobs += scores.top_logprobs
        start += chunk
    chosen = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), chosen, rtol=1e-4, atol=1e-4)
    likeliest = expected[:-1].topk(top) if top else None
    assert top_ids == ([[]] * 19 if likeliest is None else likeliest.indices.tolist())
    if likeliest is not None:
        torch.testing.assert_close(
            torch.tensor(top_logprobs), likeliest.values, rtol=1e-4, atol=1e-4
        )
    decode = run(worker, step_of((2, 20, 1, True)))
    assert not decode.prompt_logprobs, "generated tokens are no prompt"


def test_the_prompt_of_a_resumed_sequence_ends_where_it_did(worker):
    tokens = list(range(30, 42))
    new = asking(1, tokens, [8], prompt=9, prompt_logprobs=1, return_context_logits=True)
    result = run(worker, step_of((1, 0, 12, True), new=[new]))
    assert len(result.prompt_logprobs[0].logprobs) == 8
    assert result.context_logits[0].shape == (9, 256)


@pytest.mark.parametrize("logits_at_once", [2, 1000])
def test_raw_logits_are_those_of_transformers(worker, checkpoint, monkeypatch, logits_at_once):
    monkeypatch.setattr(worker.runner, "logits_at_once", logits_at_once)
    wanted = SamplingParams(temperature=0.0, repetition_penalty=1.7, logit_bias=((7, 3.0),))
    first, second = [5, 9, 200, 31, 77, 8], [40, 41, 42]
    new = [
        asking(0, second, [3], return_generation_logits=True),
        new_row(1, second, [4]),
        asking(3, first, [5], wanted, return_context_logits=True, return_generation_logits=True),
    ]
    chunk = run(worker, step_of((0, 0, 3, True), (1, 0, 3, True), (3, 0, 4, False), new=new))
    rest = run(worker, step_of((1, 3, 1, True), (3, 4, 2, True)))
    expected, other = reference_logits(checkpoint, first), reference_logits(checkpoint, second)
    assert list(chunk.context_logits) == [2]
    assert list(chunk.generation_logits) == [0]
    assert chunk.context_logits[2].dtype == np.float32
    given = np.concatenate([chunk.context_logits[2], rest.context_logits[1]])
    torch.testing.assert_close(torch.from_numpy(given), expected, rtol=1e-4, atol=1e-4)
    assert list(rest.generation_logits) == [1]
    for logits, row in ((chunk.generation_logits[0], other), (rest.generation_logits[1], expected)):
        torch.testing.assert_close(torch.from_numpy(logits), row[-1], rtol=1e-4, atol=1e-4)
    assert not run(worker, step_of((3, 6, 1, True))).context_logits


@pytest.mark.tgi_pain(14)
def test_the_head_computes_only_the_requested_parts_of_a_prompt(monkeypatch):
    monkeypatch.setitem(runner_module.MAX_LOGITS, "cpu", 4 * VOCAB)
    runner, model, _ = make_runner()
    new = [asking(0, range(10), [0, 1, 2], prompt_logprobs=0), new_row(1, range(9), [3, 4, 5])]
    run(runner, step_of((0, 0, 6, False), (1, 0, 9, True), new=new))
    assert model.hidden_rows == [4, 2, 1]
    model.hidden_rows.clear()
    run(runner, step_of((1, 9, 1, True), (0, 6, 4, True)))
    assert model.hidden_rows == [3, 2], "the last token's successor is no prompt token"


@pytest.mark.parametrize("like_a_device", [False, True])
@pytest.mark.parametrize("scores_at_once", [1, 100])
def test_processors_decide_before_everything_else(monkeypatch, scores_at_once, like_a_device):
    monkeypatch.setitem(runner_module.MAX_SCORES, "cpu", scores_at_once * VOCAB)
    seen: list[tuple[Any, ...]] = []

    def force(request_id: int, logits: Tensor, token_ids: Sequence[int], client: Any) -> Tensor:
        seen.append((request_id, int(logits.argmax()), float(logits.max()), token_ids, client))
        logits[:] = -torch.inf
        logits[[60, 61]] = torch.tensor([5.0, 4.0])
        return logits

    def double(request_id: int, logits: Tensor, token_ids: Sequence[int], client: Any) -> Tensor:
        return logits.double() * 2

    runner, _, _ = make_runner(like_a_device=like_a_device)
    wanted = SamplingParams(temperature=0.0, logit_bias=((61, 2.5),), top_logprobs=1)
    new = [
        new_row(0, [1, 2], [0]),
        asking(1, [3, 4], [1], wanted, logits_processors=(force, double), client_id=8),
        asking(2, [5, 6], [2], logits_processors=(force,), return_generation_logits=True),
    ]
    result = run(runner, step_of(*((row, 0, 2, True) for row in range(3)), new=new))
    expected = [next_token(tokens) for tokens in ([1, 2], [3, 4], [5, 6])]
    # 5 x 2 against 4 x 2 + 2.5: the bias comes after both processors.
    assert result.token_ids == [expected[0], 61, 60]
    assert seen == [(101, expected[1], 50.0, [3, 4], 8), (102, expected[2], 50.0, [5, 6], None)]
    assert not result.errors
    # What is reported is the model's own.
    assert result.top_ids[1] == [expected[1]]
    assert result.logprobs[2] == pytest.approx(-50.0, abs=1e-3)
    assert result.generation_logits[2].max() == 50.0
    seen.clear()
    run(runner, step_of((0, 2, 1, True), (2, 2, 1, True)))
    assert [entry[3] for entry in seen] == [[5, 6, 60]], "a decode sees the tokens chosen so far"


def raises(*arguments: Any) -> Tensor:
    raise KeyError("no such\nword")


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (raises, ["raises", "KeyError", "no such"]),
        (lambda *_: None, ["NoneType"]),
        (lambda _, logits, *__: logits[:-1], ["[210]", "[211]"]),
        (lambda _, logits, *__: logits[None], ["[1, 211]"]),
        (lambda _, logits, *__: logits.long(), ["int64"]),
        (lambda _, logits, *__: logits.fill_(torch.nan), ["NaN"]),
        (lambda _, logits, *__: logits.fill_(torch.inf), ["infinite"]),
        (lambda _, logits, *__: logits.fill_(-torch.inf), ["no token"]),
    ],
)
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=3, top_p=0.9)])
def test_a_processor_that_fails_ends_its_row_alone(processor, words, sampling):
    runner, _, _ = make_runner()
    new = [
        new_row(0, [1, 2], [0], sampling),
        asking(1, [3, 4], [1], sampling, logits_processors=(processor,)),
        new_row(2, [5, 6], [2], sampling),
    ]
    result = run(runner, step_of(*((row, 0, 2, True) for row in range(3)), new=new))
    assert list(result.errors) == [1]
    assert "\n" not in result.errors[1]
    for word in words:
        assert word in result.errors[1]
    assert result.token_ids[::2] == [next_token([1, 2]), next_token([5, 6])]


def test_a_freed_row_drops_its_options():
    runner, model, _ = make_runner()
    extras: dict[str, Any] = {"prompt_logprobs": 1, "return_generation_logits": True}
    new = [asking(row, [1, 2], [row], logits_processors=(raises,), **extras) for row in (0, 1)]
    assert len(run(runner, step_of((0, 0, 2, True), (1, 0, 2, True), new=new)).errors) == 2
    model.hidden_rows.clear()
    step = step_of((0, 0, 2, True), freed=[0, 1], new=[new_row(0, [5, 6], [0])])
    result = run(runner, step)
    assert [result.errors, result.prompt_logprobs, result.generation_logits] == [{}, {}, {}]
    assert model.hidden_rows == [1]
    assert not runner.rows.row_options
    replaced = step_of((1, 0, 2, True), new=[asking(1, [5, 6], [1], logits_processors=(raises,))])
    assert run(runner, replaced).errors
    assert not run(runner, step_of((1, 0, 2, True), new=[new_row(1, [5, 6], [1])])).errors


def test_stop_ids_are_not_chosen_too_early():
    runner, _, _ = make_runner()
    tokens = [4, 5, 6]
    wanted = SamplingParams(temperature=0.0, min_new_tokens=1)
    stops = frozenset({next_token(tokens)})
    result = run(
        runner, step_of((0, 0, 3, True), new=[asking(0, tokens, [0], wanted, stop_token_ids=stops)])
    )
    assert result.token_ids[0] not in stops
    assert not result.errors
    later = asking(1, [9, *tokens], [1], wanted, 3, stop_token_ids=frozenset(range(VOCAB)))
    assert run(runner, step_of((1, 0, 4, True), new=[later])).token_ids == [
        next_token([9, *tokens])
    ]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("scores_at_once", [1, 2, 100])
def test_masks_hold_for_the_entries_they_name(monkeypatch, scores_at_once, as_tensor):
    monkeypatch.setitem(runner_module.MAX_SCORES, "cpu", scores_at_once * VOCAB)
    runner, _, _ = make_runner()
    new = [new_row(row, [row, 7], [row]) for row in range(5)]
    bits = np.zeros((3, 7), np.int32)
    bits[0, 70 // 32] = 1 << 70 % 32
    bits[2, 210 // 32] = 1 << 210 % 32
    entries = [(0, 0, 1, False), *((row, 0, 2, True) for row in range(1, 5))]
    handle = runner.launch(step_of(*entries, new=new))
    result = runner.sample(handle, ([3, 0, 1], torch.from_numpy(bits) if as_tensor else bits))
    answer = result.wait()
    assert answer.token_ids[0] != next_token([1, 7])
    assert answer.token_ids[2:] == [next_token([3, 7]), 70]
    assert answer.token_ids[1] == 210
    assert list(answer.errors) == [0]
    assert "no token" in answer.errors[0]


@pytest.mark.parametrize(
    ("entries", "shape"), [([0], (1, 6)), ([0, 1], (1, 7)), ([2], (1, 7)), ([-1], (1, 7))]
)
def test_masks_of_another_shape_are_refused(entries, shape):
    runner, _, _ = make_runner()
    new = [new_row(row, [row, 7], [row]) for row in range(2)]
    handle = runner.launch(step_of((0, 0, 2, True), (1, 0, 2, True), new=new))
    with pytest.raises(ValueError, match="masks"):
        runner.sample(handle, (entries, np.zeros(shape, np.int32)))
