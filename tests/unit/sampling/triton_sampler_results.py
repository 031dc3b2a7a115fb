"""Triton's sampler against the reference. Not collected by itself: see test_triton_sampler.py.

On a machine with CUDA it may be run as it stands, and then tests what the compiler made.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.unit.sampling.helpers import batch_of
from tgi_cli.kernels import without_cpp_kernels
from tgi_cli.kernels.sample import Draw, Tokens
from tgi_cli.sampling.multinomial import uniforms
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.sampling.sampler import Sampled, Sampler, summarize
from tgi_cli.sampling.table import SAMPLED, SamplingBatch
from tgi_cli.sampling.triton_sampler import BLOCK, triton_sample

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
POOL = torch.zeros(64, 32, dtype=torch.int32)
GREEDY = SamplingParams(temperature=0.0)


def upload(*arrays: NDArray[Any]) -> list[Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE) for array in arrays]


def on_cpu(*arrays: NDArray[Any]) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


def draw_of(batch: SamplingBatch) -> Draw:
    numbers = uniforms(batch.records["seed"], batch.positions)
    numbers[batch.records["flags"] & SAMPLED == 0] = 0.0
    filters = (batch.column(name) for name in ("top_k", "top_p", "min_p"))
    return Draw(numbers, batch.column("temperature"), *filters)


def both(
    logits: Tensor, wanted: list[SamplingParams], scores: Tensor | None = None
) -> tuple[Tokens, Sampled]:
    """What the kernel and the reference make of float32 logits on the CPU."""
    batch = batch_of(wanted)
    ours_scores = None if scores is None else scores.to(DEVICE)
    with without_cpp_kernels():
        reference = Sampler(on_cpu)(logits, batch, POOL, scores)
    own = logits.to(DEVICE)
    ours = triton_sample(own, own if ours_scores is None else ours_scores, draw_of(batch), upload)
    return Tokens(*(each.cpu() for each in ours)), reference


def random_logits(rows: int, vocabulary: int, scale: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * scale


FILTERS: list[dict[str, Any]] = [
    {},
    *({"top_k": k} for k in (1, 2, 50, 999, BLOCK + 100, 10**6)),
    *({"top_p": p} for p in (1e-12, 0.01, 0.5, 0.95, 0.9999)),
    *({"min_p": p} for p in (0.001, 0.5, 1.0)),
    {"top_k": 40, "top_p": 0.8},
    {"top_k": BLOCK + 5, "top_p": 0.99, "min_p": 0.001},
    {"top_k": 3, "top_p": 0.5, "min_p": 0.4},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 1.7, "top_k": 20},
]
WANTED = [GREEDY, *(SamplingParams(seed=seed, **each) for seed, each in enumerate(FILTERS))]


@pytest.mark.parametrize(
    ("scale", "rounded"), [(0.0, False), (0.1, False), (2.0, True), (5.0, False), (40.0, True)]
)
@pytest.mark.parametrize("vocabulary", [1, 500, BLOCK + 1, 2 * BLOCK + 900])
def test_tokens_are_those_of_the_reference(vocabulary: int, scale: float, rounded: bool) -> None:
    logits = random_logits(len(WANTED), vocabulary, scale)
    if rounded:  # equal numbers, as logits of 16 bits are
        logits = logits.bfloat16().float()
    ours, reference = both(logits, WANTED)
    assert torch.equal(ours.token_ids, reference.token_ids)
    torch.testing.assert_close(ours.logprobs, reference.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.peaks, logits.amax(-1))
    total = torch.logsumexp(logits.double(), -1) - logits.amax(-1)
    torch.testing.assert_close(ours.log_sums, total.float(), atol=1e-5, rtol=1e-5)


def test_many_draws_of_one_row_are_those_of_the_reference() -> None:
    wanted = [SamplingParams(seed=seed, top_p=0.97, temperature=1.2) for seed in range(200)]
    logits = random_logits(1, 3000, 2.0, seed=3).expand(200, -1).contiguous()
    ours, reference = both(logits, wanted)
    assert torch.equal(ours.token_ids, reference.token_ids)
    assert len(set(ours.token_ids.tolist())) > 50


@pytest.mark.parametrize("uniform", [2.0**-53, 1 - 2.0**-53])
@pytest.mark.parametrize("kept", [1, 7, 4096])
def test_only_tokens_with_weight_are_chosen_for_extreme_uniforms(kept: int, uniform: float) -> None:
    logits = torch.full((2, 20_000), -torch.inf)
    possible = torch.randperm(20_000, generator=torch.Generator().manual_seed(kept))[:kept]
    logits[:, possible] = 1.5
    draw = Draw(np.full(2, uniform), np.ones(2, np.float32), top_p=np.array([1.0, 0.999]))
    own = logits.to(DEVICE)
    edge = possible.min() if uniform < 0.5 else possible.max()
    assert triton_sample(own, own, draw, upload).token_ids.tolist() == [edge, edge]


def test_scores_choose_and_logits_are_reported() -> None:
    logits = random_logits(len(WANTED), 9000, 2.0)
    scores = random_logits(len(WANTED), 9000, 2.0, seed=1)
    scores[:, ::3] = -torch.inf
    ours, reference = both(logits, WANTED, scores)
    assert torch.equal(ours.token_ids, reference.token_ids)
    assert (ours.token_ids % 3 > 0).all()
    expected = torch.log_softmax(logits.double(), -1).gather(1, ours.token_ids[:, None])[:, 0]
    torch.testing.assert_close(ours.logprobs, expected.float(), atol=1e-5, rtol=1e-5)


def test_greedy_needs_nothing_from_the_host_and_takes_the_first_of_equals() -> None:
    logits = random_logits(3, 20_000, 1.0)
    logits[:, [700, 9000, 19_999]] = 10.0
    own = logits.to(DEVICE)
    assert triton_sample(own, own).token_ids.tolist() == [700] * 3


def test_halves_and_rows_apart_in_memory() -> None:
    wide = random_logits(3, 1024, 4.0).half()
    logits = wide[:, :1000].to(DEVICE)
    ours = triton_sample(logits, logits)
    assert torch.equal(ours.token_ids.cpu(), wide[:, :1000].float().argmax(-1))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poisoned_rows_are_marked_alone(poison: float) -> None:
    logits = random_logits(len(WANTED), 9000, 2.0)
    clean, _ = both(logits, WANTED)
    poisoned = range(0, len(WANTED), 3)
    others = [row for row in range(len(WANTED)) if row not in poisoned]
    logits[poisoned, 8500] = poison
    result, _ = both(logits, WANTED)
    assert not result.logprobs[poisoned].isfinite().any()
    assert torch.equal(result.token_ids[others], clean.token_ids[others])
    assert torch.equal(result.logprobs[others], clean.logprobs[others])
    assert ((result.token_ids >= 0) & (result.token_ids < 9000)).all()


def test_parts_of_rows_are_summarized_as_by_operators() -> None:
    """As shards do with their parts of a vocabulary, of which some have nothing but -inf."""
    logits = random_logits(4, 200, 5.0)
    logits[1, :100] = -float("inf")
    logits[2] = -float("inf")
    logits[3, 150] = torch.nan
    for part in (logits[:, :100], logits[:, 100:]):
        own = part.to(DEVICE)
        ours, expected = triton_sample(own, own), summarize(part)
        assert ours.token_ids.cpu()[:2].tolist() == expected.token_ids[:2].tolist()
        assert torch.equal(ours.peaks.cpu()[:3], expected.peaks[:3])
        torch.testing.assert_close(
            ours.log_sums.cpu(), expected.log_sums, atol=1e-5, rtol=1e-5, equal_nan=True
        )


def test_rows_without_any_possible_token_give_valid_ids() -> None:
    logits = random_logits(len(WANTED), 9000, 2.0)
    scores = torch.full_like(logits, -torch.inf)
    ours = triton_sample(logits.to(DEVICE), scores.to(DEVICE), draw_of(batch_of(WANTED)), upload)
    assert ((ours.token_ids >= 0) & (ours.token_ids < 9000)).all()
    nothing = torch.full((1, 100), -torch.inf, device=DEVICE)
    assert triton_sample(nothing, nothing).logprobs.isnan().all()


def test_no_rows() -> None:
    logits = torch.empty(0, 100, device=DEVICE)
    assert triton_sample(logits, logits).token_ids.shape == (0,)


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    logits = random_logits(8, 500, 30.0)
    wanted = [SamplingParams(seed=seed, temperature=temperature) for seed in range(8)]
    ours, reference = both(logits, wanted)
    assert torch.equal(ours.token_ids, reference.token_ids)
    assert (temperature > 1) == (not torch.equal(ours.token_ids, logits.argmax(-1)))
