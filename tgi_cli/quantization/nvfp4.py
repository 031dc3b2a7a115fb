"""NVFP4: 4-bit floating point (e2m1) in blocks of 16 with scales in e4m3, and NVIDIA's checkpoints.

A weight has one more scale in float32, for the whole of it.
https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/work-quantized-types.html
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.quantization import fp8, mxfp4
from tgi_cli.quantization.formats import (
    CheckpointFormat,
    MergedWeight,
    ModuleTensors,
    ReadTensor,
    are_matrices,
)
from tgi_cli.quantization.quantized_weight import QuantizedWeight, contiguous_groups

BLOCK = 16
"""Numbers that share a scale in e4m3."""

_ALGORITHMS = ("FP8", "NVFP4")


class ModelOpt(CheckpointFormat):
    """NVIDIA ModelOpt's checkpoints in e4m3 or NVFP4; activations of the latter stay in 16 bits.

    https://github.com/NVIDIA/Model-Optimizer
    """

    name = "modelopt"
    code_suffixes = ("weight",)
    required_suffixes = ("weight_scale",)
    optional_suffixes = ("weight_scale_2", "input_scale")
    ignored = (r".*\.[kv]_scale", r".*\.[kv]_bmm_quantizer\..*")

    def __init__(self, config: Mapping[str, Any]) -> None:
        algorithm = str(config.get("quant_algo", "NVFP4")).upper()
        if algorithm not in _ALGORITHMS:
            raise UnsupportedModelError(
                f"modelopt's {algorithm} is not supported",
                f"serve a checkpoint in one of {', '.join(_ALGORITHMS)}",
            )

    def merge(self, module: str, tensors: ModuleTensors, peek: ReadTensor) -> MergedWeight:
        if tensors["weight"].dtype in fp8.DTYPES:
            return fp8.merge_tensors(self, module, tensors, None, rounds_inputs=True)
        return merge_tensors(self, module, tensors, ("weight", "weight_scale", "weight_scale_2"))


def merge_tensors(
    layout: CheckpointFormat,
    module: str,
    tensors: ModuleTensors,
    names: tuple[str, str, str],
    inverse: bool = False,
) -> MergedWeight:
    """Implements :meth:`CheckpointFormat.merge` of a format.

    Args:
        layout: the format.
        module: its name.
        tensors: tensors of the module, by suffix.
        names: suffixes of the codes (uint8 [out, in / 2], the lower bits first), the blocks' scales
            (e4m3 [out, in / 16]), and the scale of the whole weight (one element).
        inverse: whether the last is to be divided by.
    """
    codes, scales, whole = names
    right = are_matrices(tensors, names[:2]) and whole in tensors
    layout.check(module, tensors, right)
    outputs, width = tensors[codes].shape
    right = (
        tensors[codes].dtype == "U8"
        and tensors[scales].dtype == "F8_E4M3"
        and tensors[scales].shape == (outputs, 2 * width // BLOCK)
        and 2 * width % BLOCK == 0
        and tensors[whole].shape in ((), (1,))
    )
    layout.check(module, tensors, right)
    about = f"4 bits, floating point, groups of {BLOCK}"
    return MergedWeight((outputs, 2 * width), names, partial(_read, inverse), about)


def _read(inverse: bool, packed: Tensor, scales: Tensor, whole: Tensor) -> QuantizedWeight:
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    factor = whole.float().reshape(())
    spread = scales.float() / factor if inverse else scales.float() * factor
    groups = contiguous_groups(codes.shape[1], BLOCK)
    return QuantizedWeight(codes, spread, None, groups, 4, mxfp4.table())
