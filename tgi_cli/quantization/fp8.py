"""Weights in 8-bit floating point with scales: reading them, and quantizing plain ones.

https://arxiv.org/abs/2209.05433; scales per block are DeepSeek's (https://arxiv.org/abs/2412.19437)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tgi_cli.quantization.formats import CheckpointFormat, MergedWeight, ModuleTensors, ReadTensor
from tgi_cli.quantization.quantized_weight import QuantizedWeight, can_expand_scales, expand_scales

DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
"""Dtypes by safetensors' names."""


class FP8(CheckpointFormat):
    """A weight e4m3 [out, in] beside ``weight_scale`` or ``weight_scale_inv``.

    Weights are multiplied by either, except that gptqmodel may mark its scales as inverses
    (``weight_scale_semantics``). Scales of activations are unused: these are not quantized.
    """

    name = "fp8"
    code_suffixes = ("weight",)
    required_suffixes = ("weight_scale_inv", "weight_scale")
    optional_suffixes = ("input_scale", "activation_scale", "input_scale_ub")
    ignored = (r".*\.[qkv]_scale",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        block = config.get("weight_block_size")
        self.block = None if not block else (int(block[0]), int(block[1]))
        self.inverse = config.get("weight_scale_semantics") == "inverse"

    def merge(self, module: str, tensors: ModuleTensors, peek: ReadTensor) -> MergedWeight:
        return merge_tensors(self, module, tensors, self.block, self.inverse)


def merge_tensors(
    layout: CheckpointFormat,
    module: str,
    tensors: ModuleTensors,
    block: tuple[int, int] | None,
    inverse: bool = False,
) -> MergedWeight:
    """Implements :meth:`CheckpointFormat.merge` of a format, with an optional block size."""
    weight = tensors["weight"]
    scale = next(name for name in FP8.required_suffixes if name in tensors)
    layout.check(module, tensors, weight.dtype in DTYPES and len(weight.shape) == 2)
    outputs, inputs = weight.shape
    fits = can_expand_scales(tensors[scale].shape, (outputs, inputs), block)
    layout.check(module, tensors, fits)
    about = "8 bits, floating point" + (f", blocks of {block[0]} x {block[1]}" if block else "")
    return MergedWeight((outputs, inputs), ("weight", scale), partial(_read, block, inverse), about)


def _read(
    block: tuple[int, int] | None, inverse: bool, weight: Tensor, scales: Tensor
) -> QuantizedWeight:
    own = scales.float()
    spread_scales, groups = expand_scales(
        own.reciprocal() if inverse else own, (weight.shape[0], weight.shape[1]), block
    )
    return QuantizedWeight(
        weight.view(torch.uint8), spread_scales, None, groups, 8, table(weight.dtype)
    )


@cache
def table(dtype: torch.dtype) -> Tensor:
    """float32 [256]: the value of each byte."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def quantize(weight: Tensor) -> QuantizedWeight:
    """Round to e4m3 with a scale per output that maps its largest element to the largest value."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    weight = weight.float()
    scales = weight.abs().amax(1, keepdim=True).div_(limit).clamp_(min=1e-12)
    codes = weight.div_(scales).to(torch.float8_e4m3fn).view(torch.uint8)
    groups = torch.zeros(weight.shape[1], dtype=torch.int64)
    return QuantizedWeight(codes, scales, None, groups, 8, table(torch.float8_e4m3fn))
