"""Plain weights to 8-bit integers with a scale per output (https://arxiv.org/abs/2208.07339)."""

from __future__ import annotations

import torch
from torch import Tensor

from tgi_cli.quantization.codes import Codes


def quantize(weight: Tensor) -> Codes:
    """Round to whole 127ths of an output's largest element: what EETQ and bitsandbytes do, too."""
    weight = weight.float()
    scales = weight.abs().amax(1, keepdim=True).div_(127).clamp_(min=1e-12)
    codes = weight.div_(scales).round_().add_(128).to(torch.uint8)
    return Codes(codes, scales, None, torch.zeros(weight.shape[1], dtype=torch.int64), 8)
