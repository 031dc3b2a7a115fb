"""AWQ (https://arxiv.org/abs/2306.00978) in AutoAWQ's ``gemm`` layout.

https://github.com/casper-hansen/AutoAWQ
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.quantization.bits import unpack
from tgi_cli.quantization.formats import (
    CheckpointFormat,
    MergedWeight,
    ModuleTensors,
    ReadTensor,
    are_matrices,
)
from tgi_cli.quantization.quantized_weight import QuantizedWeight, contiguous_groups

_LAYOUTS = ("gemm", "exllama", "ipex")
"""Versions with the layout of gemm."""

_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of output i of eight."""


class AWQ(CheckpointFormat):
    """4-bit codes, packed along the outputs, eight to a word in a permuted order."""

    name = "awq"
    code_suffixes = ("qweight",)
    required_suffixes = ("scales",)
    optional_suffixes = ("qzeros",)
    has_integers = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits = int(config.get("bits", config.get("w_bit", 4)))
        version = str(config.get("version", "gemm")).lower()
        if bits != 4 or version not in _LAYOUTS:
            raise UnsupportedModelError(
                f"awq of {bits} bits in the layout {version!r} is not supported",
                "serve a checkpoint of 4 bits in the gemm layout",
            )

    def merge(self, module: str, tensors: ModuleTensors, peek: ReadTensor) -> MergedWeight:
        names = ("qweight", "qzeros", "scales")
        self.check(module, tensors, are_matrices(tensors, names))
        inputs, words = tensors["qweight"].shape
        num_groups, outputs = tensors["scales"].shape
        right = (
            outputs == 8 * words
            and tensors["qzeros"].shape == (num_groups, words)
            and num_groups > 0
            and inputs % num_groups == 0
        )
        self.check(module, tensors, right)
        group = inputs // num_groups
        about = f"4 bits, groups of {group}"
        return MergedWeight((outputs, inputs), names, partial(_read, group), about)


def _read(group: int, qweight: Tensor, qzeros: Tensor, scales: Tensor) -> QuantizedWeight:
    codes = _in_order(qweight).T.contiguous()
    groups = contiguous_groups(codes.shape[1], group)
    return QuantizedWeight(codes, scales.T.float(), _in_order(qzeros).T.float(), groups, 4)


def _in_order(words: Tensor) -> Tensor:
    """Unpack words int32 [n, w] to codes uint8 [n, 8 w], in the order of outputs."""
    codes = unpack(words, 4).view(len(words), -1, 8)
    return codes.index_select(2, torch.tensor(_POSITIONS)).flatten(1)
