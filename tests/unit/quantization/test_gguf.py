"""Blocks of GGUF files as codes: exactly what llama.cpp takes them for."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.tools.gguf_files import quantized
from tests.unit.gguf.test_model_config import LLAMA, encoded
from tests.unit.gguf.test_reader import header
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.gguf.reader import read_gguf
from tgi_cli.gguf.tensor_types import INTEGERS, TENSOR_TYPES
from tgi_cli.kernels.linear import linear, rows, unpack
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.models.gguf_weights import gguf_tensors
from tgi_cli.quantization.gguf import LAYOUTS, read_blocks
from tgi_cli.quantization.matmul import CppMatmul, make_matmul

CPU = torch.device("cpu")
WITH_MINIMA = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
"""Whose zeros are quotients, rounded."""

GOLDEN = Path(__file__).parent / "gguf_blocks.npz"
"""Blocks that llama.cpp (0c1e570) has quantized, and what its C code makes of them."""


def kind_of(name: str) -> object:
    return next(kind for kind in TENSOR_TYPES.values() if kind.name == name)


def numbers(outputs: int, inputs: int) -> np.ndarray:
    """With groups of zeros, and of one number."""
    rng = np.random.default_rng(0)
    found = rng.standard_normal((outputs, inputs)) * np.exp(rng.standard_normal((outputs, 1)))
    found[1, 32:80] = 0
    found[2, :256] = 0.25
    found[3] = 0
    return found.astype(np.float32)


@pytest.mark.parametrize("name", LAYOUTS)
def test_values(name: str) -> None:
    shape = (40, 512)
    data, wanted = quantized(numbers(*shape), name, np.random.default_rng(1))
    weight = read_blocks(kind_of(name), shape, torch.from_numpy(data.reshape(-1)))
    assert weight.shape == shape
    assert int(weight.codes.max()) < 2**weight.bits
    found = weight.dequantize(torch.float32).numpy()
    tolerance = 1e-6 * np.abs(wanted).max() if name in WITH_MINIMA else 0
    np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_products_and_rows_of_codes(name: str) -> None:
    """By the kernels of the CPU, whose panels keep the codes."""
    shape = (72, 512)
    data, wanted = quantized(numbers(*shape), name, np.random.default_rng(1))
    weight = read_blocks(kind_of(name), shape, torch.from_numpy(data.reshape(-1)))
    matmul = make_matmul(weight, torch.bfloat16, CPU)
    assert isinstance(matmul, CppMatmul), matmul
    matrix = matmul.matrix
    assert isinstance(matrix, PackedMatrix)
    assert matrix.bits == max(weight.bits, 4)
    values = torch.from_numpy(wanted)
    tolerance = 1e-6 * float(values.abs().max())
    torch.testing.assert_close(unpack(matrix), values, atol=tolerance, rtol=0)
    ids = torch.tensor([71, 0, 5, 33, 5])
    # A number half between two of bfloat16's may be rounded to either.
    torch.testing.assert_close(rows(matrix, ids).float(), values[ids], atol=tolerance, rtol=2**-8)
    for count in (1, 3, 20, 150):
        x = torch.randn(count, shape[1], generator=torch.Generator().manual_seed(count))
        x = x.bfloat16()
        product = linear(x, matrix).float()
        expected = x.float() @ values.T
        assert (product - expected).norm() < 0.005 * expected.norm()


def test_golden_blocks() -> None:
    golden = np.load(GOLDEN)
    names = {key.removesuffix(".blocks") for key in golden if key.endswith(".blocks")}
    assert names == LAYOUTS.keys()
    for name in names:
        wanted = golden[f"{name}.values"]
        data = torch.from_numpy(golden[f"{name}.blocks"].reshape(-1))
        weight = read_blocks(kind_of(name), wanted.shape, data)
        found = weight.dequantize(torch.float32).numpy()
        tolerance = 1e-6 * np.abs(wanted).max() if name in WITH_MINIMA else 0
        np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=0, err_msg=name)


NOT_SERVED = sorted(
    number
    for number, kind in TENSOR_TYPES.items()
    if kind.name.startswith("IQ") and kind.name not in LAYOUTS
)
"""Types whose codes stand for vectors."""


@pytest.mark.parametrize("number", NOT_SERVED)
def test_codebooks_are_refused_by_name(number: int, tmp_path: Path) -> None:
    kind = TENSOR_TYPES[number]
    keys = [encoded("general.architecture", "llama")]
    keys += [encoded(f"llama.{name}", value) for name, value in LLAMA.items()]
    tensors = [("token_embd.weight", (256, 2), number, 0)]
    path = tmp_path / "model.gguf"
    path.write_bytes(header(keys, tensors, data=2 * kind.size))
    why = rf"token_embd\.weight is {kind.name} \[2, 256\], which is not supported"
    with pytest.raises(UnsupportedModelError, match=why) as caught:
        gguf_tensors(read_gguf(path))
    assert "Q4_K" in caught.value.remedy


def test_every_codebook_is_known() -> None:
    names = {TENSOR_TYPES[number].name for number in NOT_SERVED}
    assert names == {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"}
    assert LAYOUTS.keys() > INTEGERS


def test_every_type_that_has_codes_is_known_to_the_gguf_package() -> None:
    assert LAYOUTS.keys() <= gguf.GGMLQuantizationType.__members__.keys()
