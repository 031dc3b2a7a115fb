from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from tests.unit.sampling.helpers import batch_of, upload
from tgi_cli.sampling import penalties
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.sampling.table import SamplingTable

VOCAB = 50


def make_pool(sequences: list[list[int]]) -> torch.Tensor:
    pool = torch.full((len(sequences), 64), VOCAB - 1, dtype=torch.int32)  # stale tokens behind
    for row, tokens in enumerate(sequences):
        pool[row, : len(tokens)] = torch.tensor(tokens)
    return pool


def expected_row(scores: list[float], tokens: list[int], prompt: int, wanted: SamplingParams):
    result = list(scores)
    output = Counter(tokens[prompt:])
    for token in set(tokens):
        value = result[token]
        penalty = wanted.repetition_penalty
        value = value * penalty if value < 0 else value / penalty
        value -= wanted.frequency_penalty * output[token]
        value -= wanted.presence_penalty * (output[token] > 0)
        value -= wanted.relative_frequency_penalty * tokens.count(token) / len(tokens)
        result[token] = value
    return result


def test_repetition_penalty_matches_transformers():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (3, 20), generator=generator)
    scores = torch.randn(3, VOCAB, generator=generator) * 4
    expected = RepetitionPenaltyLogitsProcessor(1.7)(tokens, scores.clone())
    batch = batch_of([SamplingParams(repetition_penalty=1.7)] * 3, [20] * 3, [12] * 3)
    penalties.penalize(scores, batch, make_pool(tokens.tolist()), upload)
    torch.testing.assert_close(scores, expected)


WANTED = [
    SamplingParams(frequency_penalty=0.5),
    SamplingParams(),
    SamplingParams(presence_penalty=-1.5, temperature=0.0),
    SamplingParams(
        repetition_penalty=0.6,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        relative_frequency_penalty=1.5,
    ),
    SamplingParams(repetition_penalty=1.3),
]


@pytest.mark.parametrize("at_once", [1, 45, 1 << 19])
def test_all_penalties_together_match_a_row_by_row_reference(monkeypatch, at_once):
    monkeypatch.setattr(penalties, "MAX_TOKENS_AT_ONCE", at_once)
    generator = np.random.default_rng(1)
    lengths, prompts = [30, 9, 25, 60, 1], [10, 9, 0, 25, 1]
    sequences = [generator.integers(0, VOCAB - 1, length).tolist() for length in lengths]
    scores = torch.from_numpy(generator.normal(size=(5, VOCAB)).astype(np.float32)) * 3
    expected = [
        expected_row(row, tokens, prompt, wanted)
        for row, tokens, prompt, wanted in zip(
            scores.tolist(), sequences, prompts, WANTED, strict=True
        )
    ]
    batch = batch_of(WANTED, lengths, prompts)
    penalties.penalize(scores, batch, make_pool(sequences), upload)
    torch.testing.assert_close(scores, torch.tensor(expected))


def test_frequency_counts_the_output_and_not_the_prompt():
    scores = torch.zeros(1, VOCAB)
    batch = batch_of([SamplingParams(frequency_penalty=1.0)], [6], [4])
    penalties.penalize(scores, batch, make_pool([[3, 3, 3, 3, 3, 8]]), upload)
    assert scores[0, 3] == -1.0
    assert scores[0, 8] == -1.0
    assert scores.count_nonzero() == 2


def test_the_relative_frequency_penalty_is_a_share_of_prompt_and_output():
    scores = torch.zeros(2, VOCAB)
    wanted = [SamplingParams(relative_frequency_penalty=2.0), SamplingParams()]
    batch = batch_of(wanted, [8, 8], [4, 4])
    penalties.penalize(scores, batch, make_pool([[3, 3, 3, 5, 3, 3, 3, 8]] * 2), upload)
    assert scores[0, [3, 5, 8]].tolist() == [-2 * 6 / 8, -2 / 8, -2 / 8]
    assert scores.count_nonzero() == 3


def test_penalties_leave_out_what_precedes_the_context():
    """The tokens of an encoder: only those of the decoder are penalized."""
    params = SamplingParams(
        temperature=0, repetition_penalty=2.0, frequency_penalty=1.0, relative_frequency_penalty=1.5
    )
    table = SamplingTable(2)
    table.set(0, params, prompt_tokens=4, context_start=3)
    table.set(1, params, prompt_tokens=2)
    batch = table.select(np.arange(2), np.array([6, 3]))
    pool = torch.tensor([[1, 2, 3, 4, 5, 5, 0], [1, 2, 3, 0, 0, 0, 0]], dtype=torch.int32)
    scores = torch.full((2, 8), 8.0)
    penalties.penalize(scores, batch, pool, upload)
    assert scores[0].tolist() == [8, 8, 8, 8, 4 - 0.5, 4 - 2 - 1, 8, 8]
    assert scores[1].tolist() == [8, 4 - 0.5, 4 - 0.5, 4 - 1 - 0.5, 8, 8, 8, 8]
