"""Products with the blocks of GGUF's types, whose scales are float16 or in two levels."""

from __future__ import annotations

import pytest
import torch

from tgi_cli.gguf.tensor_types import TENSOR_TYPES
from tgi_cli.kernels.linear import Epilogue, linear, multiplies_bytes, quantize_inputs, unpack
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.quantization.block_weight import BlockWeight

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


def pack(name: str, outputs: int, inputs: int) -> PackedMatrix:
    """Random blocks, whose scales are finite as no byte is above 63."""
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    generator = torch.Generator().manual_seed(1)
    row = inputs // kind.elements * kind.size
    blocks = torch.randint(0, 64, (outputs, row), generator=generator, dtype=torch.uint8)
    return BlockWeight(kind, (blocks,)).pack(paired=False)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_rows_are_the_weights_whatever_is_beside_them(level: str, name: str, rounded: bool) -> None:
    for outputs, inputs in [(70, 512), (40, 4608)]:
        matrix = pack(name, outputs, inputs)
        if rounded and quantize_inputs(matrix) != (multiplies_bytes() and "IQ" not in name):
            pytest.fail("types of integers alone take rounded rows")
        weight = unpack(matrix)
        x = torch.randn(130, inputs, generator=torch.Generator().manual_seed(2)).bfloat16()
        whole = linear(x, matrix, epilogue=Epilogue.FLOAT)
        wanted = x.float() @ weight.T
        largest = (x.float().abs() @ weight.abs().T).max()
        error = (whole - wanted).abs().max() / largest
        assert error < (0.01 if rounded else 0.003)
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 25, 97):
            some = linear(x[:count], matrix, epilogue=Epilogue.FLOAT)
            assert torch.equal(some, whole[:count]), count
