from __future__ import annotations

import pytest
import torch

from tests.unit.sampling.helpers import CHI_SQUARE_999, batch_of, chi_square, upload
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.sampling.sampler import Sampled, Sampler

VOCAB = 500
POOL = torch.zeros(64, 32, dtype=torch.int32)
GREEDY = SamplingParams(temperature=0.0)


def random_logits(rows: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def sample(
    logits: torch.Tensor,
    wanted: list[SamplingParams],
    positions: list[int] | None = None,
    prompts: list[int] | None = None,
    pool: torch.Tensor = POOL,
) -> Sampled:
    return Sampler(upload)(logits, batch_of(wanted, positions, prompts), pool)


MANY = [
    SamplingParams(seed=1),
    GREEDY,
    SamplingParams(seed=2, temperature=0.3),
    SamplingParams(seed=3, top_k=5),
    SamplingParams(seed=4, top_p=0.6, temperature=1.7),
    SamplingParams(seed=5, min_p=0.2),
    SamplingParams(seed=6, typical_p=0.4),
    SamplingParams(seed=7, repetition_penalty=1.5, top_k=40, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=3.0, presence_penalty=1.0),
    SamplingParams(seed=8, frequency_penalty=1.0, top_logprobs=3),
    SamplingParams(temperature=0.0, top_k=3, top_p=0.1, top_logprobs=7),
] * 3


def test_a_row_samples_the_same_alone_and_among_32_others():
    logits = random_logits(len(MANY))
    pool = torch.randint(0, VOCAB, (64, 32), dtype=torch.int32)
    positions = [7 + row % 20 for row in range(len(MANY))]
    prompts = [5] * len(MANY)
    together = sample(logits, MANY, positions, prompts, pool)
    for row, wanted in enumerate(MANY):
        alone = sample(logits[row : row + 1], [wanted], [positions[row]], [5], pool[row : row + 1])
        assert alone.token_ids[0] == together.token_ids[row]
        torch.testing.assert_close(alone.logprobs[0], together.logprobs[row])


def test_the_same_seed_and_position_give_the_same_token_and_others_do_not():
    logits = random_logits(1, scale=0.0).expand(64, -1)
    same = sample(logits, [SamplingParams(seed=9)] * 64).token_ids
    assert len(set(same.tolist())) == 1
    by_seed = sample(logits, [SamplingParams(seed=s) for s in range(64)]).token_ids
    by_position = sample(logits, [SamplingParams(seed=9)] * 64, list(range(64))).token_ids
    assert len(set(by_seed.tolist())) > 48
    assert len(set(by_position.tolist())) > 48


def test_greedy_rows_ignore_filters_and_obey_penalties():
    logits = torch.zeros(3, VOCAB)
    logits[:, 10], logits[:, 20] = 5.0, 4.0
    pool = torch.full((64, 32), 10, dtype=torch.int32)
    wanted = [
        SamplingParams(temperature=0.0, top_k=1, top_p=0.01, typical_p=0.01),
        SamplingParams(temperature=0.0, repetition_penalty=2.0),
        SamplingParams(temperature=0.0, presence_penalty=2.0),
    ]
    assert sample(logits, wanted, [7] * 3, [3] * 3, pool).token_ids.tolist() == [10, 20, 20]


def test_greedy_and_sampled_rows_share_a_batch():
    logits = random_logits(64)
    wanted = [GREEDY if row % 3 else SamplingParams(seed=row) for row in range(64)]
    mixed = sample(logits, wanted).token_ids
    greedy = [row for row in range(64) if row % 3]
    drawn = [row for row in range(64) if row % 3 == 0]
    assert torch.equal(mixed[greedy], logits.argmax(dim=-1)[greedy])
    assert torch.equal(mixed[drawn], sample(logits[drawn], [wanted[r] for r in drawn]).token_ids)
    assert not torch.equal(mixed[drawn], logits.argmax(dim=-1)[drawn])


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, lambda x: x.softmax(-1)),
        ({"temperature": 0.5}, lambda x: (x / 0.5).softmax(-1)),
        ({"temperature": 2.5}, lambda x: (x / 2.5).softmax(-1)),
        ({"top_k": 8}, lambda x: x.where(x >= x.topk(8).values[-1], -torch.inf).softmax(-1)),
        (
            {"min_p": 0.3, "temperature": 2.0},
            lambda x: (
                (x / 2)
                .where((x / 2).softmax(-1) >= 0.3 * (x / 2).softmax(-1).max(), -torch.inf)
                .softmax(-1)
            ),
        ),
    ],
    ids=["plain", "cold", "hot", "top_k", "min_p"],
)
def test_tokens_follow_the_distribution(wanted, expected):
    logits = torch.randn(32, generator=torch.Generator().manual_seed(1))
    draws = 20_000
    params = [SamplingParams(seed=3, **wanted)] * draws
    chosen = sample(logits.expand(draws, -1), params, list(range(draws))).token_ids
    probabilities = expected(logits)
    counts = torch.bincount(chosen, minlength=32)
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    limit = CHI_SQUARE_999[31] if kept.sum() > 8 else CHI_SQUARE_999[7]
    assert chi_square(counts[kept], probabilities[kept]) < limit


