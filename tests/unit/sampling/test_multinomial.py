from __future__ import annotations

import pytest
import torch

from tests.unit.sampling.helpers import CHI_SQUARE_999, chi_square
from tgi_cli.sampling.multinomial import argmax, choose, weights_of

LOWEST, HIGHEST = 2.0**-53, 1 - 2.0**-53


def random_weights(rows: int, vocab: int, kept: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = weights_of(torch.randn(rows, vocab, generator=generator) * 5)
    order = torch.rand(rows, vocab, generator=generator).argsort(dim=-1)
    return weights.scatter_(1, order[:, kept:], 0.0)


@pytest.mark.parametrize("vocab", [1, 7, 127, 128, 129, 1000, 50257])
def test_only_tokens_with_weight_are_chosen_for_extreme_uniforms(vocab):
    kept = max(1, vocab // 50)
    weights = random_weights(40, vocab, kept, seed=vocab)
    weights = weights[weights.sum(-1) > 0]
    uniforms = torch.rand(len(weights), dtype=torch.float64)
    for edge in (LOWEST, HIGHEST, 0.5):
        chosen = choose(weights, torch.full_like(uniforms, edge))
        assert (weights.gather(1, chosen[:, None]) > 0).all()
    first = (weights > 0).float().argmax(dim=-1)
    last = vocab - 1 - (weights.flip(1) > 0).float().argmax(dim=-1)
    assert torch.equal(choose(weights, torch.full_like(uniforms, LOWEST)), first)
    assert torch.equal(choose(weights, torch.full_like(uniforms, HIGHEST)), last)


def test_choose_inverts_the_running_sum():
    weights = random_weights(64, 1000, 700, seed=1)
    uniforms = torch.rand(64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ends = weights.double().cumsum(dim=-1)
    expected = (ends > (uniforms * ends[:, -1]).floor()[:, None]).float().argmax(dim=-1)
    assert torch.equal(choose(weights, uniforms), expected)


def test_sums_of_weights_are_exact_in_any_order():
    weights = weights_of(torch.randn(4, 150_000, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(weights, weights.floor())
    exact = torch.tensor([sum(int(w) for w in row) for row in weights.tolist()])
    assert torch.equal(weights.sum(-1, dtype=torch.float64).long(), exact)
    assert torch.equal(weights.flip(1).double().cumsum(-1)[:, -1].long(), exact)
    assert exact.max() < 2**53


def test_choices_follow_the_weights():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.2])
    uniforms = (torch.arange(20_000, dtype=torch.float64) * 0.6180339887498949) % 1.0
    chosen = choose(weights_of(logits).expand(20_000, -1), uniforms.clamp_(min=LOWEST))
    counts = torch.bincount(chosen, minlength=8)
    assert chi_square(counts, logits.softmax(-1)) < CHI_SQUARE_999[7]


def test_a_row_of_nan_gives_a_valid_id_and_does_not_affect_others():
    weights = random_weights(3, 300, 100, seed=4)
    uniforms = torch.tensor([0.3, 0.4, 0.5], dtype=torch.float64)
    clean = choose(weights, uniforms)
    weights[1] = torch.nan
    chosen = choose(weights, uniforms)
    assert chosen[[0, 2]].tolist() == clean[[0, 2]].tolist()
    assert 0 <= chosen[1] < 300


def test_argmax_takes_the_lowest_of_tied_ids():
    scores = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-1.0, -5.0, -1.0]])
    assert argmax(scores).tolist() == [1, 0, 0]
