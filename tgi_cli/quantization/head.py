"""The output head in integers of 8 bits, whatever the other weights are in."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tgi_cli.quantization import integer
from tgi_cli.quantization.base import LinearWeights
from tgi_cli.quantization.quantized import Quantized
from tgi_cli.quantization.quantized_weight import QuantizedWeight


class QuantizedHead(Quantized):
    """What ``--quantize-head`` makes of the head: 8 bits with a scale per output.

    A head that the checkpoint has in codes stays in them.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.is_stored = False
        """Whether the checkpoint has it in codes."""

    def fill(self, layer: LinearWeights, place: slice, weight: Tensor | QuantizedWeight) -> None:
        if isinstance(weight, QuantizedWeight):
            self.is_stored = True
        else:  # in one step, without a plain copy of what may be the largest weight of all
            weight = integer.quantize(weight)
        super().fill(layer, place, weight)

    def report(self) -> Iterator[str]:
        what = "the output head is in integers of 8 bits (--quantize-head)"
        if self.is_stored:
            what = "--quantize-head changes nothing: the checkpoint has a quantized output head"
        for kernel in self.kernels:
            yield f"{what}, computed with by {kernel}"
        for reason in self.dequantized:
            kept = str(self.dtype).removeprefix("torch.")
            yield f"{what}, kept in {kept}, which saves nothing: {reason}"
