"""The likeliest tokens of a vocabulary in parts are those of the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.tools.thread_shards import on_shards
from tgi_cli.device.distributed import Shard
from tgi_cli.sampling.sampler import Sampled, greedy, summarize
from tgi_cli.sampling.sharded import ShardedGreedy

VOCAB = 97


def chosen(logits: Tensor, size: int) -> Sampled:
    """What ``size`` shards choose together, which is the same on all of them to the last bit."""
    width = -(-logits.shape[1] // size)

    def work(shard: Shard) -> Sampled:
        own = logits[:, shard.rank * width : (shard.rank + 1) * width]
        return ShardedGreedy(shard, shard.rank * width)(own)

    first, *others = on_shards(size, work)
    for other in others:
        assert torch.equal(other.token_ids, first.token_ids)
        assert torch.equal(other.logprobs.view(torch.int32), first.logprobs.view(torch.int32))
    return first


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_choice_is_that_of_the_whole_vocabulary(size: int) -> None:
    """Of few different numbers, so that the highest are often equal, within and across parts."""
    torch.manual_seed(size)
    logits = torch.randint(-3, 4, (200, VOCAB)).float()
    logits[:40] *= 0.25
    logits[40:60] = torch.randn(20, VOCAB) * 30
    logits[60] = 0.0
    logits[61] = -0.0
    logits[61, 5] = 0.0  # equal to the others: the first of them is chosen
    expected, got = greedy(logits), chosen(logits, size)
    assert got.token_ids.dtype == torch.int64
    assert torch.equal(got.token_ids, expected.token_ids)
    torch.testing.assert_close(got.logprobs, expected.logprobs, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("size", [2, 4])
def test_parts_without_any_finite_number(size: int) -> None:
    """Tokens that a head excludes by a bias of -inf, of some parts or of all but one token."""
    torch.manual_seed(0)
    logits = torch.randn(3, VOCAB)
    logits[0, :60] = -math.inf
    logits[1, 40:] = -math.inf
    logits[2] = -math.inf
    logits[2, 77] = -2.5
    expected, got = greedy(logits), chosen(logits, size)
    assert torch.equal(got.token_ids, expected.token_ids)
    torch.testing.assert_close(got.logprobs, expected.logprobs, atol=2e-6, rtol=1e-6)
    assert got.logprobs[2] == 0.0


@pytest.mark.parametrize("place", [0, 50, VOCAB - 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_no_numbers_are_marked(value: float, place: int) -> None:
    """Wherever it is; the rows beside them are not."""
    logits = torch.zeros(3, VOCAB)
    logits[1, place] = value
    logits[2] = -math.inf
    got = chosen(logits, 3)
    assert got.logprobs.isnan().tolist() == [False, True, True]
    assert ((got.token_ids >= 0) & (got.token_ids < VOCAB)).all()


def test_the_normalizer_is_that_of_the_row() -> None:
    torch.manual_seed(1)
    logits = torch.randn(8, VOCAB) * 5
    found = summarize(logits)
    assert torch.equal(found.token_ids, logits.argmax(-1))
    assert torch.equal(found.peaks, logits.amax(-1))
    expected = torch.logsumexp(logits, -1)
    torch.testing.assert_close(found.peaks + found.log_sums, expected, atol=1e-5, rtol=1e-6)
