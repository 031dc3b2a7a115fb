"""Products of e4m3 weights with activations that are rounded to e4m3 as well (W8A8).

For checkpoints that ask for it, and ``--quantize fp8``, on GPUs with tensor cores for fp8. Each
row of activations gets a scale of its own (https://arxiv.org/abs/2209.05433), each output has its
weight's. Where the checkpoint has scales of activations, they are unused: those of rows are at
least as exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tgi_cli.quantization import fp8
from tgi_cli.quantization.base import QuantizedMatmul
from tgi_cli.quantization.quantized_weight import QuantizedWeight

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_CAPABILITY = (8, 9)
"""The first compute capability with tensor cores for fp8."""


class ScaledMatmul(QuantizedMatmul):
    """torch's product of e4m3 with e4m3, scaled by row and by output.

    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_mm.html, of which
    torch 2.11 has the private name only.
    """

    kernel = "torch's fp8, of activations in fp8"

    def __init__(self, weight: QuantizedWeight, device: torch.device) -> None:
        self.codes = weight.codes.to(device).view(torch.float8_e4m3fn)
        self.scales = weight.scales.T.contiguous().to(device)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        codes, scales = quantize_rows(x)
        product: Tensor = torch._scaled_mm(
            codes,
            self.codes.T,
            scale_a=scales,
            scale_b=self.scales,
            out_dtype=x.dtype,
            use_fast_accum=x.is_cuda,  # sums in float32 are twice as slow on Hopper
        )
        return product if bias is None else product.add_(bias)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self.codes, self.scales]


def has_fp8(device: torch.device) -> bool:
    """Whether a GPU multiplies e4m3 with e4m3."""
    return torch.cuda.get_device_capability(device) >= _CAPABILITY


def can_scale(weight: QuantizedWeight) -> bool:
    """Whether the weight is e4m3 with one scale per output, and of a shape that torch takes."""
    e4m3 = fp8.table(torch.float8_e4m3fn)
    return (
        weight.table is not None
        and weight.bits == 8
        and torch.equal(weight.table.nan_to_num(), e4m3.nan_to_num())
        and weight.scales.shape[1] == 1
        and all(size % 16 == 0 for size in weight.shape)
    )


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] as e4m3 [T, K] and scales float32 [T, 1] that map a row's largest to e4m3's."""
    if x.is_cuda:
        from tgi_cli.quantization.triton_quantize import quantize_rows as kernel

        return kernel(x)
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_(min=1e-12).div_(_LARGEST)
    return (wide / scales).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales
