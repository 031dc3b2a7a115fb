"""MXFP4 against transformers' reading of it."""

from __future__ import annotations

import pytest
import torch

from tgi_cli.quantization.mxfp4 import dequantize


@pytest.mark.tgi_pain(12)
def test_every_byte_and_exponent() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 5, 4, 16), generator=generator, dtype=torch.uint8)
    blocks.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    # Beyond 251 products leave bfloat16's range; 255 is the format's "not a number".
    scales = torch.randint(0, 252, (3, 5, 4), generator=generator, dtype=torch.uint8)
    scales.view(-1)[:3] = torch.tensor([0, 127, 251], dtype=torch.uint8)
    wanted = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert torch.equal(dequantize(blocks, scales), wanted)


def test_values_equal_hand_computed_ones() -> None:
    block = torch.zeros(1, 16, dtype=torch.uint8)
    block[0, :3] = torch.tensor([0x21, 0xF7, 0x9A])
    values = dequantize(block, torch.tensor([128], dtype=torch.uint8))
    assert values[:6].tolist() == [1.0, 2.0, 12.0, -12.0, -2.0, -1.0]
    assert values[6:].tolist() == [0.0] * 26


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shape_and_dtype(device: str) -> None:
    blocks = torch.empty(7, 2, 3, 16, dtype=torch.uint8, device=device)
    values = dequantize(blocks, torch.empty(7, 2, 3, dtype=torch.uint8, device=device))
    assert values.shape == (7, 2, 96)
    assert values.dtype == torch.bfloat16
