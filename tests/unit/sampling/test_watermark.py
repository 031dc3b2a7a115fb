from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from tests.unit.sampling.helpers import batch_of, upload
from tgi_cli.sampling import watermark
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.sampling.sampler import Sampler

VOCAB = 2000
MARKED = SamplingParams(watermark=True)


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x735A2D97 & 0xFFFFFFFF
    return x ^ x >> 15


def is_green(before: int, token: int, gamma: float = 0.5) -> bool:
    """A detector in plain numbers, which must not change once published."""
    return mix(token ^ mix(15485863 * before & 0xFFFFFFFF)) < gamma * 2**32


def green_lists(before: list[int], wanted: list[SamplingParams]) -> torch.Tensor:
    """What is added to each row's scores."""
    pool = torch.zeros(len(before), 16, dtype=torch.int32)
    pool[:, 6] = torch.tensor(before)
    scores = torch.zeros(len(before), VOCAB)
    watermark.mark(scores, batch_of(wanted), pool, upload)
    return scores


def test_the_green_list_matches_the_detectors():
    before = [0, 1, 7, 1999, 151_935]
    for gamma in (0.25, 0.5, 0.1):
        params = SamplingParams(watermark=True, watermark_gamma=gamma, watermark_delta=1.5)
        marks = green_lists(before, [params] * 5)
        expected = [[1.5 * is_green(b, t, gamma) for t in range(VOCAB)] for b in before]
        assert marks.tolist() == expected


@pytest.mark.parametrize("gamma", [0.25, 0.5, 0.75])
def test_the_green_share_is_gamma(gamma):
    params = SamplingParams(watermark=True, watermark_gamma=gamma)
    green = green_lists(list(range(300)), [params] * 300) > 0
    deviation = math.sqrt(gamma * (1 - gamma) / VOCAB)
    scores = (green.float().mean(-1) - gamma) / deviation
    assert scores.abs().max() < 4.5, "some list is too short or too long"
    assert abs(scores.mean()) < 4.5 / math.sqrt(300)
    assert 0.8 < scores.std() < 1.2
    per_token = (green.float().mean(0) - gamma) / math.sqrt(gamma * (1 - gamma) / 300)
    assert per_token.abs().max() < 5, "some token is nearly always or never green"


def test_green_lists_of_different_previous_tokens_are_unrelated():
    green = green_lists(list(range(200)), [MARKED] * 200) > 0
    correlation = torch.corrcoef(green.float()).fill_diagonal_(0)
    assert correlation.abs().max() < 6 / math.sqrt(VOCAB)


@pytest.mark.parametrize("at_once", [1, 3 * VOCAB, 1 << 20])
def test_the_green_list_depends_on_the_previous_token_alone(monkeypatch, at_once):
    monkeypatch.setattr(watermark, "MAX_HASHED", at_once)
    wanted = [MARKED, SamplingParams(), MARKED, SamplingParams(watermark=True, seed=5), MARKED]
    marks = green_lists([9, 9, 10, 9, 9], wanted)
    assert torch.equal(marks[0], marks[3])
    assert torch.equal(marks[0], marks[4])
    assert not torch.equal(marks[0], marks[2])
    assert not marks[1].any()


@pytest.mark.parametrize("marked", [True, False])
def test_a_detector_distinguishes_marked_text(marked):
    generator = torch.Generator().manual_seed(4)
    sampler, params = Sampler(upload), SamplingParams(seed=11, watermark=marked)
    pool = torch.zeros(1, 260, dtype=torch.int32)
    pool[0, 0] = 17
    for position in range(1, 257):
        logits = torch.randn(1, VOCAB, generator=generator) * 1.5
        pool[0, position] = sampler(logits, batch_of([params], [position], [1]), pool).token_ids
    text = pool[0, :257].tolist()
    green = sum(is_green(before, token) for before, token in pairwise(text))
    z = (green - 128) / 8
    assert z > 6 if marked else abs(z) < 3.5
