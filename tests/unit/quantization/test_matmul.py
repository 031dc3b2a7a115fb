"""What multiplies by quantized weights, against products with what they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tgi_cli.device.distributed import ALONE
from tgi_cli.kernels import build, cpp_library, without_cpp_kernels
from tgi_cli.kernels.linear import unpack
from tgi_cli.layers import Build, ColumnParallelLinear, Projection
from tgi_cli.quantization import Quantized, bitsandbytes, fp8, unquantized
from tgi_cli.quantization.matmul import (
    ConcatMatmul,
    CppMatmul,
    TorchInt4Matmul,
    bfloat16_table,
    make_matmul,
)
from tgi_cli.quantization.quantized_weight import (
    QuantizedWeight,
    concat_outputs,
    contiguous_groups,
    group_inputs,
    quantize_int8,
)
from tgi_cli.quantization.scaled_matmul import ScaledMatmul, can_scale, quantize_rows

CPU = torch.device("cpu")


@pytest.fixture(params=["ours", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Whose kernels compute."""
    if request.param == "torch":
        with without_cpp_kernels():
            yield "torch"
        return
    if not build.supported() or build.compiler() is None:
        pytest.skip("there is no C++ compiler here")
    assert cpp_library() is not None, "python -m tgi_cli.kernels, after a change of their sources"
    yield "our"


