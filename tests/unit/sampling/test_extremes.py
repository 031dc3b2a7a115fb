"""Whatever numbers a request has: a barred token is not chosen, and nothing becomes NaN."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.sampling.helpers import batch_of, upload
from tests.unit.sampling.test_constraints import bits_of
from tgi_cli.kernels import without_cpp_kernels
from tgi_cli.kernels.library import cpp_library
from tgi_cli.sampling import constraints, filters
from tgi_cli.sampling.constraints import TokenMasks
from tgi_cli.sampling.params import MAX_BAD_WORD_IDS, MAX_TOKEN_IDS, SamplingParams
from tgi_cli.sampling.sampler import Sampler

VOCAB = 70
HALF = torch.finfo(torch.float32).max / 2
"""Two of them are never further apart than a float32 can say."""
HUGE = [1e20, 3.4e38, 3.5e38, 1e300, 1.7e308]
TINY = [5e-324, 1e-45, 1e-38, 1e-30, 1e-7]
SHARES = [1e-300, 1e-45, 1e-9, 0.3, 0.999999999, 1.0, 1.0]
PENALTIES = [-2.0, -1e-45, 0.0, 0.0, 1e-300, 2.0]
LOGITS = [0.0, 1e-45, 3.0, -4.0, 1e5, -1e5, HALF, -HALF, -math.inf]


def tokens(dice: Random, most: int, least: int = 0) -> tuple[int, ...]:
    return tuple(dice.choices(range(VOCAB), k=dice.randint(least, most)))


def anything(dice: Random) -> SamplingParams:
    """Parameters at the ends of their ranges."""
    return SamplingParams(
        temperature=dice.choice([0.0, 0.7, 1.0, *HUGE, *TINY]),
        top_k=dice.choice([0, 0, 1, 3, VOCAB + 1, 2**31, 2**32, 2**2000]),
        top_p=dice.choice(SHARES),
        min_p=dice.choice([0.0, *SHARES]),
        typical_p=dice.choice(SHARES),
        repetition_penalty=dice.choice([0.5, 1.0, 1.3, *HUGE, *TINY]),
        frequency_penalty=dice.choice(PENALTIES),
        presence_penalty=dice.choice(PENALTIES),
        relative_frequency_penalty=dice.choice(PENALTIES),
        seed=dice.getrandbits(64),
        logit_bias=tuple((i, dice.choice([-100.0, 1e-300, 100.0])) for i in tokens(dice, 9)),
        bad_words=tuple(tokens(dice, 2, 1) for _ in range(dice.randint(0, 4))),
        allowed_token_ids=dice.choice([(), (), tokens(dice, 20)]),
        watermark=dice.random() < 0.3,
        watermark_delta=dice.choice([2.0, -1e308, 1e308, 1e-320]),
        watermark_gamma=dice.choice([1e-300, 0.5, 1 - 2**-53]),
    )


@pytest.fixture(params=["kernel", "rows", "device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """By C++; by torch as on a CPU without it; by torch as on another device."""
    if request.param == "kernel" and cpp_library() is None:
        pytest.skip("no compiler has made the kernels")
    if request.param == "device":
        monkeypatch.setattr(constraints, "ROW_BY_ROW", ())
        monkeypatch.setattr(filters, "ROW_BY_ROW", ())
    return request.param


def choose(
    way: str, logits: torch.Tensor, *args: Any, **more: Any
) -> tuple[list[int], list[float]]:
    if way == "kernel":
        result = Sampler(upload)(logits, *args, **more)
    else:
        with without_cpp_kernels():
            result = Sampler(upload)(logits, *args, **more)
    return result.token_ids.tolist(), result.logprobs.tolist()


@pytest.mark.parametrize("seed", range(40))
def test_a_masked_token_is_never_chosen(way: str, seed: int) -> None:
    dice = Random(seed)
    values = dice.sample(LOGITS, dice.randint(1, len(LOGITS)))
    logits = dice.choices(values, k=VOCAB)
    masked, last = set(tokens(dice, 9, 1)), dice.randrange(VOCAB)
    wanted = [anything(dice) for _ in range(16 if seed % 2 else 1)]
    allowed = torch.zeros(len(wanted), VOCAB, dtype=torch.bool)
    allowed[:, list(masked)] = True
    masks = TokenMasks(np.arange(len(wanted)), bits_of(allowed))
    pool = torch.full((len(wanted), 9), last, dtype=torch.int32)
    given = torch.tensor([logits] * len(wanted))
    chosen, logprobs = choose(way, given, batch_of(wanted), pool, masks=masks)
    for params, token, logprob in zip(wanted, chosen, logprobs, strict=True):
        possible = masked & {i for i, value in enumerate(logits) if value > -math.inf}
        if params.allowed_token_ids:
            possible &= set(params.allowed_token_ids)
        possible -= {word[-1] for word in params.bad_words if set(word[:-1]) <= {last}}
        if possible:
            assert token in possible
            assert math.isfinite(logprob)
        elif any(value > -math.inf for value in logits):
            assert logprob == -math.inf, "it is marked as one that has no choice"


@pytest.mark.parametrize("temperature", [3.5e38, 1e308])
def test_an_extreme_temperature_chooses_uniformly_among_allowed_tokens(
    way: str, temperature: float
) -> None:
    wanted = [SamplingParams(temperature=temperature, seed=seed) for seed in range(3000)]
    allowed = torch.zeros(1, VOCAB, dtype=torch.bool)
    allowed[0, [3, 40, 69]] = True
    logits = torch.full((1, VOCAB), 9.0)
    logits[0, 40] = -5.0
    masks = TokenMasks(np.arange(3000), bits_of(allowed).repeat(3000, 0))
    pool = torch.zeros(3000, 9, dtype=torch.int32)
    chosen, _ = choose(way, logits.repeat(3000, 1), batch_of(wanted), pool, masks=masks)
    counts = np.bincount(chosen, minlength=VOCAB)
    assert counts[[3, 40, 69]].sum() == 3000
    assert counts[[3, 40, 69]].min() > 900


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_logits_processor_may_return_infinities_and_nan(way: str, temperature: float) -> None:
    """The one is the largest number, the other no answer."""
    logits = torch.zeros(2, VOCAB)
    scores = torch.full((2, VOCAB), -1.0)
    scores[0, 7] = math.inf
    scores[1, 8] = math.nan
    wanted = [SamplingParams(temperature=temperature, seed=3)] * 2
    pool = torch.zeros(2, 9, dtype=torch.int32)
    chosen, logprobs = choose(way, logits, batch_of(wanted), pool, scores=scores)
    assert chosen[0] == 7
    assert math.isfinite(logprobs[0])
    assert math.isnan(logprobs[1])


ID = 2**31
MANY = tuple(range(MAX_TOKEN_IDS + 1))


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"top_k": -1}, "`top_k`"),
        ({"temperature": math.inf}, "`temperature`"),
        ({"temperature": math.nan}, "`temperature`"),
        ({"repetition_penalty": math.nan}, "`repetition_penalty`"),
        ({"seed": 2**64}, "`seed`"),
        ({"top_logprobs": ID}, "`top_logprobs`"),
        ({"min_new_tokens": ID}, "`min_new_tokens`"),
        ({"watermark_delta": math.inf}, "`watermark_delta`"),
        ({"logit_bias": ((ID, 1.0),)}, "`logit_bias`"),
        ({"logit_bias": ((-1, 1.0),)}, "`logit_bias`"),
        ({"logit_bias": ((1, math.nan),)}, "`logit_bias`"),
        ({"logit_bias": tuple((i, 1.0) for i in MANY)}, "`logit_bias` takes up to 4096"),
        ({"bad_words": ((1, ID),)}, "`bad_words`"),
        ({"bad_words": ((1,),) * 1025}, "`bad_words` takes up to 1024"),
        ({"bad_words": ((1,) * (MAX_BAD_WORD_IDS + 1),)}, "`bad_words` may have up to 8192"),
        ({"allowed_token_ids": (ID,)}, "`allowed_token_ids`"),
        ({"allowed_token_ids": (-1,)}, "`allowed_token_ids`"),
        ({"allowed_token_ids": MANY}, "`allowed_token_ids` takes up to 4096"),
    ],
)
def test_parameters_beyond_the_limits_are_refused_by_name(
    fields: dict[str, Any], cause: str
) -> None:
    with pytest.raises(ValueError, match=cause):
        SamplingParams(**fields)


def test_a_k_beyond_any_vocabulary_keeps_all() -> None:
    assert SamplingParams(top_k=2**2000).top_k == 2**31 - 1
