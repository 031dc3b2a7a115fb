"""Sequences of encoder-decoder models: the decoder's start, and forced first and last tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.engine.fake_worker import FakeWorker, continuation
from tests.unit.engine.test_core import running
from tests.unit.engine.test_scheduler import limits, request
from tgi_cli.config import DecoderFacts
from tgi_cli.engine.messages import FinishReason
from tgi_cli.engine.thinking import ThinkingBudget

START, FIRST, LAST = 901, 902, 903
VOCAB = 1000
FORCED = DecoderFacts(start_id=START, first_id=FIRST, last_id=LAST)


def decoding(decoder: DecoderFacts, **changes: Any) -> Any:
    return limits(decoder=decoder, prefix_caching=False, **changes)


def answer(prompt: list[int], new: int, last: int | None = LAST) -> list[int]:
    """As the model gives it behind the prompt, the start and the forced first token."""
    tokens = [FIRST, *continuation([*prompt, START, FIRST], new - 1, VOCAB)]
    return tokens if last is None else [*tokens[:-1], last]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("blocks", [128, 5])
def test_answers_begin_and_end_as_the_generation_config_says(depth: int, blocks: int) -> None:
    bounds = decoding(FORCED, num_blocks=blocks, max_batch_prefill_tokens=8)
    requests = [request(i, [i, i + 1, i + 2], 3 + 2 * i) for i in range(8)]
    with running(FakeWorker(4, VOCAB), bounds, depth, requests=requests) as client:
        client.read_until_finished(*range(8))
        preempted = client.core.metrics.load.preemptions
    for i in range(8):
        assert client.tokens[i] == answer([i, i + 1, i + 2], 3 + 2 * i)
        assert client.finished[i][0] is FinishReason.LENGTH
    assert (preempted > 0) == (blocks == 5)


def test_a_forced_last_token_that_is_a_stop_id_ends_the_answer_as_one() -> None:
    with running(FakeWorker(4, VOCAB), decoding(FORCED)) as client:
        client.core.inbox.put(request(1, [5, 6], 4, stop_token_ids=frozenset({LAST})))
        client.core.inbox.put(request(2, [5, 6], 4, ignore_eos=True))
        client.read_until_finished(1, 2)
    assert client.tokens[1] == answer([5, 6], 4)
    assert client.finished[1][0] is FinishReason.EOS_TOKEN
    assert client.tokens[2] == answer([5, 6], 4, last=None)


def test_forks_compute_nothing_of_the_prompt_but_what_the_decoder_starts_with() -> None:
    worker = FakeWorker(4, VOCAB)
    prompt = list(range(10))
    with running(worker, decoding(DecoderFacts(start_id=START))) as client:
        first = request(1, prompt, 6)
        client.core.inbox.put(first)
        client.core.inbox.put(first.fork(2, 1))
        client.read_until_finished(1, 2)
    wanted = continuation([*prompt, START], 6, VOCAB)
    assert [client.tokens[1], client.tokens[2]] == [wanted, wanted]
    starts = [
        (start, count)
        for step in worker.steps
        for new in step.new
        for row, start, count in zip(step.rows, step.starts, step.counts, strict=True)
        if row == new.row
    ]
    assert starts == [(0, 11), (10, 1)]


def test_the_decoders_positions_limit_an_answer() -> None:
    """Its last token needs none."""
    bounds = decoding(DecoderFacts(start_id=START, max_tokens=5, max_input_tokens=3))
    with running(FakeWorker(4, VOCAB), bounds) as client:
        client.core.inbox.put(request(1, [1, 2], 50))
        client.core.inbox.put(request(2, [1, 2, 3, 4], 2))
        client.read_until_finished(1, 2)
    assert client.tokens[1] == continuation([1, 2, START], 5, VOCAB)
    assert client.finished[1][0] is FinishReason.LENGTH
    assert client.finished[2] == (FinishReason.ERROR, "the encoder takes 3 tokens")


def test_the_start_counts_toward_the_longest_sequence() -> None:
    bounds = decoding(DecoderFacts(start_id=START), max_total_tokens=9)
    with running(FakeWorker(4, VOCAB), bounds) as client:
        client.core.inbox.put(request(1, [1, 2, 3, 4], 4))
        client.core.inbox.put(request(2, [1, 2, 3, 4], 5))
        client.read_until_finished(1, 2)
    assert len(client.tokens[1]) == 4
    assert client.finished[2][0] is FinishReason.ERROR


def test_an_answer_of_one_token_is_not_forced() -> None:
    with running(FakeWorker(4, VOCAB), decoding(FORCED)) as client:
        client.core.inbox.put(request(1, [7], 1))
        client.read_until_finished(1)
    assert client.tokens[1] == continuation([7, START], 1, VOCAB)


def test_a_forced_first_token_precedes_closed_reasoning() -> None:
    budget = ThinkingBudget(tokens=0, open=(800,), close=(801, 802), inside=True)
    decoder = DecoderFacts(start_id=START, first_id=FIRST)
    with running(FakeWorker(4, VOCAB), decoding(decoder)) as client:
        client.core.inbox.put(request(1, [7], 6, thinking=budget))
        client.read_until_finished(1)
    begun = [FIRST, 801, 802]
    assert client.tokens[1] == begun + continuation([7, START, *begun], 3, VOCAB)


def test_a_request_names_the_first_token_of_its_answer() -> None:
    """In place of the generation config's, also of forks."""
    for decoder in (FORCED, DecoderFacts(start_id=START)):
        with running(FakeWorker(4, VOCAB), decoding(decoder)) as client:
            first = request(1, [7, 8], 5, first_id=777, ignore_eos=True)
            client.core.inbox.put(first)
            client.core.inbox.put(first.fork(2, 1))
            client.read_until_finished(1, 2)
        wanted = [777, *continuation([7, 8, START, 777], 4, VOCAB)]
        assert [client.tokens[1], client.tokens[2]] == [wanted, wanted]


def test_answers_of_other_models_begin_with_no_given_token() -> None:
    with running(FakeWorker(4, VOCAB), limits()) as client:
        client.core.inbox.put(request(1, [7], 6, first_id=FIRST))
        client.read_until_finished(1)
    reason, error = client.finished[1]
    assert reason is FinishReason.ERROR
    assert "encoder-decoder" in error
