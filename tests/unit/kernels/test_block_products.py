"""Products with the blocks of GGUF's types, whose scales are float16 or in two levels."""

from __future__ import annotations

import pytest
import torch

from tgi_cli.gguf.tensor_types import INTEGERS, TENSOR_TYPES
from tgi_cli.kernels import library
from tgi_cli.kernels.linear import Epilogue, linear, multiplies_bytes, quantize_inputs, unpack
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.quantization.block_weight import BlockWeight
from tgi_cli.quantization.gguf import LAYOUTS


def pack(name: str, outputs: int, inputs: int) -> PackedMatrix:
    """Random blocks, whose scales are finite as no byte is above 63."""
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == name)
    generator = torch.Generator().manual_seed(1)
    row = inputs // kind.elements * kind.size
    blocks = torch.randint(0, 64, (outputs, row), generator=generator, dtype=torch.uint8)
    return BlockWeight(kind, (blocks,)).pack(paired=False)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_the_weights_whatever_is_beside_them(level: str, name: str, rounded: bool) -> None:
    for outputs, inputs in [(70, 512), (40, 4608)]:
        matrix = pack(name, outputs, inputs)
        if rounded and quantize_inputs(matrix) != (multiplies_bytes() and name in INTEGERS):
            pytest.fail("types of integers alone take rounded rows")
        weight = unpack(matrix)
        x = torch.randn(130, inputs, generator=torch.Generator().manual_seed(2)).bfloat16()
        whole = linear(x, matrix, epilogue=Epilogue.FLOAT)
        wanted = x.float() @ weight.T
        largest = (x.float().abs() @ weight.abs().T).max()
        error = (whole - wanted).abs().max() / largest
        assert error < (0.01 if rounded else 0.003)
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 25, 97):
            some = linear(x[:count], matrix, epilogue=Epilogue.FLOAT)
            assert torch.equal(some, whole[:count]), count


@pytest.mark.parametrize("name", sorted(INTEGERS))
def test_a_rounded_row_depends_on_no_other_row(level: str, name: str) -> None:
    """Whatever numbers the others have, wherever it is, and however many threads compute."""
    outputs, inputs = 200, 1280
    matrix = pack(name, outputs, inputs)
    if quantize_inputs(matrix) != multiplies_bytes():
        pytest.fail("types of integers take rounded rows")
    generator = torch.Generator().manual_seed(3)
    kept = torch.randn(16, inputs, generator=generator).bfloat16()
    kept[1] *= torch.where(torch.arange(inputs) % 100 == 7, 1000.0, 1.0).bfloat16()
    kept[2, 64:256] = 0
    alone = torch.cat([linear(row[None], matrix, epilogue=Epilogue.FLOAT) for row in kept])
    for number in range(24):
        count = int(torch.randint(1, 110, (1,), generator=generator))
        x = torch.randn(count, inputs, generator=generator).bfloat16() * 2.0 ** (8 * number - 96)
        if number % 4 == 3:
            x[:: number % 5 + 1] = float("nan" if number % 8 == 3 else "inf")
        places = torch.randperm(count, generator=generator)[: len(kept)]
        x[places] = kept[: len(places)]
        library.set_threads(1 + number % 3)
        found = linear(x, matrix, epilogue=Epilogue.FLOAT)
        assert torch.equal(found[places], alone[: len(places)]), number


def test_types_of_integers_are_those_without_a_table() -> None:
    assert {name for name, layout in LAYOUTS.items() if layout.table is None} == INTEGERS
