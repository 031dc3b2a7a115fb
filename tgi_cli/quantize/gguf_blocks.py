"""Rounds weights to blocks of GGUF: Q8_0 and Q4_0, with ggml's arithmetic.

https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-quants.c
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 32
"""Inputs that share a scale."""


def q8_0(weight: Tensor) -> Tensor:
    """Blocks of a weight [..., K]: a float16 scale and 32 codes from -127 to 127.

    Returns:
        [..., K / 32, 34] uint8.
    """
    groups = weight.float().reshape(*weight.shape[:-1], -1, BLOCK)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    scaled = groups * _inverse(scale)
    codes = (scaled.abs() + 0.5).floor().copysign(scaled).to(torch.int8)
    return torch.cat([_float16_bytes(scale), codes.view(torch.uint8)], -1)


def q4_0(weight: Tensor) -> Tensor:
    """Blocks of a weight [..., K]: a float16 scale and 32 codes from 0 to 15, which mean -8 to 7.

    The number that is largest without its sign becomes -8, exactly.

    Returns:
        [..., K / 32, 18] uint8. A byte has the codes of the inputs i and i + 16.
    """
    groups = weight.float().reshape(*weight.shape[:-1], -1, BLOCK)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = largest / -8
    codes = (groups * _inverse(scale) + 8.5).floor().clamp(0, 15).to(torch.uint8)
    low, high = codes.chunk(2, -1)
    return torch.cat([_float16_bytes(scale), low | (high << 4)], -1)


ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": q8_0, "Q4_0": q4_0}
"""Encoders by the name of the blocks' type."""


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0, 1 / scale)


def _float16_bytes(scale: Tensor) -> Tensor:
    return scale.to(torch.float16).view(torch.uint8)
