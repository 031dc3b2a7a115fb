"""Quantizers of plain weights on other devices than the CPU: operators refuse tensors of two."""

from __future__ import annotations

import pytest
import torch

from tgi_cli.quantization.detect import quantizer_for
from tgi_cli.quantization.quantized import Quantizer
from tgi_cli.quantization.quantized_weight import quantize_int8

QUANTIZERS: dict[str, Quantizer] = {
    "int8 of a head": quantize_int8,
    **{
        name: quantizer_for(name)
        for name in ("int8", "fp8", "bitsandbytes-nf4", "bitsandbytes-fp4")
    },
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_weights_are_rounded_where_they_are(name: str) -> None:
    weight = torch.empty(6, 130, dtype=torch.bfloat16, device="meta")
    rounded = QUANTIZERS[name](weight)
    assert rounded.codes.device == rounded.scales.device == weight.device
    assert rounded.codes.shape == weight.shape
    for tensor in (rounded.groups, rounded.table):
        assert tensor is None or tensor.device.type == "cpu"


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_hosts_copy_is_the_same(name: str) -> None:
    rounded = QUANTIZERS[name](torch.randn(6, 130))
    on_host = rounded.cpu()
    assert on_host.is_like(rounded)
    assert torch.equal(on_host.codes, rounded.codes)
    assert torch.equal(on_host.scales, rounded.scales)
