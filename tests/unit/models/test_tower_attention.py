"""Attention of towers: within windows, many at once, and without masks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tgi_cli.kernels import cpp_library
from tgi_cli.models.hf.tower_attention import tower_attention


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_see_themselves_alone(bounds: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 12, 8, generator=generator).to(dtype).unbind()
    starts = torch.tensor(bounds, dtype=torch.int32)
    got, weights = tower_attention(
        None, query, key, value, None, 0.3, starts, is_causal=False, dropout=0.0
    )
    assert weights is None
    assert got.dtype == dtype
    wanted = one_by_one(*(each.float() for each in (query, key, value)), bounds)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(got.float(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(cpp_library() is None, reason="no kernels")
@pytest.mark.parametrize(("heads", "count", "dim"), [(3, 70, 64), (2, 1, 80), (2, 33, 72)])
def test_kernels_attend_to_a_batch_in_both_directions(heads: int, count: int, dim: int) -> None:
    """Heads of 72 dimensions are padded; rows of projections have gaps between them."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, count, 3, heads, dim, generator=generator).bfloat16()
    query, key, value = (each.transpose(1, 2) for each in rows.unbind(2))
    wanted = scaled_dot_product_attention(query.float(), key.float(), value.float())
    got, _ = tower_attention(None, query, key, value, None, is_causal=False)
    assert got.shape == (2, count, heads, dim)
    torch.testing.assert_close(got.float(), wanted.transpose(1, 2), atol=0.02, rtol=0.02)
    alone, _ = tower_attention(
        None, query[1:], key[1:], value[1:], None, scaling=dim**-0.5, is_causal=False
    )
    assert torch.equal(alone[0], got[1]), "what is beside an image changes no bit of it"


def test_masks_and_one_direction_are_left_to_torch() -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value = torch.randn(3, 1, 2, 9, 16, generator=generator).bfloat16().unbind()
    mask = torch.rand(1, 1, 9, 9, generator=generator) < 0.7
    mask |= torch.eye(9, dtype=torch.bool)
    for given, causal in ((mask, False), (None, True)):
        wanted = scaled_dot_product_attention(query, key, value, given, is_causal=causal)
        got, _ = tower_attention(None, query, key, value, given, is_causal=causal)
        assert torch.equal(got, wanted.transpose(1, 2))
