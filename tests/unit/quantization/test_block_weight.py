"""Blocks of GGUF files that are packed as they are: the same to the bit as decoded ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tools.gguf_files import quantized
from tgi_cli.gguf.tensor_types import TENSOR_TYPES, TensorType
from tgi_cli.kernels import cpp_library, without_cpp_kernels
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.quantization.base import QuantizedMatmul
from tgi_cli.quantization.block_weight import BlockWeight, concat_blocks
from tgi_cli.quantization.gguf import LAYOUTS
from tgi_cli.quantization.matmul import CppMatmul, make_matmul
from tgi_cli.quantization.quantized_weight import QuantizedWeight

CPU = torch.device("cpu")
INPUTS = 768
"""Three blocks of 256, and no multiple of the inputs that are packed at a time if they were 512."""


def kind_of(name: str) -> TensorType:
    return next(kind for kind in TENSOR_TYPES.values() if kind.name == name)


def blocks(name: str, outputs: int, inputs: int = INPUTS, seed: int = 0) -> BlockWeight:
    """Random numbers, with groups of zeros and of one number."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((outputs, inputs)).astype(np.float32)
    numbers[0, 32:80] = 0
    numbers[1, :256] = 0.25
    numbers[2] = 0
    data, _ = quantized(numbers, name, rng)
    data = np.ascontiguousarray(data).reshape(outputs, -1)
    kind = kind_of(name)
    if name in ("Q2_K", "Q4_K", "Q5_K"):  # random blocks have no groups of zeros
        data[3, : kind.size] = 0
        data[4, kind.size : kind.size + 2] = 0
    return BlockWeight(kind, (torch.from_numpy(data),))


def packed(weight: BlockWeight | QuantizedWeight, paired: bool = False) -> PackedMatrix:
    matmul = make_matmul(weight, torch.bfloat16, CPU, paired)
    assert isinstance(matmul, CppMatmul), matmul
    assert matmul.matrix_alone is matmul.matrix
    return matmul.matrix


