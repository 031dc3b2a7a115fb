"""Triton's products of dense weights with few rows. See test_triton_dense.py.

On a machine with CUDA it may be run as it stands, and then tests what the compiler made, and
kernels that begin before the one before them has ended.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from tests.tools.triton_interpreter import dot
from tgi_cli.device.dependent_launch import has_dependent_launch
from tgi_cli.layers import Build, ColumnParallelLinear, Projection, triton_ops
from tgi_cli.quantization import Unquantized, triton_dense
from tgi_cli.quantization.few_rows import MAX_CLASS, FewRows, rows_class
from tgi_cli.quantization.split_inputs import counters
from tgi_cli.quantization.triton_dense import few_rows_product, num_splits

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ROWS = [1, 2, 15, 16, 17, 32, 33, 63, 64]
SHAPES = [(64, 128), (72, 520), (200, 2048), (1, 136), (130, 1160)]
"""Outputs and inputs, of which tiles and blocks are no divisors in some, and which several programs
share in some."""


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def test_shapes_are_split_and_not() -> None:
    assert {num_splits(*shape) > 1 for shape in SHAPES} == {True, False}
    assert num_splits(4096, 4096) == 4
    assert num_splits(28672, 4096) == 1
    assert num_splits(128256, 4096) == 1
    assert num_splits(1 << 20, 1 << 14) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_right(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = random(*shape, dtype=dtype)
    bias = random(shape[0], dtype=dtype)
    for rows in ROWS:
        x = random(rows, shape[1] + 8, dtype=dtype)[:, :-8]  # rows that are apart
        exact = x.double() @ weight.double().T
        for added in (None, bias):
            wanted = exact if added is None else exact + added.double()
            product = few_rows_product(x, weight, added)
            assert (product.dtype, product.shape) == (dtype, wanted.shape)
            limit = torch.finfo(dtype).eps * wanted.abs() + 1e-6 * shape[1]
            assert ((product.double() - wanted).abs() <= limit).all()
            assert not counters(x.device).any(), "the next product would add up too early"


def test_all_classes_of_rows_are_taken() -> None:
    assert rows_class(triton_dense.MAX_ROWS) == MAX_CLASS
    assert rows_class(triton_dense.MAX_ROWS + 1) > MAX_CLASS


def test_no_rows() -> None:
    assert few_rows_product(random(0, 128), random(64, 128), None).shape == (0, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """With float32, of which no rounding hides the order of the sums."""
    weight, bias = random(*shape, dtype=dtype), random(shape[0], dtype=dtype)
    x = random(64, shape[1], dtype=dtype)
    whole = few_rows_product(x, weight, bias)
    for rows in ROWS:
        assert few_rows_product(x[:rows], weight, bias).equal(whole[:rows])
        assert few_rows_product(x[-rows:], weight, bias).equal(whole[-rows:])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert few_rows_product(x[order], weight, bias).equal(whole[order])


def test_a_layer_multiplies_the_rows_that_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ColumnParallelLinear(
        Build(torch.float16, Unquantized()), 136, {"": Projection(72)}, bias=True
    )
    layer.materialize(DEVICE)
    weight, bias = random(72, 136), random(72)
    for slot in layer.slots("proj"):
        slot.fill(bias if slot.name.endswith("bias") else weight)
    layer.finish()
    calls: list[tuple[int, bool]] = []

    def multiply(x: Tensor, *given: Any) -> Tensor:
        calls.append((len(x), given[-1]))
        return few_rows_product(x, *given[:-1])

    monkeypatch.setattr(triton_dense, "few_rows_product", multiply)
    for chosen in (None, FewRows({0: False, 3: True, 4: False})):
        layer.few_rows = chosen
        for rows in (0, 1, 2, 4, 5, 8, 9, 16, 17, 64, 65, 200):
            x = random(rows, 136)
            wanted = (x.double() @ weight.double().T + bias.double()).half()
            torch.testing.assert_close(layer(x), wanted, atol=0.1, rtol=2e-3)
    assert calls == [(1, False), (5, True), (8, True), (9, False), (16, False)]


@pytest.mark.skipif(
    INTERPRETED or not has_dependent_launch(DEVICE),
    reason="no kernel begins before the one before has ended here",
)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("shape", [(4096, 4096), (6144, 1024), (512, 8192)])
def test_kernels_that_begin_early_read_what_was_written(
    shape: tuple[int, int], captured: bool
) -> None:
    """A chain in which each product's input is written by the kernel before it, at an address that
    earlier kernels of the chain have read and written."""
    outputs, inputs = shape
    weight = random(outputs, inputs, dtype=torch.bfloat16) / inputs**0.5
    gates = random(32, 16, 2 * inputs, dtype=torch.bfloat16)

    def chain(dependent: bool) -> Tensor:
        products = []
        for gate in gates:
            x = triton_ops.gated(gate, "silu")
            products.append(few_rows_product(x, weight, None, dependent))
            del x
        return torch.stack(products)

    wanted = chain(False)
    run = chain
    if captured:
        run(True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(True)
        for _ in range(10):
            got.zero_()
            graph.replay()
            assert got.equal(wanted)
    else:
        for _ in range(10):
            assert run(True).equal(wanted)
