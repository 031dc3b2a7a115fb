"""Products with quantized weights on CUDA: our Triton kernel, and torch's for fp8 activations.

Neither has been measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from tgi_cli.kernels import custom_kernels_enabled
from tgi_cli.quantization import split_inputs
from tgi_cli.quantization.base import QuantizedMatmul
from tgi_cli.quantization.quantized_weight import QuantizedWeight, group_inputs
from tgi_cli.quantization.scaled_matmul import ScaledMatmul, can_scale, has_fp8
from tgi_cli.quantization.tiled_weight import E4M3, TiledWeight, tile_weight

DTYPES = (torch.bfloat16, torch.float16)
"""dtypes of activations that have kernels."""


class TritonMatmul(QuantizedMatmul):
    """Our Triton kernel for 4 and 8 bits."""

    def __init__(self, weight: TiledWeight, order: Tensor | None = None) -> None:
        self.weight = weight
        self.order = order
        form = "fp8" if weight.form == E4M3 else f"{weight.bits} bits"
        inputs = ", of activations in fp8" if weight.fp8_inputs else ""
        self.kernel = f"our Triton kernel for {form}{inputs}"

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        from tgi_cli.quantization.triton_product import triton_product

        if self.order is not None:
            x = x.index_select(1, self.order)
        return triton_product(x, self.weight, bias)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [*self.weight.tensors, *([] if self.order is None else [self.order])]


def make_cuda_matmul(
    weight: QuantizedWeight, dtype: torch.dtype, device: torch.device, stacked: bool = False
) -> QuantizedMatmul | str:
    """Prepare ``weight``, of 4 or 8 bits, or return the reason why there is no kernel for it.

    ``stacked``: it will be part of a stack, for which there is our kernel alone.
    """
    if dtype not in DTYPES:
        return (
            f"there are kernels for bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
        )
    if not custom_kernels_enabled():
        return "custom kernels are turned off"
    fp8_inputs = weight.fp8_inputs and has_fp8(device)
    if fp8_inputs and dtype == torch.bfloat16 and can_scale(weight) and not stacked:
        scaled = _try_kernel(lambda: ScaledMatmul(weight, device), weight, dtype, device)
        if not isinstance(scaled, str):
            return scaled
    if (reason := triton_missing()) is not None:
        return reason
    arranged = group_inputs(weight)
    tiled = tile_weight(arranged, weight.bits, device, fp8_inputs)
    if isinstance(tiled, str):
        return tiled
    split_inputs.counters(device)  # not in a CUDA graph
    order = None if arranged.order is None else arranged.order.to(device)
    return _try_kernel(lambda: TritonMatmul(tiled, order), weight, dtype, device)


@cache
def triton_missing() -> str | None:
    """Why Triton cannot be imported, or None."""
    try:
        from tgi_cli.quantization import triton_product  # noqa: F401
    except ImportError as error:
        return f"there is no Triton ({error})"
    return None


def _try_kernel(
    make: Callable[[], QuantizedMatmul],
    weight: QuantizedWeight,
    dtype: torch.dtype,
    device: torch.device,
) -> QuantizedMatmul | str:
    """Run a kernel once: not every build and device has it."""
    try:
        product = make()
        product(torch.zeros(1, weight.shape[1], dtype=dtype, device=device), None)
    # Triton compiles here, and what can be missing for that has error classes of its own.
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return f"its kernel fails ({str(error).partition(chr(10))[0]})"
    return product
