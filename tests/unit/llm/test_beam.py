"""Beam search: its bookkeeping on a small language, its cost on the engine."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from tests.unit.llm.conftest import Statistics
from tgi_cli import LLM
from tgi_cli.llm.beam import BeamOptions, BeamSearch

# Log-probabilities of the next token, by the last one; token 0 ends.
CHAIN = {
    None: [0.1, 0.5, 0.4],
    1: [0.2, 0.3, 0.5],
    2: [0.9, 0.05, 0.05],
}


def options(**changes: Any) -> BeamOptions:
    values: dict[str, Any] = {
        "width": 3,
        "max_new_tokens": 4,
        "length_penalty": 1.0,
        "early_stopping": False,
        "stop_token_ids": frozenset({0}),
    }
    return BeamOptions(**(values | changes))


def logprob_of(token_ids: tuple[int, ...]) -> float:
    total, last = 0.0, None
    for token in token_ids:
        total += math.log(CHAIN[last][token])
        last = token
    return total


def search(chosen: BeamOptions) -> BeamSearch:
    state = BeamSearch(chosen)
    while state.beams:
        likeliest = []
        for beam in state.beams:
            row = CHAIN[beam.token_ids[-1] if beam.token_ids else None]
            ranked = sorted(range(3), key=lambda token: -row[token])
            likeliest.append((ranked, [math.log(row[token]) for token in ranked]))
        state.advance(likeliest)
    return state


def every_text(length: int) -> list[tuple[int, ...]]:
    texts = []
    for size in range(1, length + 1):
        for body in itertools.product((1, 2), repeat=size - 1):
            texts.append((*body, 0))
    texts += itertools.product((1, 2), repeat=length)
    return texts


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_search_wider_than_the_language_finds_the_likeliest(length: int) -> None:
    found = search(options(width=8, max_new_tokens=length, length_penalty=0.0)).found
    best = max(every_text(length), key=logprob_of)
    assert found[0].beam.token_ids == best
    assert found[0].score == pytest.approx(logprob_of(best))
    assert [f.score for f in found] == sorted((f.score for f in found), reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_scores(penalty: float) -> None:
    for found in search(options(length_penalty=penalty)).found:
        ids = found.beam.token_ids
        assert found.beam.logprob == pytest.approx(logprob_of(ids))
        assert found.score == pytest.approx(logprob_of(ids) / len(ids) ** penalty)


def test_width_one_is_greedy() -> None:
    (found,) = search(options(width=1)).found
    assert found.beam.token_ids == (1, 2, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "beam_width"),
        ({"width": 9}, "beam_width"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"early_stopping": "soon"}, "early_stopping"),
    ],
)
def test_options_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(**changes)


def test_a_step_computes_at_most_a_block_for_each_beam(llm: LLM, stats: Statistics) -> None:
    prompts = [[2000 + i] * 70 for i in range(2)]
    before = len(stats)
    found = llm.beam_search(prompts, 4, 40, ignore_eos=True)
    steps = stats[before:]
    assert [len(hypotheses) for hypotheses in found] == [4, 4]
    assert all(len(h.token_ids) == 40 for hypotheses in found for h in hypotheses)
    computed = sum(s["Total Context Tokens"] + s["Generation Requests"] for s in steps)
    asked = 2 * 39 * 4
    assert computed <= 2 * 70 + asked * llm.info.block_size
    recomputed = steps[len(steps) // 2]["Total Context Tokens"]
    assert recomputed <= 8 * llm.info.block_size


def test_hypotheses_carry_their_text(llm: LLM) -> None:
    (hypotheses,) = llm.beam_search("def read_json(path):", 3, 8, ignore_eos=True)
    prompt = llm.tokenizer.encode("def read_json(path):")
    for hypothesis in hypotheses:
        whole = llm.tokenizer.decode(prompt + hypothesis.token_ids)
        assert whole == "def read_json(path):" + hypothesis.text
        assert hypothesis.finish_reason == "length"
    with pytest.raises(ValueError, match="more than max_total_tokens"):
        llm.beam_search([[5] * 120], 2, 20)
    assert llm.beam_search([], 2) == []