def written(matrix: PackedMatrix) -> list[Tensor]:
    """All that is packed, but a panel without outputs behind an odd number of 4-bit ones."""
    data = matrix.data
    if matrix.bits == 4:
        chunks = -(-matrix.inputs // 8)
        data = data.view(-1, chunks, 2, 128)
        panels = matrix.scales if matrix.scales is not None else matrix.levels[0]
        data = data.transpose(1, 2).flatten(0, 1)[: panels.shape[0]]
    others = [matrix.scales, matrix.zeros, matrix.table, *matrix.levels]
    return [data, *(each for each in others if each is not None)]


def assert_same(found: PackedMatrix, wanted: PackedMatrix) -> None:
    for field in ("bits", "out", "inputs", "paired", "group"):
        assert getattr(found, field) == getattr(wanted, field), field
    for field in ("format", "paired", "outputs", "inputs", "group", "super_shift", "input_bits"):
        assert getattr(found.struct, field) == getattr(wanted.struct, field), field
    for field in ("scales", "zeros", "table", "scale_codes", "minimum_codes"):
        assert (getattr(found.struct, field) is None) == (getattr(wanted.struct, field) is None)
    for ours, theirs in zip(written(found), written(wanted), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert torch.equal(ours.view(torch.uint8), theirs.contiguous().view(torch.uint8))


@pytest.mark.skipif(cpp_library() is None, reason="there are no kernels here")
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("outputs", "paired"), [(64, False), (75, False), (40, True)])
def test_packed_like_decoded_codes(name: str, outputs: int, paired: bool) -> None:
    weight = blocks(name, outputs)
    assert weight.shape == (outputs, INPUTS)
    assert_same(packed(weight, paired), packed(weight.decode(), paired))


@pytest.mark.skipif(cpp_library() is None, reason="there are no kernels here")
@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_parts_and_rows_are_packed_without_a_copy_of_the_whole(name: str) -> None:
    parts = [blocks(name, outputs, seed=outputs) for outputs in (48, 33, 7)]
    backwards = parts[0].rows(lambda tensor: tensor.flip(0))
    sliced = parts[1][3:30]
    assert isinstance(sliced, BlockWeight)
    whole = concat_blocks([backwards, sliced, parts[2].padded(9)])
    assert whole.shape == (84, INPUTS)
    values = whole.dequantize(torch.float32)
    wanted = [parts[0].decode().dequantize(torch.float32).flip(0)]
    wanted += [parts[1].decode().dequantize(torch.float32)[3:30]]
    wanted += [parts[2].decode().dequantize(torch.float32), torch.zeros(2, INPUTS)]
    assert torch.equal(values, torch.cat(wanted))
    assert_same(packed(whole), packed(whole.decode()))


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
@pytest.mark.parametrize("columns", [slice(0, 256), slice(256, None), slice(8, 40)])
def test_inputs_of_a_shard(name: str, columns: slice) -> None:
    weight = blocks(name, 20)
    shard = weight[4:17, columns]
    assert isinstance(shard, BlockWeight) == (columns.start % 32 == 0)
    wanted = weight.dequantize(torch.float32)[4:17, columns]
    assert torch.equal(shard.dequantize(torch.float32), wanted)
    if cpp_library() is not None and columns.start % 32 == 0:
        assert isinstance(shard, BlockWeight)
        assert_same(packed(shard), packed(shard.decode()))


@pytest.mark.parametrize(
    ("name", "inputs", "kernel"),
    [("Q4_0", 32, "4 bits"), ("TQ2_0", 256, "4 bits"), ("Q8_0", 32, "8 bits")],
)
def test_a_single_group_is_decoded(name: str, inputs: int, kernel: str) -> None:
    weight = blocks(name, 16, inputs)
    assert not weight.can_be_packed()
    product = make_matmul(weight, torch.bfloat16, CPU)
    assert isinstance(product, QuantizedMatmul)
    assert kernel in product.kernel or cpp_library() is None


@pytest.mark.parametrize(
    ("dtype", "switch"), [(torch.float32, None), (torch.bfloat16, without_cpp_kernels)]
)
def test_without_our_kernels_it_is_decoded(dtype: torch.dtype, switch: Callable | None) -> None:
    weight = blocks("Q6_K", 32)
    if switch is None:
        reason = make_matmul(weight, dtype, CPU)
        assert reason == "there are kernels for bfloat16, not float32"
    else:
        with switch():
            assert make_matmul(weight, dtype, CPU) == "there is no kernel for groups of 8-bit codes"
            found = make_matmul(blocks("Q4_0", 32), dtype, CPU)
            assert isinstance(found, QuantizedMatmul)
            assert found.kernel == "torch's int4"


MEMORY = {
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q5_0": 5.5,
    "Q5_1": 6,
    "Q8_0": 8.5,
    "Q2_K": 5.25,
    "Q3_K": 4.625,
    "Q4_K": 4.75,
    "Q5_K": 5.75,
    "Q6_K": 6.625,
    "IQ4_NL": 4.5,
    "IQ4_XS": 4.375,
    "MXFP4": 5,
    "TQ1_0": 4.0625,
    "TQ2_0": 4.0625,
}
"""Bits of a weight in memory, as docs/quantization.md has them."""


@pytest.mark.skipif(cpp_library() is None, reason="there are no kernels here")
@pytest.mark.parametrize("name", LAYOUTS)
def test_memory(name: str) -> None:
    matrix = packed(blocks(name, 64, 1024))
    assert 8 * matrix.nbytes / (64 * 1024) == MEMORY[name]


def test_llama_3_1_8b_in_q4_k_m_takes_little_more_than_its_file() -> None:
    """The types are those that llama.cpp chooses: Q6_K for the head, and for values and what goes
    down in every second layer."""
    hidden, inner, kv, vocab, layers = 4096, 14336, 1024, 128256, 32
    better = layers // 2 * (hidden * kv + inner * hidden) + vocab * hidden
    every = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)
    numbers = {"Q6_K": better, "Q4_K": every + 2 * vocab * hidden - better}
    file = sum(count * kind_of(name).bits / 8 for name, count in numbers.items())
    memory = sum(count * MEMORY[name] / 8 for name, count in numbers.items())
    assert file == pytest.approx(4.912e9, rel=1e-3)
    assert memory < 1.05 * file