def random_codes(
    outputs: int,
    inputs: int,
    bits: int = 4,
    group: int = 32,
    *,
    zeros: bool = False,
    mixed: bool = False,
    seed: int = 0,
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    groups = contiguous_groups(inputs, group)
    if mixed:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
    count = int(groups.max()) + 1
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scales = torch.rand(outputs, count, generator=generator) / 2**bits
    points = torch.randint(0, 2**bits, (outputs, count), generator=generator).float()
    return QuantizedWeight(codes, scales, points if zeros else None, groups, bits)


def near(product: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, bits: int = 8) -> bool:
    """Whether a product is right up to rounding weights, and itself, to ``bits`` bits."""
    exact = x.double() @ weight.double().T
    limit = (x.double().abs() @ weight.double().abs().T) * 2.0**-bits
    if bias is not None:
        exact, limit = exact + bias.double(), limit + bias.double().abs() * 2.0**-bits
    return bool(((product.double() - exact).abs() <= limit + 2.0**-8 * exact.abs() + 1e-6).all())


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize(
    ("bits", "group", "zeros", "mixed"),
    [
        (4, 32, False, False),
        (4, 64, True, False),
        (4, 128, True, True),
        (4, 512, True, False),
        (3, 32, False, True),
        (2, 64, True, False),
        (8, 512, False, False),
        (8, 512, False, True),
    ],
)
def test_products_equal_those_of_the_dequantized_weight(
    bits: int, group: int, zeros: bool, mixed: bool, rows: int, kernels: str
) -> None:
    weight = random_codes(64, 512, bits, group, zeros=zeros, mixed=mixed)
    product = make_matmul(weight, torch.bfloat16, CPU)
    assert not isinstance(product, str)
    assert product.kernel.startswith(kernels)
    x, bias = torch.randn(rows, 512).bfloat16(), torch.randn(64).bfloat16()
    dense = weight.dequantize(torch.float32)
    # torch rounds scales and, apart from them, what zero points make of them.
    accuracy = 7 if zeros and kernels == "torch" else 8
    assert near(product(x, None), x, dense, None, accuracy)
    assert near(product(x, bias), x, dense, bias, accuracy)
    assert product.nbytes < 64 * 512 * (1.2 if bits == 8 else 0.95)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_with_a_table(kind: str, rows: int) -> None:
    if cpp_library() is None:
        pytest.skip("there is no C++ compiler here")
    plain = torch.randn(48, 320, generator=torch.Generator().manual_seed(2))
    weight = bitsandbytes.quantize(kind, plain)
    product = make_matmul(weight, torch.bfloat16, CPU)
    assert isinstance(product, CppMatmul)
    dense = weight.dequantize(torch.float32)
    kept = unpack(product.matrix)
    # Nearer than bfloat16 is to what it rounds, and fp4 the same but for its scales' last bits.
    rounding = (dense.bfloat16().float() - dense).norm()
    assert (kept - dense).norm() < rounding * (0.7 if kind == "nf4" else 1e-3)
    x, bias = torch.randn(rows, 320).bfloat16(), torch.randn(48).bfloat16()
    assert near(product(x, None), x, dense, None)
    assert near(product(x, bias), x, kept, bias, bits=12)
    assert product.nbytes < 48 * 320 * 0.8  # outputs are filled up to 64


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_in_e4m3(rows: int) -> None:
    if cpp_library() is None:
        pytest.skip("there is no C++ compiler here")
    weight = fp8.quantize(torch.randn(48, 320, generator=torch.Generator().manual_seed(2)))
    product = make_matmul(weight, torch.bfloat16, CPU)
    assert isinstance(product, CppMatmul)
    assert product.kernel == "our kernels for fp8"
    dense = weight.dequantize(torch.float32)
    assert torch.equal(unpack(product.matrix), dense)
    x, bias = torch.randn(rows, 320).bfloat16(), torch.randn(48).bfloat16()
    assert near(product(x, bias), x, dense, bias, bits=12)
    weight.codes[3, 5] = 0x7F
    none = make_matmul(weight, torch.bfloat16, CPU)
    assert none == "there is no kernel for this format"
    e5m2 = QuantizedWeight(
        weight.codes, weight.scales, None, weight.groups, 8, fp8.table(torch.float8_e5m2)
    )
    assert make_matmul(e5m2, torch.bfloat16, CPU) == none


def test_a_table_is_scaled_for_the_least_rounding_error() -> None:
    for values in bitsandbytes.TABLES.values():
        table = torch.tensor(values)
        rounded, factor = bfloat16_table(table)
        error = (rounded.float() / factor - table).square().sum()
        assert error <= 0.5 * (table.bfloat16().float() - table).square().sum()
    with without_cpp_kernels():
        product = make_matmul(bitsandbytes.quantize("nf4", torch.ones(8, 64)), torch.bfloat16, CPU)
    assert product == "there is no kernel for this format"


def test_groups_of_8_bit_codes_are_dequantized_where_only_torch_computes() -> None:
    weight = random_codes(48, 512, 8, 64)
    with without_cpp_kernels():
        assert make_matmul(weight, torch.bfloat16, CPU) == (
            "there is no kernel for groups of 8-bit codes"
        )


def test_a_missing_torch_kernel_is_a_reason_to_dequantize(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> Tensor:
        raise NotImplementedError("no such kernel\nand much more")

    monkeypatch.setattr(TorchInt4Matmul, "__call__", absent)
    with without_cpp_kernels():
        product = make_matmul(random_codes(48, 64), torch.bfloat16, CPU)
    assert product == "torch's kernel fails (no such kernel)"


def test_padding_outputs_are_0() -> None:
    weight = random_codes(10, 64, zeros=True)
    dense = weight.padded(16).dequantize(torch.float32)
    assert torch.equal(dense[:10], weight.dequantize(torch.float32))
    assert not dense[10:].any()


@pytest.mark.parametrize(
    ("weight", "dtype", "why"),
    [
        (random_codes(32, 64, 4, 16), torch.bfloat16, "groups of 16"),
        (random_codes(24, 64, 4, 32), torch.bfloat16, "24 outputs"),
        (random_codes(32, 64, 4, 32), torch.float32, "for bfloat16, not float32"),
    ],
)
def test_weights_without_a_kernel_have_a_reason(
    weight: QuantizedWeight, dtype: torch.dtype, why: str
) -> None:
    with without_cpp_kernels():
        product = make_matmul(weight, dtype, CPU)
    assert isinstance(product, str)
    assert why in product


@pytest.mark.parametrize(("start", "end"), [(0, 96), (96, 192), (160, 320), (32, 64)])
def test_groups_of_a_shard_are_split(start: int, end: int) -> None:
    weight = random_codes(16, 320, group=128, zeros=True)
    whole = weight.dequantize(torch.float32)
    own = weight[:, start:end]
    assert torch.equal(own.dequantize(torch.float32), whole[:, start:end])
    arranged = group_inputs(own)
    assert arranged.order is None
    assert (end - start) % arranged.group == 0
    assert arranged.group >= 32
    assert arranged.zeros is not None
    values = (arranged.codes.view(16, -1, arranged.group) - arranged.zeros[..., None]).float()
    assert torch.equal((values * arranged.scales[..., None]).flatten(1), whole[:, start:end])


def test_inputs_are_sorted_by_group() -> None:
    weight = random_codes(16, 256, group=64, mixed=True)
    arranged = group_inputs(weight)
    assert arranged.group == 64
    assert arranged.order is not None
    assert arranged.order.sort().values.tolist() == list(range(256))
    values = (arranged.codes.view(16, -1, 64).float() - 8) * arranged.scales[..., None]
    assert torch.equal(values.flatten(1), weight.dequantize(torch.float32)[:, arranged.order])


def test_parts_with_zeros_and_without_are_one_weight() -> None:
    parts = [random_codes(8, 64, zeros=True), random_codes(16, 64, zeros=False, seed=3)]
    assert parts[0].is_like(parts[1])
    assert not parts[0].is_like(random_codes(8, 64, mixed=True))
    assert not parts[0].is_like(random_codes(8, 64, bits=8))
    dense = torch.cat([part.dequantize(torch.float32) for part in parts])
    assert torch.equal(concat_outputs(parts).dequantize(torch.float32), dense)


def filled(
    method: Quantized, parts: dict[str, Tensor | QuantizedWeight], inputs: int
) -> ColumnParallelLinear:
    """A merged layer whose parts are given, as a loader fills it."""
    sizes = {name: Projection(weight.shape[0]) for name, weight in parts.items()}
    build = Build(torch.bfloat16, method, ALONE)
    layer = ColumnParallelLinear(build, inputs, sizes, bias=True)
    layer.materialize(CPU)
    for slot in layer.slots("a.merged"):
        _, name, kind = slot.name.split(".")
        slot.fill(parts[name] if kind == "weight" else torch.full(slot.shape, 0.5))
    layer.finish()
    return layer


@pytest.mark.parametrize("how", ["alike", "apart", "one plain", "all plain"])
def test_merged_parts(how: str, kernels: str) -> None:
    plain = torch.randn(32, 128).bfloat16()
    parts: dict[str, Tensor | QuantizedWeight] = {
        "q": random_codes(64, 128, zeros=True),
        "k": random_codes(32, 128, seed=2, mixed=how == "apart"),
        "v": plain if how == "one plain" else random_codes(32, 128, seed=3),
    }
    if how == "all plain":
        parts = {name: torch.randn(weight.shape).bfloat16() for name, weight in parts.items()}
    method = Quantized(torch.bfloat16, CPU)
    layer = filled(method, parts, 128)
    dense = torch.cat(
        [
            weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
            for weight in parts.values()
        ]
    )
    x = torch.randn(5, 128).bfloat16()
    assert near(layer(x), x, dense, torch.full((128,), 0.5))
    products = {"alike": 1, "apart": 3, "one plain": 1, "all plain": 0}[how]
    assert sum(method.kernels.values()) == products
    assert isinstance(layer.packed, ConcatMatmul) == (how in ("apart", "one plain"))


def test_a_plain_part_that_no_kernel_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(unquantized, "ONEDNN_DTYPES", frozenset())
    parts = {"q": random_codes(64, 128), "v": torch.randn(32, 128).bfloat16()}
    with without_cpp_kernels():
        layer = filled(Quantized(torch.bfloat16, CPU), parts, 128)
        x = torch.randn(5, 128).bfloat16()
        product = layer(x)
    dense = torch.cat([parts["q"].dequantize(torch.float32), parts["v"]])
    assert near(product, x, dense, torch.full((96,), 0.5))


def test_plain_weights_are_quantized_as_they_come(kernels: str) -> None:
    parts: dict[str, Tensor | QuantizedWeight] = {
        "a": torch.randn(64, 128),
        "b": torch.randn(32, 128),
    }
    layer = filled(Quantized(torch.bfloat16, CPU, quantize_int8), parts, 128)
    x = torch.randn(5, 128).bfloat16()
    dense = torch.cat([part for part in parts.values() if isinstance(part, Tensor)]).bfloat16()
    codes = quantize_int8(dense)
    assert (codes.dequantize(torch.float32) - dense.float()).abs().max() < dense.abs().max() / 250
    assert near(layer(x), x, codes.dequantize(torch.float32), torch.full((96,), 0.5))
    assert layer.weight is None


def test_weights_are_dequantized_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the host, whose cores take seconds for what a GPU takes milliseconds for."""
    made: list[Tensor] = []
    dequantize = QuantizedWeight.dequantize

    def noted(*given: Any) -> Tensor:
        made.append(dequantize(*given))
        return made[-1]

    monkeypatch.setattr(QuantizedWeight, "dequantize", noted)
    parts = {
        "q": random_codes(64, 128, zeros=True),
        "k": torch.randn(32, 128),
        "v": random_codes(32, 128, mixed=True),
    }
    device = torch.device("meta")
    layer = filled(Quantized(torch.float32, device), parts, 128)
    assert [(each.shape, each.device) for each in made] == [
        ((64, 128), device),
        ((32, 128), device),
    ]
    assert layer.weight is not None
    assert (layer.weight.shape, layer.weight.device) == ((128, 128), device)


def test_dequantized_weights_are_reported_once_per_reason() -> None:
    method = Quantized(torch.float32, CPU)
    layer = filled(method, {"a": random_codes(32, 64)}, 64)
    assert isinstance(layer.bias, nn.Parameter)
    assert list(method.report()) == [
        "1 quantized weights are dequantized to float32: "
        "there are kernels for bfloat16, not float32"
    ]


@pytest.mark.parametrize("rows", [1, 5])
def test_torchs_product_of_e4m3_with_e4m3(rows: int) -> None:
    """On a CPU, which has torch's reference of what CUDA computes."""
    weight = fp8.quantize(torch.randn(48, 320, generator=torch.Generator().manual_seed(2)))
    assert weight.fp8_inputs
    assert can_scale(weight)
    x, bias = (torch.randn(rows, 320) * 30).bfloat16(), torch.randn(48).bfloat16()
    codes, scales = quantize_rows(x)
    rounded = codes.float() * scales
    assert (rounded - x.float()).norm() < 0.04 * x.float().norm()
    product = ScaledMatmul(weight, CPU)
    dense = weight.dequantize(torch.float32)
    assert near(product(x, None), rounded, dense, None)
    assert near(product(x, bias), rounded, dense, bias)
    assert product.nbytes == 48 * 320 + 4 * 48


def test_only_e4m3_with_a_scale_per_output_is_torchs() -> None:
    weight = fp8.quantize(torch.randn(48, 320))
    assert not can_scale(weight[:40])
    assert not can_scale(random_codes(48, 320, 8, 320))
    blocks = replace(weight, scales=weight.scales.expand(48, 10).contiguous())
    assert not can_scale(blocks)


def test_experts_on_a_gpu_are_made_for_stacks_unless_their_inputs_are_reordered() -> None:
    made = []

    def make(weight: QuantizedWeight, dtype: torch.dtype, *rest: object) -> str:
        made.append((weight.bits, *rest))
        return "it is not there"

    gpu = torch.device("meta")
    method = Quantized(torch.bfloat16, gpu)
    experts = method.experts
    build = Build(torch.bfloat16, experts)
    with patch("tgi_cli.quantization.quantized.make_cuda_matmul", make):
        for weight in (random_codes(64, 512, 3, 128), random_codes(64, 512, 4, 128, mixed=True)):
            layer = ColumnParallelLinear(build, 512, {"": Projection(64)}, bias=False)
            experts.fill(layer, slice(0, 64), weight)
            experts.process_after_loading(layer)
            assert layer.weight is not None
    assert made == [(4, gpu, True)]
    assert sorted(method.report()) == [
        "1 quantized weights are dequantized to bfloat16: "
        "experts have no kernel for an activation order",
        "1 quantized weights are dequantized to bfloat16: it is not there",
    ]