@pytest.mark.tgi_pain(14)
def test_logprobs_are_the_models_own():
    logits = random_logits(len(MANY))
    before = logits.clone()
    pool = torch.randint(0, VOCAB, (64, 32), dtype=torch.int32)
    result = sample(logits, MANY, [20] * len(MANY), [5] * len(MANY), pool)
    expected = torch.log_softmax(before.double(), dim=-1)
    chosen = expected.gather(1, result.token_ids[:, None])[:, 0].float()
    torch.testing.assert_close(result.logprobs, chosen)
    assert torch.equal(logits, before), "the sampler changed the model's logits"


def test_top_logprobs_are_ordered_for_the_rows_that_request_them():
    logits = random_logits(len(MANY))
    top = sample(logits, MANY).top
    assert top is not None
    assert top.entries.tolist() == [9, 10, 20, 21, 31, 32]
    assert top.counts.tolist() == [3, 7] * 3
    expected = torch.log_softmax(logits[top.entries], dim=-1).sort(dim=-1, descending=True)
    assert torch.equal(top.ids, expected.indices[:, :7])
    torch.testing.assert_close(top.logprobs, expected.values[:, :7])


def test_top_logprobs_are_limited_to_the_vocabulary():
    top = sample(random_logits(1)[:, :4], [SamplingParams(top_logprobs=10)]).top
    assert top is not None
    assert top.counts.tolist() == [4]
    assert top.ids.shape == (1, 4)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_poisoned_row_is_marked_alone(poison):
    logits = random_logits(len(MANY))
    clean = sample(logits, MANY)
    for row in range(11):
        broken = logits.clone()
        broken[row, 123] = poison
        result = sample(broken, MANY)
        others = [other for other in range(len(MANY)) if other != row]
        assert not result.logprobs[row].isfinite()
        assert torch.equal(result.token_ids[others], clean.token_ids[others])
        assert torch.equal(result.logprobs[others], clean.logprobs[others])
        assert 0 <= result.token_ids[row] < VOCAB


def test_tokens_that_the_model_excludes_do_not_poison_a_row():
    logits = random_logits(2)
    logits[:, 100:] = -torch.inf
    result = sample(logits, [SamplingParams(seed=1, temperature=0.9), GREEDY])
    assert result.logprobs.isfinite().all()
    assert (result.token_ids < 100).all()


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-300])
def test_a_tiny_temperature_is_nearly_greedy(temperature):
    logits = random_logits(16) * 100
    wanted = [SamplingParams(temperature=temperature, seed=s) for s in range(16)]
    result = sample(logits, wanted)
    assert torch.equal(result.token_ids, logits.argmax(dim=-1))
