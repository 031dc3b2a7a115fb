"""Scales per tensor, output, group or block, as one per output and group."""

from __future__ import annotations

import torch
from torch import Tensor

from tgi_cli.quantization.quantized_weight import contiguous_groups


def spread(
    scales: Tensor, shape: tuple[int, int], block: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """float32 [out, groups] and the inputs' groups, int64 [in], of a weight of ``shape``.

    Args:
        scales: of one element; of one per output ([out] or [out, 1]); [out, groups]; or, with a
            ``block`` of outputs and inputs, one per block.
    """
    outputs, inputs = shape
    scales = scales.float()
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(outputs, 1).contiguous(), torch.zeros(inputs).long()
    if scales.ndim == 1:
        scales = scales[:, None]
    if scales.shape[0] != outputs:
        assert block is not None
        scales = scales.repeat_interleave(block[0], 0)[:outputs]
    size = -(-inputs // scales.shape[1]) if block is None else block[1]
    return scales, contiguous_groups(inputs, size)


def spreads(
    scales: tuple[int, ...], shape: tuple[int, int], block: tuple[int, int] | None = None
) -> bool:
    """Whether :func:`spread` takes scales of such a shape."""
    outputs, inputs = shape
    if scales in ((), (1,), (1, 1), (outputs,), (outputs, 1)):
        return True
    if len(scales) != 2:
        return False
    if block is None:
        return scales[0] == outputs and scales[1] > 0 and inputs % scales[1] == 0
    return scales == (-(-outputs // block[0]), -(-inputs // block[1])) or (
        scales == (outputs, -(-inputs // block[1]))
    )
