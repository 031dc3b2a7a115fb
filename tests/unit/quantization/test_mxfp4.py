"""MXFP4 against transformers' reading of it."""

from __future__ import annotations

import pytest
import torch

from tgi_cli.quantization import mxfp4


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
    for block, scale, dense in zip(blocks, scales, wanted, strict=True):
        assert torch.equal(mxfp4.read(block, scale).dequantize(torch.bfloat16), dense)


def test_values_equal_hand_computed_ones() -> None:
    block = torch.zeros(1, 1, 16, dtype=torch.uint8)
    block[0, 0, :3] = torch.tensor([0x21, 0xF7, 0x9A])
    weight = mxfp4.read(block, torch.tensor([[128]], dtype=torch.uint8))
    (values,) = weight.dequantize(torch.bfloat16)
    assert values[:6].tolist() == [1.0, 2.0, 12.0, -12.0, -2.0, -1.0]
    assert values[6:].tolist() == [0.0] * 26
    assert weight.bits == 4


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shape(device: str) -> None:
    blocks = torch.empty(7, 3, 16, dtype=torch.uint8, device=device)
    weight = mxfp4.read(blocks, torch.empty(7, 3, dtype=torch.uint8, device=device))
    assert weight.shape == (7, 96)
