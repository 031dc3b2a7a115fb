"""bitsandbytes: 8 bits with a scale per row, or 4-bit tables with a scale per 64 elements.

https://arxiv.org/abs/2208.07339, https://arxiv.org/abs/2305.14314; the library itself is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tgi_cli.errors import CheckpointError
from tgi_cli.files import decode_json
from tgi_cli.quantization.formats import CheckpointFormat, MergedWeight, ModuleTensors, ReadTensor
from tgi_cli.quantization.quantized_weight import (
    QUANTIZED_ELEMENTS,
    QuantizedWeight,
    contiguous_groups,
)

BLOCK = 64
"""Default number of elements that share a scale."""

TABLES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": tuple(sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}
"""Values of the codes by type, relative to the block's largest element."""

_STATE = "weight.quant_state.bitsandbytes__"


class Bitsandbytes(CheckpointFormat):
    """``M.weight`` with codes, beside it its scales and, for 4 bits, a JSON object as bytes."""

    code_suffixes = ("weight",)
    required_suffixes = ("SCB", f"{_STATE}nf4", f"{_STATE}fp4")
    optional_suffixes = (
        "weight_format",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        kind = config.get("bnb_4bit_quant_type", "fp4") if config.get("load_in_4bit") else None
        self.name = "bitsandbytes" if kind is None else f"bitsandbytes-{kind}"
        self.has_integers = kind is None

    def merge(self, module: str, tensors: ModuleTensors, peek: ReadTensor) -> MergedWeight:
        if "SCB" in tensors:
            shape = tensors["weight"].shape
            right = len(shape) == 2 and tensors["weight"].dtype == "I8"
            self.check(module, tensors, right and tensors["SCB"].shape == shape[:1])
            if "weight_format" in tensors and int(peek("weight_format")) != 0:
                raise CheckpointError(
                    f"{module} is in bitsandbytes' layout for one kind of GPU",
                    "save the model again with a newer bitsandbytes",
                )
            return MergedWeight((shape[0], shape[1]), ("weight", "SCB"), _read_int8, "8 bits")
        kind = "nf4" if f"{_STATE}nf4" in tensors else "fp4"
        state = decode_json(bytes(peek(f"{_STATE}{kind}").tolist()))
        outputs, inputs = state["shape"]
        block = int(state["blocksize"])
        nested = "weight.nested_absmax" in tensors
        names = ["weight", "weight.absmax", "weight.quant_map"]
        if nested:
            names += ["weight.nested_absmax", "weight.nested_quant_map"]
        right = all(name in tensors for name in names)
        right = right and 2 * torch.Size(tensors["weight"].shape).numel() == outputs * inputs
        self.check(module, tensors, right)
        about = f"{kind}, blocks of {block}" + (", their scales in 8 bits" if nested else "")
        read = partial(_read_spanning if inputs % block else _read_4bit, state)
        return MergedWeight((outputs, inputs), tuple(names), read, about)


def _read_int8(weight: Tensor, scb: Tensor) -> QuantizedWeight:
    codes = weight.view(torch.uint8).bitwise_xor(0x80)  # plus 128
    groups = torch.zeros(weight.shape[1], dtype=torch.int64)
    return QuantizedWeight(codes, scb.float()[:, None] / 127, None, groups, 8)


def _read_4bit(
    state: Mapping[str, Any], weight: Tensor, absmax: Tensor, quant_map: Tensor, *nested: Tensor
) -> QuantizedWeight:
    outputs, inputs = state["shape"]
    scales = _scales(state, absmax, *nested).view(outputs, -1)
    groups = contiguous_groups(inputs, int(state["blocksize"]))
    codes = _nibbles(weight).view(outputs, inputs)
    return QuantizedWeight(codes, scales, None, groups, 4, quant_map.float())


def _read_spanning(
    state: Mapping[str, Any], weight: Tensor, absmax: Tensor, quant_map: Tensor, *nested: Tensor
) -> QuantizedWeight:
    """Read blocks that span rows: every element gets a scale of its own."""
    outputs, inputs = state["shape"]
    block = int(state["blocksize"])
    scales = _scales(state, absmax, *nested).repeat_interleave(block)[: outputs * inputs]
    codes = _nibbles(weight).view(outputs, inputs)
    every = torch.arange(inputs)
    return QuantizedWeight(codes, scales.view(outputs, inputs), None, every, 4, quant_map.float())


def _scales(
    state: Mapping[str, Any],
    absmax: Tensor,
    nested_absmax: Tensor | None = None,
    nested_map: Tensor | None = None,
) -> Tensor:
    """float32, one per block."""
    if nested_absmax is None or nested_map is None:
        return absmax.float()
    outer = nested_absmax.float().repeat_interleave(int(state["nested_blocksize"]))
    inner = nested_map.float().index_select(0, absmax.int())
    return inner.mul_(outer[: len(inner)]).add_(float(state["nested_offset"]))


def _nibbles(packed: Tensor) -> Tensor:
    """Split bytes into codes, upper bits first."""
    flat = packed.flatten()
    return torch.stack((flat >> 4, flat & 15), dim=-1).flatten()


def quantize(kind: str, weight: Tensor) -> QuantizedWeight:
    """Round to the nearest values of the table ``kind`` (nf4 or fp4), in blocks of 64 inputs.

    A few outputs at a time, as :func:`~tgi_cli.quantization.quantized_weight.quantize_int8` does.
    """
    (outputs, inputs), device = weight.shape, weight.device
    table = torch.tensor(TABLES[kind])
    ascending, order = table.sort()
    limits = ((ascending[1:] + ascending[:-1]) / 2).to(device)
    order = order.to(device, torch.uint8)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8, device=device)
    scales = torch.empty(outputs, -(-inputs // BLOCK), device=device)
    step = max(1, QUANTIZED_ELEMENTS // max(1, inputs))
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        part = torch.nn.functional.pad(weight[rows].float(), (0, -inputs % BLOCK))
        blocks = part.view(len(part), -1, BLOCK)
        scales[rows] = blocks.abs().amax(2).clamp_(min=1e-12)
        nearest = torch.bucketize(blocks / scales[rows, :, None], limits, out_int32=True)
        codes[rows] = order.index_select(0, nearest.flatten()).view(part.shape)[:, :inputs]
    return QuantizedWeight(codes, scales, None, contiguous_groups(inputs, BLOCK), 4, table)
