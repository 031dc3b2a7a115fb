from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tests.unit.sampling.helpers import batch_of, upload
from tgi_cli.sampling import filters
from tgi_cli.sampling.filters import filter_weights
from tgi_cli.sampling.multinomial import weights_of
from tgi_cli.sampling.params import SamplingParams


def random_logits(rows: int, vocab: int, scale: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def kept(logits: torch.Tensor, wanted: list[SamplingParams]) -> torch.Tensor:
    weights = weights_of(logits)
    filter_weights(weights, batch_of(wanted), upload)
    return weights > 0


def kept_by_transformers(logits: torch.Tensor, wanted: SamplingParams) -> torch.Tensor:
    warpers = LogitsProcessorList()
    if wanted.top_k:
        warpers.append(TopKLogitsWarper(wanted.top_k))
    if wanted.top_p < 1:
        warpers.append(TopPLogitsWarper(wanted.top_p))
    if wanted.min_p > 0:
        warpers.append(MinPLogitsWarper(wanted.min_p))
    if wanted.typical_p < 1:
        warpers.append(TypicalLogitsWarper(wanted.typical_p))
    scores = warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits.clone())
    # What is less likely than 1 in 2.8e14 has no weight here, filtered or not.
    return (scores > -torch.inf) & (weights_of(logits) > 0)


WANTED = [
    *(SamplingParams(top_k=k) for k in (1, 2, 50, 999, 1000, 5000)),
    *(SamplingParams(top_p=p) for p in (0.01, 0.3, 0.5, 0.9, 0.95, 0.999)),
    *(SamplingParams(min_p=p) for p in (0.001, 0.05, 0.5, 1.0)),
    *(SamplingParams(typical_p=p) for p in (0.05, 0.2, 0.9, 0.99)),
    SamplingParams(top_k=40, top_p=0.8),
    SamplingParams(top_k=40, top_p=0.8, min_p=0.1),
    SamplingParams(top_k=200, typical_p=0.6),
    SamplingParams(top_k=100, top_p=0.9, min_p=0.02, typical_p=0.7),
]


@pytest.mark.parametrize("scale", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_each_filter_matches_transformers(wanted, scale):
    logits = random_logits(4, 1000, scale)
    assert torch.equal(kept(logits, [wanted] * 4), kept_by_transformers(logits, wanted))


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_rows_with_different_filters_are_independent(scale):
    logits = random_logits(len(WANTED) + 1, 1000, scale, seed=1)
    together = kept(logits, [*WANTED, SamplingParams()])
    for row, wanted in enumerate(WANTED):
        alone = kept_by_transformers(logits[row : row + 1], wanted)
        assert torch.equal(together[row : row + 1], alone), wanted
    assert torch.equal(together[-1], weights_of(logits)[-1] > 0)


def test_top_k_keeps_all_ties_of_the_kth():
    logits = torch.tensor([[1.0, 5.0, 3.0, 3.0, 3.0, 0.0]])
    assert kept(logits, [SamplingParams(top_k=2)])[0].tolist() == [0, 1, 1, 1, 1, 0]
    assert kept(logits, [SamplingParams(top_k=1)])[0].tolist() == [0, 1, 0, 0, 0, 0]
    assert torch.equal(
        kept(logits, [SamplingParams(top_k=2)]),
        kept_by_transformers(logits, SamplingParams(top_k=2)),
    )


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_top_p_matches_transformers_and_keeps_ties(p):
    """transformers drops some of several equals at the border, by where its sort put them."""
    logits = random_logits(8, 400, 2.0, seed=2).mul(4).round().div(4)
    ours = kept(logits, [SamplingParams(top_p=p)] * 8)
    theirs = kept_by_transformers(logits, SamplingParams(top_p=p))
    least = torch.where(theirs, logits, torch.inf).amin(dim=-1, keepdim=True)
    assert torch.equal(ours, logits >= least)
    assert (ours != theirs).any(), "no tie at the border: the test tests nothing"


def test_top_p_keeps_the_token_that_crosses_p():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert kept(logits, [SamplingParams(top_p=0.6)])[0].tolist() == [1, 1, 0, 0]
    assert kept(logits, [SamplingParams(top_p=0.49)])[0].tolist() == [1, 0, 0, 0]
    assert kept(logits, [SamplingParams(top_p=1e-9)])[0].tolist() == [1, 0, 0, 0]


def test_top_p_applies_to_the_tokens_that_top_k_kept():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of two tokens the first has 4/7 = 0.571: enough for 0.55, not enough without top_k.
    assert kept(logits, [SamplingParams(top_k=2, top_p=0.55)])[0].tolist() == [1, 0, 0, 0]
    assert kept(logits, [SamplingParams(top_p=0.55)])[0].tolist() == [1, 1, 0, 0]


SHARES = [0.001, 0.2, 0.5, 0.9, 0.999, 0.9999999]


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 5.0, 40.0])
def test_top_p_is_the_same_row_by_row_and_by_sorting(scale, rounded):
    logits = random_logits(6, 20_000, scale, seed=3)
    if rounded:
        logits = logits.bfloat16().float()
    weights = weights_of(logits)
    for floor in (0.0, weights.median().item()):
        floors = torch.full((6,), floor)
        expected = filters.nucleus(weights, floors, torch.tensor(SHARES, dtype=torch.float64))
        for row, share in enumerate(SHARES):
            assert filters.nucleus_of_row(weights[row].numpy(), floor, share) == expected[row]


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_typical_p_is_the_same_row_by_row_and_by_sorting(scale, rounded):
    logits = random_logits(6, 20_000, scale, seed=4)
    if rounded:
        logits = logits.bfloat16().float()
    weights = weights_of(logits)
    weights[:, ::3] = 0
    expected = filters.typical(weights, torch.tensor(SHARES, dtype=torch.float64))
    for row, share in enumerate(SHARES):
        filters.typical_of_row(weights[row].numpy(), share)
    torch.testing.assert_close((weights > 0).sum(-1), (expected > 0).sum(-1), rtol=1e-3, atol=0)


