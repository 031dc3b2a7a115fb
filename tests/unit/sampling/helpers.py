"""Batches for the sampler without a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.sampling.params import SamplingParams
from tgi_cli.sampling.table import SamplingBatch, SamplingTable


def upload(*arrays: NDArray[Any]) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


def batch_of(
    params: Sequence[SamplingParams],
    positions: Sequence[int] | None = None,
    prompts: Sequence[int] | None = None,
    stops: Sequence[int] = (),
) -> SamplingBatch:
    """One row per entry, in order."""
    count = len(params)
    positions = [7] * count if positions is None else positions
    prompts = positions if prompts is None else prompts
    table = SamplingTable(count)
    for row, (wanted, prompt) in enumerate(zip(params, prompts, strict=True)):
        table.set(row, wanted, prompt, stops)
    return table.select(np.arange(count), np.array(positions, np.int64))


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """Pearson's statistic of observed counts against a distribution; both [K]."""
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


CHI_SQUARE_999 = {7: 24.32, 9: 27.88, 15: 37.70, 31: 61.10}
"""Quantiles at 0.999 by degrees of freedom."""
