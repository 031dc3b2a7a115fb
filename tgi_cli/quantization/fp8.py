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
    (``weight_scale_semantics``). With an ``activation_scheme``, inputs are rounded to e4m3, too,
    where the device multiplies in it; stored scales of activations are unused.
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
        self.inputs = config.get("activation_scheme") in ("dynamic", "static")

    def merge(self, module: str, tensors: ModuleTensors, peek: ReadTensor) -> MergedWeight:
        return merge_tensors(self, module, tensors, self.block, self.inverse, self.inputs)


def merge_tensors(
    layout: CheckpointFormat,
    module: str,
    tensors: ModuleTensors,
    block: tuple[int, int] | None,
    inverse: bool = False,
    rounds_inputs: bool = False,
) -> MergedWeight:
    """Implements :meth:`CheckpointFormat.merge` of a format, with an optional block size.

    ``rounds_inputs``: whether inputs are rounded, too.
    """
    weight = tensors["weight"]
    scale = next(name for name in FP8.required_suffixes if name in tensors)
    layout.check(module, tensors, weight.dtype in DTYPES and len(weight.shape) == 2)
    outputs, inputs = weight.shape
    fits = can_expand_scales(tensors[scale].shape, (outputs, inputs), block)
    layout.check(module, tensors, fits)
    about = "8 bits, floating point" + (f", blocks of {block[0]} x {block[1]}" if block else "")
    read = partial(_read, block, inverse, rounds_inputs)
    return MergedWeight((outputs, inputs), ("weight", scale), read, about)


def _read(
    block: tuple[int, int] | None,
    inverse: bool,
    rounds_inputs: bool,
    weight: Tensor,
    scales: Tensor,
) -> QuantizedWeight:
    own = scales.float()
    spread_scales, groups = expand_scales(
        own.reciprocal() if inverse else own, (weight.shape[0], weight.shape[1]), block
    )
    codes = weight.view(torch.uint8)
    return QuantizedWeight(
        codes, spread_scales, None, groups, 8, table(weight.dtype), rounds_inputs
    )


@cache
def table(dtype: torch.dtype) -> Tensor:
    """float32 [256]: the value of each byte."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def quantize(weight: Tensor) -> QuantizedWeight:
    """Round to e4m3 with a scale per output that maps its largest element to the largest value.

    Inputs are rounded to e4m3 too where the device multiplies in it.
    """
    limit = torch.finfo(torch.float8_e4m3fn).max
    weight = weight.float()
    scales = weight.abs().amax(1, keepdim=True).div_(limit).clamp_(min=1e-12)
    codes = weight.div_(scales).to(torch.float8_e4m3fn).view(torch.uint8)
    groups = torch.zeros(weight.shape[1], dtype=torch.int64)
    own = table(torch.float8_e4m3fn)
    return QuantizedWeight(codes, scales, None, groups, 8, own, fp8_inputs=True)
