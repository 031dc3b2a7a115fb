"""Choosing in C++ against what torch's operations choose."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.unit.sampling.helpers import batch_of, upload
from tgi_cli.kernels import library, without_cpp_kernels
from tgi_cli.kernels.sample import Draw, sample
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.sampling.sampler import Sampled, Sampler
from tgi_cli.sampling.table import SamplingBatch

pytestmark = pytest.mark.usefixtures("level")

VOCABULARIES = [1, 15, 16, 65, 1000, 8192, 8193, 49152]
POOL = torch.zeros(1, 4, dtype=torch.int32)


def logits_of(rows: int, vocab: int, scale: float = 4.0) -> torch.Tensor:
    """As a head gives them: rounded to bfloat16, so that there are equals."""
    generator = torch.Generator().manual_seed(vocab)
    return (torch.randn(rows, vocab, generator=generator) * scale).bfloat16().float()


def both(logits: torch.Tensor, batch: SamplingBatch) -> tuple[Sampled, Sampled]:
    """By the kernel, and by torch's operations."""
    ours = Sampler(upload)(logits, batch, POOL)
    with without_cpp_kernels():
        return ours, Sampler(upload)(logits, batch, POOL)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_likeliest_token_is_the_first_of_equals(vocab):
    logits = logits_of(7, vocab)
    logits[3] = 2.5
    logits[4, -1] = logits[4].max()
    chosen = sample(logits, logits)
    assert torch.equal(chosen.token_ids, torch.from_numpy(logits.numpy().argmax(-1)))
    expected = torch.log_softmax(logits.double(), -1).amax(-1).float()
    torch.testing.assert_close(chosen.logprobs, expected, rtol=2e-6, atol=2e-6)
    normalizers = torch.logsumexp(logits.double(), -1).float()
    torch.testing.assert_close(chosen.peaks + chosen.log_sums, normalizers, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocab", [1, 40, 8193, 20000])
@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf])
def test_a_nan_marks_its_row_at_any_position(vocab, poison):
    places = sorted({0, vocab // 2, vocab - 1})
    logits = logits_of(len(places) + 1, vocab)
    clean = sample(logits, logits)
    for row, place in enumerate(places):
        logits[row, place] = poison
    for draw in (None, Draw(np.full(len(logits), 0.3), np.full(len(logits), 0.7, np.float32))):
        chosen = sample(logits, logits, draw)
        assert chosen.logprobs[:-1].isnan().all()
        assert ((chosen.token_ids >= 0) & (chosen.token_ids < vocab)).all()
        if draw is None:
            assert chosen.logprobs[-1] == clean.logprobs[-1]


def test_excluded_tokens_have_no_probability():
    logits = torch.full((3, 20000), -math.inf)
    logits[0, 17000:17002] = 1.0
    logits[1, 5] = -3.0
    chosen = sample(logits, logits)
    assert chosen.token_ids.tolist() == [17000, 5, 0]
    assert chosen.logprobs[:2].tolist() == pytest.approx([-math.log(2), 0.0], abs=1e-6)
    assert chosen.logprobs[2].isnan(), "nothing but -inf"
    drawn = sample(logits, logits, Draw(np.array([0.99, 0.99, 0.5]), np.ones(3, np.float32)))
    assert drawn.token_ids[:2].tolist() == [17001, 5]


def test_no_rows_give_no_tokens():
    logits = torch.empty(0, 100)
    assert [len(each) for each in sample(logits, logits)] == [0] * 4


@pytest.mark.parametrize("vocab", [1, 65, 8193, 20000])
@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"temperature": 1.8},
        {"top_k": 1},
        {"top_k": 50, "temperature": 0.8},
        {"top_k": 5000},
        {"top_p": 0.9},
        {"top_p": 0.2, "temperature": 1.5},
        {"top_p": 1e-6},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.02, "temperature": 0.9},
        {"min_p": 0.1},
    ],
    ids=str,
)
def test_draws_are_those_of_the_filters_in_torch(vocab, wanted):
    rows = 24
    for scale in (4.0, 0.05, 0.0):
        logits = logits_of(rows, vocab, scale)
        params = [SamplingParams(seed=seed, **wanted) for seed in range(rows)]
        ours, theirs = both(logits, batch_of(params, list(range(rows))))
        # Where an exponential is rounded otherwise, a uniform may fall to the other side.
        differ = int((ours.token_ids != theirs.token_ids).sum())
        assert differ <= 1, (ours.token_ids, theirs.token_ids)
        same = ours.token_ids == theirs.token_ids
        torch.testing.assert_close(ours.logprobs[same], theirs.logprobs[same], rtol=2e-6, atol=2e-5)


def test_every_row_gets_alone_to_the_bit_what_it_gets_among_others():
    wanted = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.6, top_p=0.9),
        SamplingParams(seed=3, top_k=20, min_p=0.01, top_logprobs=3),
    ] * 5
    logits = logits_of(len(wanted), 30000)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        library.set_threads(2)
        together = Sampler(upload)(logits, batch_of(wanted), POOL)
        torch.set_num_threads(1)
        library.set_threads(1)
        for row, each in enumerate(wanted):
            alone = Sampler(upload)(logits[row : row + 1], batch_of([each]), POOL)
            assert alone.token_ids[0] == together.token_ids[row]
            assert alone.logprobs[0] == together.logprobs[row]
    finally:
        torch.set_num_threads(threads)


def test_the_likeliest_tokens_come_with_their_log_probabilities():
    logits = logits_of(5, 5000)
    asked = [SamplingParams(temperature=0.0, top_logprobs=count) for count in (0, 3, 0, 5, 1)]
    ours, theirs = both(logits, batch_of(asked))
    assert ours.top is not None
    assert theirs.top is not None
    assert ours.top.entries.tolist() == [1, 3, 4]
    assert torch.equal(ours.top.ids, theirs.top.ids)
    torch.testing.assert_close(ours.top.logprobs, theirs.top.logprobs, rtol=2e-6, atol=2e-6)


def test_tokens_may_be_chosen_by_scores_other_than_the_logits():
    logits = logits_of(4, 700)
    scores = logits.clone()
    scores[:, ::2] = -math.inf
    before = logits.clone()
    chosen = sample(logits, scores)
    assert (chosen.token_ids % 2 == 1).all()
    assert torch.equal(chosen.token_ids, torch.from_numpy(scores.numpy().argmax(-1)))
    expected = torch.log_softmax(logits, -1).gather(1, chosen.token_ids[:, None])[:, 0]
    torch.testing.assert_close(chosen.logprobs, expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(logits, before)


def test_rows_may_be_strided():
    wide = logits_of(6, 1024)
    assert torch.equal(
        sample(wide[::2, :1000], wide[::2, :1000]).token_ids,
        torch.from_numpy(wide[::2, :1000].numpy().argmax(-1)),
    )


def test_min_p_keeps_tokens_exactly_at_its_threshold():
    """Two tokens that are as likely as the likeliest, at a threshold that is just that."""
    logits = torch.zeros(400, 100)
    logits[:, [20, 77]] = 3.0
    wanted = [SamplingParams(min_p=1.0, seed=seed) for seed in range(400)]
    batch = batch_of(wanted)
    for result in both(logits, batch):
        counts = result.token_ids.bincount(minlength=100)
        assert counts[20] + counts[77] == 400
        assert min(counts[20], counts[77]) > 120
