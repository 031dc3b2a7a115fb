"""Plain weights to 8-bit integers with a scale per output (https://arxiv.org/abs/2208.07339)."""

from __future__ import annotations

import torch
from torch import Tensor

from tgi_cli.quantization.quantized_weight import QuantizedWeight

_NUMBERS = 1 << 20
"""That are rounded at a time: 4 MiB of float32."""


def quantize(weight: Tensor) -> QuantizedWeight:
    """Round to whole 127ths of an output's largest element: what EETQ and bitsandbytes do, too.

    A few outputs at a time: in float32 a large vocabulary's head takes a gigabyte.
    """
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outputs, 1, dtype=torch.float32, device=weight.device)
    step = max(1, _NUMBERS // max(1, inputs))
    for start in range(0, outputs, step):
        place = slice(start, start + step)
        part = weight[place].to(torch.float32, copy=True)
        scales[place] = part.abs().amax(1, keepdim=True).div_(127).clamp_(min=1e-12)
        codes[place] = part.div_(scales[place]).round_().add_(128)
    return QuantizedWeight(codes, scales, None, torch.zeros(inputs, dtype=torch.int64), 8)