def test_other_devices_filter_by_sorting(monkeypatch):
    """The rows go there in parts, and come out as they do row by row."""
    logits = random_logits(9, 1000, 2.0, seed=4)
    wanted = [
        SamplingParams(top_p=0.7, typical_p=0.8, top_k=k) if k != 5 else SamplingParams()
        for k in range(9)
    ]
    expected = kept(logits, wanted)
    monkeypatch.setattr(filters, "MAX_SORTED", 2500)
    monkeypatch.setattr(filters, "ROW_BY_ROW", ())
    assert torch.equal(kept(logits, wanted), expected)


@pytest.mark.parametrize(
    ("min_p", "weights", "left"),
    [
        (0.5, [8.0, 4.0, 3.0, 0.0], 2),
        (0.5, [9.0, 5.0, 4.0, 0.0], 2),  # from 4.5 on
        (0.25, [8.0, 2.0, 2.0, 1.0], 3),
        (1.0, [8.0, 8.0, 7.0, 0.0], 2),
    ],
)
def test_min_p_keeps_tokens_exactly_at_its_threshold(min_p, weights, left):
    """At least min_p times the top probability, not more than it."""
    rows = torch.tensor([weights])
    filter_weights(rows, batch_of([SamplingParams(min_p=min_p)]), upload)
    assert rows.tolist() == [[*weights[:left], *[0.0] * (4 - left)]]


def test_at_least_one_token_remains():
    logits = random_logits(3, 100, 0.0)
    tiny = SamplingParams(top_k=1, top_p=1e-12, min_p=1.0, typical_p=1e-12)
    assert kept(logits, [tiny] * 3).any(dim=-1).all()


def test_rows_of_nan_do_not_affect_others():
    logits = random_logits(4, 5000, 2.0, seed=5)
    wanted = [SamplingParams(top_k=300, top_p=0.8, min_p=0.01, typical_p=0.9)] * 4
    clean = kept(logits, wanted)
    poisoned = logits.clone()
    poisoned[0, 17] = torch.nan
    poisoned[2] = torch.inf
    assert torch.equal(kept(poisoned, wanted)[[1, 3]], clean[[1, 3]])
    assert np.all(clean.sum(-1).numpy() > 1)
