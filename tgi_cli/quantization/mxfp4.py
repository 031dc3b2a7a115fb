"""MXFP4: 4-bit floating point (e2m1) in blocks of 32 that share a power of two.

https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tgi_cli.quantization.quantized_weight import QuantizedWeight, contiguous_groups

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower 3 bits; the fourth is the sign."""

BLOCK = 32
"""Numbers that share an exponent."""


@cache
def table() -> Tensor:
    """float32 [16]: the value of each code."""
    return torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])


def read(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """A weight [out, G * 32] of blocks uint8 [out, G, 16] with exponents uint8 [out, G].

    The lower bits of a byte are its first number.
    """
    outputs, groups = scales.shape
    if blocks.is_meta:  # only the shape matters, thousands of times per model
        codes = torch.empty(outputs, BLOCK * groups, dtype=torch.uint8, device="meta")
        return QuantizedWeight(codes, codes, None, codes, 4, table())
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    powers = torch.exp2(scales.float() - 127.0)
    return QuantizedWeight(
        codes, powers, None, contiguous_groups(BLOCK * groups, BLOCK), 4, table()
    )
