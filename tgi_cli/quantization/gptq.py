"""GPTQ (https://arxiv.org/abs/2210.17323), as gptqmodel and auto-gptq write it.

https://github.com/ModelCloud/GPTQModel
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from tgi_cli.quantization.bits import unpack, unpack_minus_one
from tgi_cli.quantization.formats import (
    CheckpointFormat,
    MergedWeight,
    ModuleTensors,
    ReadTensor,
    are_matrices,
)
from tgi_cli.quantization.quantized_weight import QuantizedWeight, contiguous_groups


class GPTQ(CheckpointFormat):
    """Codes of 2, 3, 4 or 8 bits, packed along the inputs; zeros along the outputs.

    Bits follow from the shapes, so modules may differ. With activation ordering, g_idx holds the
    group of each input.

    Args:
        config: of the checkpoint: ``group_size`` and ``checkpoint_format``. In ``gptq``, the
            default, zeros are stored minus 1; in ``gptq_v2`` as they are.
    """

    name = "gptq"
    code_suffixes = ("qweight",)
    required_suffixes = ("scales",)
    optional_suffixes = ("qzeros", "g_idx")
    has_integers = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.group_size = int(config.get("group_size", -1))
        self.minus_one = config.get("checkpoint_format", config.get("format")) != "gptq_v2"

    def merge(self, module: str, tensors: ModuleTensors, peek: ReadTensor) -> MergedWeight:
        names: tuple[str, ...] = ("qweight", "qzeros", "scales")
        self.check(module, tensors, are_matrices(tensors, names))
        words, outputs = tensors["qweight"].shape
        num_groups, zero_words = tensors["qzeros"].shape
        bits = 32 * zero_words // max(1, outputs)
        inputs = 32 * words // max(1, bits)
        group = self.group_size if self.group_size > 0 else inputs
        if -(-inputs // group) != num_groups and num_groups and inputs % num_groups == 0:
            group = inputs // num_groups  # a module with its own group size
        right = (
            bits in (2, 3, 4, 8)
            and outputs * bits == 32 * zero_words
            and tensors["scales"].shape == (num_groups, outputs)
            and ("g_idx" in tensors or -(-inputs // group) == num_groups)
            and ("g_idx" not in tensors or tensors["g_idx"].shape == (inputs,))
        )
        self.check(module, tensors, right)
        names += ("g_idx",) if "g_idx" in tensors else ()
        read = partial(_read, bits, group, self.minus_one)
        return MergedWeight((outputs, inputs), names, read, f"{bits} bits, groups of {group}")


def _read(
    bits: int,
    group: int,
    minus_one: bool,
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
) -> QuantizedWeight:
    codes = unpack(qweight.T, bits)
    zeros = (unpack_minus_one if minus_one else unpack)(qzeros, bits).T.float()
    groups = contiguous_groups(codes.shape[1], group) if g_idx is None else g_idx.long()
    return QuantizedWeight(codes, scales.T.float(), zeros, groups, bits)
