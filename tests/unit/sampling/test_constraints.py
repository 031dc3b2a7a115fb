from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor, NoBadWordsLogitsProcessor

from tests.unit.sampling.helpers import batch_of, upload
from tgi_cli.sampling import constraints
from tgi_cli.sampling.constraints import TokenMasks, add_bias, apply_masks, forbid
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.sampling.sampler import Sampler

VOCAB = 50


def random_scores(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def pool_of(sequences: list[list[int]], stale: int = 1) -> torch.Tensor:
    pool = torch.full((len(sequences), 64), stale, dtype=torch.int32)
    for row, tokens in enumerate(sequences):
        pool[row, : len(tokens)] = torch.tensor(tokens)
    return pool


def bits_of(allowed: torch.Tensor) -> np.ndarray:
    """Pack bool [M, V], one bit after the other."""
    words = np.zeros((len(allowed), -(-allowed.shape[1] // 32)), np.uint32)
    for row, token in allowed.nonzero().tolist():
        words[row, token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def test_biases_are_added_to_their_row_alone():
    scores = random_scores(3)
    expected = scores.clone()
    expected[0, 4] += 2.5
    expected[2, 4] -= 100
    expected[2, 49] += 1
    wanted = [
        SamplingParams(logit_bias=((4, 2.5), (VOCAB, 9.0), (VOCAB + 4, 9.0))),  # not in it
        SamplingParams(),
        SamplingParams(logit_bias=((4, -100.0), (49, 1.0))),
    ]
    add_bias(scores, batch_of(wanted), upload)
    assert torch.equal(scores, expected)


def test_bad_words_match_transformers():
    """Sequences of three tokens, so that the beginnings of words stand at their ends often."""
    generator = np.random.default_rng(3)
    sequences = generator.integers(0, 3, (200, 12)).tolist()
    words = [[7], [1, 2], [0, 1, 8], [2, 2], [1, 1, 0, 8], [0, 0, 0, 0, 9], [2, 8]]
    scores = random_scores(200)
    expected = NoBadWordsLogitsProcessor(words)(torch.tensor(sequences), scores.clone())
    wanted = [SamplingParams(bad_words=tuple(map(tuple, words)))] * 200
    forbid(scores, batch_of(wanted, [12] * 200), pool_of(sequences), upload)
    assert torch.equal(scores, expected)
    assert (scores == -torch.inf).sum(0)[[2, 7, 8, 9]].gt(0).all()


def test_each_row_has_bad_words_of_its_own():
    sequences = [[5, 6], [5, 6], [6, 5, 6], [9]]
    wanted = [
        SamplingParams(bad_words=((5, 6, 7), (3,))),
        SamplingParams(),
        SamplingParams(bad_words=((6, 7), (5, 7), (9, 6, 5, 6, 7), (5, 6, VOCAB))),
        SamplingParams(bad_words=((9, 6), (1, 6, 4))),
    ]
    scores = torch.zeros(4, VOCAB)
    forbid(scores, batch_of(wanted, [2, 2, 3, 1]), pool_of(sequences, stale=6), upload)
    assert scores.isinf().nonzero().tolist() == [[0, 3], [0, 7], [2, 7], [3, 6]]


def test_a_bad_word_matches_up_to_the_length_of_the_sequence():
    scores = torch.zeros(1, VOCAB)
    wanted = SamplingParams(bad_words=((4, 5, 8), (0, 4, 5, 9)))
    pool = pool_of([[4, 5]], stale=0).roll(1, 0)
    forbid(scores, batch_of([wanted], [2]), pool, upload)
    assert scores.isinf().nonzero().tolist() == [[0, 8]]


@pytest.mark.parametrize("generated", [0, 2, 3, 4])
def test_stop_ids_are_masked_before_min_new_tokens(generated):
    tokens = [[1] * (5 + generated)] * 2
    scores = random_scores(2)
    expected = scores.clone()
    oracle = MinNewTokensLengthLogitsProcessor(5, 3, [6, 9])
    expected[0] = oracle(torch.tensor(tokens[:1]), scores[:1].clone())[0]
    wanted = [SamplingParams(min_new_tokens=3, temperature=0.0), SamplingParams(temperature=0.0)]
    batch = batch_of(wanted, [5 + generated] * 2, [5, 5], stops=[6, 9])
    scores[:, 6] = expected[:, 6] = 90.0
    expected[0, 6] = -torch.inf if generated < 3 else 90.0
    chosen = Sampler(upload)(scores.clone(), batch, pool_of(tokens)).token_ids
    assert torch.equal(chosen, expected.argmax(-1))
    if batch.flags:
        forbid(scores, batch, pool_of(tokens), upload)
    assert torch.equal(scores, expected)


@pytest.mark.parametrize("row_by_row", [True, False])
@pytest.mark.parametrize("vocab", [32, 50, 77])
def test_masks_forbid_tokens_that_they_do_not_allow(monkeypatch, vocab, row_by_row):
    if not row_by_row:
        monkeypatch.setattr(constraints, "ROW_BY_ROW", ())
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(4, vocab, generator=generator)
    allowed = torch.rand(2, vocab, generator=generator) < 0.5
    allowed[:, 31] = True  # the sign of a word
    expected = scores.clone()
    expected[[1, 3]] = expected[[1, 3]].where(allowed, -torch.inf)
    apply_masks(scores, TokenMasks(np.array([1, 3]), bits_of(allowed)), upload)
    assert torch.equal(scores, expected)


def test_only_allowed_tokens_keep_their_scores():
    scores = random_scores(4)
    expected = scores.clone()
    for row, ids in ((0, [3, 9]), (2, [49]), (3, [0, 1, 9])):
        barred = torch.ones(VOCAB, dtype=torch.bool)
        barred[ids] = False
        expected[row, barred] = -torch.inf
    expected[3, [1, 9]] = -torch.inf
    wanted = [
        SamplingParams(allowed_token_ids=(9, 3, 9, VOCAB, VOCAB + 3)),  # two that it does not have
        SamplingParams(),
        SamplingParams(allowed_token_ids=(49,)),
        SamplingParams(allowed_token_ids=(0, 1, 9), bad_words=((1,), (5, 9))),
    ]
    forbid(scores, batch_of(wanted), pool_of([[5] * 7] * 4), upload)
    assert torch.equal(scores, expected)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_allowed_tokens_are_chosen_by_their_relative_probabilities(temperature):
    """As if the vocabulary had no others; a bias and a penalty still weigh them."""
    allowed = (4, 7, 30, 31)
    logits = random_scores(1)
    logits[0, 12] = 20.0
    shares = logits.clone()
    shares[0, 7] += 1.5
    shares[0, 4] /= 1.2 if shares[0, 4] > 0 else 1 / 1.2
    shares = shares[0, list(allowed)]
    wanted = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            allowed_token_ids=allowed,
            logit_bias=((7, 1.5),),
            repetition_penalty=1.2,
        )
        for seed in range(4000)
    ]
    result = Sampler(upload)(logits.repeat(4000, 1), batch_of(wanted), pool_of([[4] * 7] * 4000))
    counts = result.token_ids.bincount(minlength=VOCAB)
    assert counts[list(allowed)].sum() == 4000
    if temperature == 0:
        assert counts[allowed[shares.argmax()]] == 4000
    else:
        expected = (shares / temperature).softmax(-1) * 4000
        assert ((counts[list(allowed)] - expected) ** 2 / expected).sum() < 16.27  # 0.999, 3
    chosen = logits.log_softmax(-1)[0, result.token_ids]
    torch.testing.assert_close(result.logprobs, chosen)


def test_a_row_whose_allowed_tokens_are_all_masked_is_marked():
    wanted = SamplingParams(allowed_token_ids=(3, 4), bad_words=((3,), (4,)))
    result = Sampler(upload)(random_scores(1), batch_of([wanted]), pool_of([[1] * 7]))
    assert result.logprobs.isneginf().all()


def test_masks_follow_their_entries_into_parts_of_the_batch():
    masks = TokenMasks(np.array([1, 4, 5]), np.arange(6, dtype=np.int32).reshape(3, 2))
    part = masks.between(3, 6)
    assert part is not None
    assert part.entries.tolist() == [1, 2]
    assert part.bits.tolist() == [[2, 3], [4, 5]]
    assert masks.between(2, 4) is None


def test_bias_precedes_penalties_bad_words_and_masks():
    wanted = SamplingParams(
        temperature=0.0,
        logit_bias=((5, 8.0), (6, 90.0), (7, 80.0)),
        repetition_penalty=4.0,
        bad_words=((6,),),
    )
    scores = torch.zeros(1, VOCAB)
    scores[0, 8] = 3.0
    allowed = torch.ones(1, VOCAB, dtype=torch.bool)
    allowed[0, 7] = False
    masks = TokenMasks(np.array([0]), bits_of(allowed))
    # 5 has 8 / 4 = 2: less than 8 has, and more than without the order.
    result = Sampler(upload)(scores, batch_of([wanted]), pool_of([[5] * 7]), masks=masks)
    assert result.token_ids.tolist() == [8]
    assert scores.count_nonzero() == 1, "the model's logits were changed"
    torch.testing.assert_close(result.logprobs, scores.log_softmax(-1)[:, 8])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_without_an_allowed_token_is_marked_alone(temperature):
    everything = tuple((token,) for token in range(VOCAB))
    plain = SamplingParams(temperature=temperature)
    banned = SamplingParams(temperature=temperature, bad_words=everything)
    masks = TokenMasks(np.array([2]), np.zeros((1, 2), np.int32))
    batch = batch_of([plain, banned, plain, plain])
    result = Sampler(upload)(random_scores(4), batch, pool_of([[1] * 7] * 4), masks=masks)
    assert result.logprobs.isneginf().tolist() == [False, True, True, False]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_masked_token_is_never_sampled(temperature):
    wanted = [
        SamplingParams(temperature=temperature, seed=seed, bad_words=((3,), (1, 4)), top_p=0.99)
        for seed in range(300)
    ]
    allowed = torch.zeros(1, VOCAB, dtype=torch.bool)
    allowed[0, 2:6] = True
    masks = TokenMasks(np.arange(300), bits_of(allowed).repeat(300, 0))
    chosen = Sampler(upload)(
        torch.zeros(300, VOCAB), batch_of(wanted), pool_of([[1] * 7] * 300), masks=masks
    ).token_ids
    assert set(chosen.tolist()) == ({2} if temperature == 0 else {2, 5})
