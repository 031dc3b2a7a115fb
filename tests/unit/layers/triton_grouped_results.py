"""Triton's grouped product against the reference. Not collected by itself: see test_triton.py.

On a machine with CUDA it may be run as it stands, and then tests what the compiler made.
"""

from __future__ import annotations

import os

import pytest
import torch

from tgi_cli.layers.grouped import Groups, looped_linear
from tgi_cli.layers.triton_grouped import triton_grouped_linear
from tgi_cli.quantization.tiled_weight import ExpertRows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "used", "out", "depth", "dtype", "bias"),
    [
        (0, 2, 6, 6, 40, 24, torch.float32, True),
        (1, 2, 6, 6, 40, 24, torch.float32, False),
        (23, 3, 5, 3, 70, 40, torch.float32, True),
        (40, 2, 3, 3, 24, 136, torch.float16, True),
    ],
)
def test_a_product_is_that_of_the_reference(
    tokens: int,
    top_k: int,
    experts: int,
    used: int,
    out: int,
    depth: int,
    dtype: torch.dtype,
    bias: bool,
) -> None:
    torch.manual_seed(0)
    chosen = torch.rand(tokens, used).argsort(1)[:, :top_k]
    groups = Groups.sort(chosen.to(DEVICE), experts)
    x = torch.randn(tokens * top_k, depth + 8).to(DEVICE, dtype)[:, :depth]
    weight = torch.randn(experts, out, depth).to(DEVICE, dtype)
    added = torch.randn(experts, out).to(DEVICE, dtype) if bias else None
    wanted = looped_linear(x, weight, added, groups)
    product = triton_grouped_linear(x, weight, added, ExpertRows(groups.ends, groups.pairs))
    exact = 1e-4 if INTERPRETED else 1e-3
    tolerance = exact if dtype == torch.float32 else 0.05
    torch.testing.assert_close(product, wanted, atol=tolerance, rtol=0)
