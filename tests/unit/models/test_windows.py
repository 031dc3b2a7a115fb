"""Attention within windows, computed many windows at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tgi_cli.models.hf.windows import window_attention


def one_by_one(query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
    parts = [
        scaled_dot_product_attention(
            *(each[:, :, start:end] for each in (query, key, value)), scale=0.3
        )
        for start, end in pairwise(bounds)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)


@pytest.mark.parametrize(
    "bounds", [[0, 12], [0, 4, 8, 12], [0, 4, 8, 10, 12], [0, 1, 5, 6, 10, 10, 12]]
)
def test_windows_see_themselves_alone(bounds: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 12, 8, generator=generator).unbind()
    got, weights = window_attention(
        None, query, key, value, None, 0.3, torch.tensor(bounds, dtype=torch.int32), dropout=0.0
    )
    assert weights is None
    torch.testing.assert_close(got, one_by_one(query, key, value, bounds))
