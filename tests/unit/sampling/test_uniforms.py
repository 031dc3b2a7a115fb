from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.sampling.helpers import CHI_SQUARE_999, chi_square
from tgi_cli.sampling.multinomial import uniforms

UNIFORM_16 = torch.full((16,), 1 / 16)


def histogram(values: np.ndarray) -> torch.Tensor:
    return torch.bincount(torch.from_numpy((values * 16).astype(np.int64)), minlength=16)


def draw(seeds: object, positions: object) -> np.ndarray:
    return uniforms(np.asarray(seeds, np.uint64), np.asarray(positions, np.int64))


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63, 2**64 - 1])
def test_the_positions_of_one_seed_are_uniform(seed):
    values = draw([seed] * 20_000, np.arange(20_000))
    assert values.min() > 0
    assert values.max() < 1
    assert chi_square(histogram(values), UNIFORM_16) < CHI_SQUARE_999[15]


def test_neighbouring_seeds_are_uniform_and_unrelated_at_one_position():
    values = draw(np.arange(20_000), [5] * 20_000)
    assert chi_square(histogram(values), UNIFORM_16) < CHI_SQUARE_999[15]
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_neighbouring_positions_are_unrelated():
    values = draw([7] * 20_000, np.arange(20_000))
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_seed_and_position_are_not_interchangeable():
    assert draw([3], [8]) != draw([8], [3])
    assert len(set(draw(np.repeat(np.arange(100), 100), np.tile(np.arange(100), 100)))) == 10_000


def test_a_number_does_not_depend_on_its_batch():
    together = draw([1, 2, 3, 2], [9, 9, 4, 100])
    alone = [draw([seed], [at])[0] for seed, at in ((1, 9), (2, 9), (3, 4), (2, 100))]
    assert together.tolist() == alone


def test_the_output_of_a_seed_never_changes():
    """Users keep seeds: another hash would silently change all their outputs."""
    values = draw([0, 0, 1, 2**64 - 1], [0, 1, 0, 123_456])
    expected = [0.28176129772258507, 0.01403302919427507, 0.8628561488610588, 0.7517500382986911]
    assert values.tolist() == expected
