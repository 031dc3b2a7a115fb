from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tgi_cli.kernels import library, without_cpp_kernels
from tgi_cli.kernels.linear import (
    ACTIVATIONS,
    Epilogue,
    linear,
    multiplies_bytes,
    pack_bf16,
    pack_codes,
    quantize_inputs,
    unpack,
)
from tgi_cli.kernels.linear import rows as rows_of
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.layers import ops

ROWS = [*range(15), 33, 100]
FORMATS = ["bf16", "8", "8/32", "8z/64", "4", "4/32", "4/96", "4z/128", "4z", "4t", "4t/64"]
FORMATS += ["5", "5/32", "5z/64", "6", "6/16", "6z/96", "5i/64", "5zi/32", "6i/32", "6zi/128"]
FORMATS += ["8f", "8f/128", "8i", "8zi/96", "4i", "4i/32", "4zi/128"]
"""Bits; "z" with zero points, "t" with a table, "f" for e4m3, "i" with inputs rounded to 8 bits;
and the number of inputs that share a scale."""


def numbers(*shape: int, seed: int = 0, largest: int = 3) -> Tensor:
    """Small integers: every order of adding their products up gives the same sum."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator).bfloat16()


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def inputs_of(how: str, x: Tensor, unit: float = 1.0) -> Tensor:
    """Replace some small multiples of ``unit`` so that it is the scale of 8 bits."""
    if "i" in how:
        x[:, ::32] = 127 * unit
    return x


def make(
    out: int, inputs: int, how: str, paired: bool = False, seed: int = 1, exact: bool = True
) -> tuple[PackedMatrix, Tensor]:
    """A packed weight and the weight in float32 that it stands for."""
    if how == "bf16":
        weight = numbers(out, inputs, seed=seed) if exact else noise(out, inputs, seed=seed)
        return pack_bf16(weight, paired), weight.float()
    form, _, size = how.partition("/")
    bits, group = int(form[0]), int(size or 0)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (out, inputs), generator=generator, dtype=torch.uint8)
    groups = -(-inputs // group) if group else 1
    scales = torch.rand(out, groups, generator=generator) + 0.5
    if exact:
        scales = 2.0 ** torch.randint(-3, 2, (out, groups), generator=generator)
    zeros = None
    if "z" in form:
        zeros = torch.randint(0, 2**bits, (out, groups), generator=generator)
    e4m3 = "f" in form
    if e4m3:  # some whose sums are exact
        codes = codes % 32 + 32 + codes // 128 * 128
    table = None
    if "t" in form:
        table = torch.randperm(31, generator=generator)[:16].sub(15).bfloat16()
    spread = [
        torch.full((out, inputs), 2 ** (bits - 1))
        if values is None
        else values.repeat_interleave(group or inputs, 1)[:, :inputs]
        for values in (scales, zeros)
    ]
    values = codes.float() - spread[1] if table is None else table.float()[codes.long()]
    values = codes.view(torch.float8_e4m3fn).float() if e4m3 else values
    matrix = pack_codes(codes, scales, zeros, bits, group, paired, table, e4m3)
    if "i" in form:
        assert quantize_inputs(matrix) == multiplies_bytes()
    return matrix, values * spread[0]


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize(
    ("out", "inputs"), [(32, 64), (1, 1), (33, 31), (100, 129), (48, 576), (31, 1100)]
)
def test_products(level: str, how: str, out: int, inputs: int) -> None:
    matrix, weight = make(out, inputs, how)
    torch.testing.assert_close(unpack(matrix), weight, rtol=0, atol=0)
    for rows in ROWS:
        x = inputs_of(how, numbers(rows, inputs, seed=rows))
        y = linear(x, matrix)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, (x.float() @ weight.T).bfloat16()), rows


@pytest.mark.parametrize(
    ("out", "inputs"), [(32, 64), (1, 1), (33, 31), (100, 129), (70, 576), (1000, 2048)]
)
def test_rows_are_those_that_were_packed(level: str, out: int, inputs: int) -> None:
    bits = torch.randint(-(2**15), 2**15, (out, inputs), generator=torch.Generator().manual_seed(3))
    weight = bits.to(torch.int16).view(torch.bfloat16)  # any bits, NaN among them
    wide = torch.nn.functional.pad(weight, (0, 5))
    for matrix in (pack_bf16(weight), pack_bf16(wide[:, :inputs])):
        for count in (0, 1, 2, 17, 300):
            ids = torch.arange(count) * 7 % out
            got = rows_of(matrix, ids)
            assert torch.equal(got.view(torch.int16), weight[ids].view(torch.int16)), count
        every_other = torch.arange(out).repeat_interleave(2)[::2].int()
        got = rows_of(matrix, every_other)
        assert torch.equal(got.view(torch.int16), weight.view(torch.int16))


@pytest.mark.parametrize("wrong", [70, -1, 2**40, -(2**63)])
def test_rows_out_of_range_are_refused(level: str, wrong: int) -> None:
    matrix = pack_bf16(noise(70, 36))
    for ids in ([wrong], [0, 69, wrong, 3]):
        with pytest.raises(IndexError, match=f"row {wrong} of a weight that has 70"):
            rows_of(matrix, torch.tensor(ids))


@pytest.mark.parametrize("how", FORMATS)
def test_a_row_depends_on_nothing_else(
    level: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for out, inputs in [(70, 200), (300, 1536), (40, 5001)]:
        matrix, weight = make(out, inputs, how, exact=False)
        x = noise(205, inputs)
        whole = linear(x, matrix, epilogue=Epilogue.FLOAT)
        product = x.float() @ weight.T
        scale = (x.float().abs() @ weight.abs().T).max()
        assert (whole - product).abs().max() < scale * 2**-8
        for begin, end in [(0, 1), (7, 8), (11, 13), (13, 17), (50, 57), (90, 102), (60, 205)]:
            part = linear(x[begin:end], matrix, epilogue=Epilogue.FLOAT)
            assert torch.equal(part, whole[begin:end]), (begin, end)
        with monkeypatch.context() as patched:
            patched.setattr("tgi_cli.kernels.linear.threads", lambda: 1)
            assert torch.equal(linear(x, matrix, epilogue=Epilogue.FLOAT), whole)


@pytest.mark.parametrize("how", ["4/32", "4z/64", "4t/64", "5z/64", "6/32"])
def test_all_processors_add_up_short_groups_alike(level: str, how: str) -> None:
    matrix, _ = make(70, 1100, how, exact=False)
    x = noise(100, 1100)
    kernels = library.cpp_library()
    assert kernels is not None
    before = kernels.tgi_begin_two_products(0)
    try:
        one = linear(x, matrix, epilogue=Epilogue.FLOAT)
        kernels.tgi_begin_two_products(1)
        assert torch.equal(linear(x, matrix, epilogue=Epilogue.FLOAT), one)
        assert torch.equal(linear(x[31:48], matrix, epilogue=Epilogue.FLOAT), one[31:48])
    finally:
        kernels.tgi_begin_two_products(before)


@pytest.mark.parametrize("how", ["bf16", "8", "4z/128", "4t/64", "4i/64"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("out", [32, 70])
def test_epilogues(level: str, how: str, biased: bool, out: int) -> None:
    inputs = 130
    bias = numbers(out, seed=2) / 4 if biased else None
    matrix, weight = make(out, inputs, how)
    paired, _ = make(out, inputs, how, paired=True)
    assert torch.equal(unpack(paired), weight)
    for rows in [1, 5, 30]:
        x = inputs_of(how, numbers(rows, inputs, seed=rows) / 16, 1 / 16)
        product = x.float() @ weight.T
        product = (product if bias is None else product + bias.float()).bfloat16()
        assert torch.equal(linear(x, matrix, bias), product)
        assert torch.equal(linear(x, paired, bias), product)
        wide = linear(x, matrix, bias, Epilogue.FLOAT)
        assert wide.dtype == torch.float32
        assert torch.equal(wide, product.float())

        residual = noise(rows, out)
        for scale in (1.0, 0.22):
            added = residual.clone()
            assert linear(x, matrix, bias, Epilogue.ADD, out=added, scale=scale) is added
            assert torch.equal(added, residual + product * scale)
        for name, number in ACTIVATIONS.items():
            with without_cpp_kernels():
                activated, gated = ops.activate(product, name), ops.gated(product, name)
            close(linear(x, matrix, bias, Epilogue.ACTIVATE, number), activated)
            close(linear(x, paired, bias, Epilogue.GATED, number), gated)


def close(actual: Tensor, expected: Tensor) -> None:
    """The same but for single roundings of an activation's last bit."""
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-4)
    off = (actual != expected) & (expected.abs() > 1e-2)
    assert off.sum() <= 1 + 0.02 * off.numel()


def test_every_e4m3(level: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes % 128 != 127]  # NaN is none
    matrix = pack_codes(codes[:, None].contiguous(), torch.ones(254, 1), None, 8, 0, e4m3=True)
    exact = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(unpack(matrix).flatten(), exact)
    x = torch.tensor([[1.0], [-2.0]]).bfloat16()
    assert torch.equal(linear(x, matrix, epilogue=Epilogue.FLOAT), x.float() * exact)


def test_rows_may_have_any_stride(level: str) -> None:
    matrix, weight = make(50, 64, "bf16")
    wide = numbers(9, 200)
    x = wide[:, 30:94]
    expected = (x.float() @ weight.T).bfloat16()
    assert torch.equal(linear(x, matrix), expected)
    assert torch.equal(linear(x.T.contiguous().T, matrix), expected)
    target = torch.full((9, 80), 7.0).bfloat16()
    linear(x, matrix, out=target[:, 20:70])
    assert torch.equal(target[:, 20:70], expected)
    assert (target[:, :20] == 7).all()
    assert (target[:, 70:] == 7).all()
    transposed = pack_bf16(weight.bfloat16().T.contiguous().T)
    assert torch.equal(linear(x, transposed), expected)


@pytest.mark.parametrize("how", ["bf16", "8", "4/32", "4i/32"])
def test_nan_affects_only_its_own_row(level: str, how: str) -> None:
    matrix, weight = make(40, 67, how)
    for rows in (3, 30):
        x = inputs_of(how, numbers(rows, 67))
        clean = linear(x, matrix)
        x[1, 66] = math.nan
        x[2, 0] = math.inf
        y = linear(x, matrix)
        assert y[1].isnan().all()
        wide = how == "8" and level.startswith("avx512_")  # rows are integers of 15 bits
        if wide or (how == "4i/32" and multiplies_bytes()):  # an integer is never infinite
            assert y[2].isnan().all()
        else:
            infinite = (weight[:, 0] * math.inf).bfloat16()  # and 0 times infinity is none
            torch.testing.assert_close(y[2], infinite, equal_nan=True)
        assert torch.equal(y[0], clean[0])
        assert torch.equal(y[3:], clean[3:])
        for epilogue in (Epilogue.ACTIVATE, Epilogue.FLOAT):
            for number in ACTIVATIONS.values():
                assert linear(x, matrix, None, epilogue, number)[1].isnan().all()


@pytest.mark.parametrize("how", ["8", "8/32", "8z/64"])
def test_products_with_8_bit_codes_err_less_than_their_rounding(level: str, how: str) -> None:
    """Also where inputs become integers that share a scale with far larger ones."""
    matrix, weight = make(96, 700, how, exact=False)
    x = noise(40, 700) * torch.where(torch.arange(700) % 50 == 7, 300.0, 1.0).bfloat16()
    exact = x.double() @ weight.double().T
    error = (linear(x, matrix, epilogue=Epilogue.FLOAT).double() - exact).norm()
    rounding = (exact.bfloat16().double() - exact).norm()
    assert error < 1.1 * rounding


@pytest.mark.parametrize("inputs", [512, 700, 768, 1000, 1536, 4096])
@pytest.mark.parametrize("code", [0, 255])
def test_the_largest_sums_are_exact(level: str, code: int, inputs: int) -> None:
    codes = torch.full((33, inputs), code, dtype=torch.uint8)
    matrix = pack_codes(codes, torch.ones(33, 1), None, 8, 0)
    largest = torch.full((14, inputs), 255 * 2.0**100).bfloat16()
    largest[::2] *= -1
    y = linear(largest, matrix, epilogue=Epilogue.FLOAT)
    exact = largest.double()[:, :1] * (code - 128) * inputs
    assert torch.equal(y, exact.bfloat16().float().expand(14, 33))


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_the_largest_sums_of_rounded_rows_are_exact(level: str, bits: int, group: int) -> None:
    """Products of bytes are added up in 16 bits where they fit."""
    inputs = 640 + group
    for code in (0, 2**bits - 1):
        codes = torch.full((33, inputs), code, dtype=torch.uint8)
        matrix = pack_codes(codes, torch.ones(33, inputs // group), None, bits, group)
        assert quantize_inputs(matrix) == multiplies_bytes()
        for rows in (1, 2, 3, 7, 14):
            x = torch.full((rows, inputs), 127.0).bfloat16()
            x[::2] *= -1
            y = linear(x, matrix, epilogue=Epilogue.FLOAT)
            exact = x.double()[:, :1] * (code - 2 ** (bits - 1)) * inputs
            assert torch.equal(y, exact.bfloat16().float().expand(rows, 33)), (code, rows)


@pytest.mark.parametrize("how", ["8i", "4i/64", "4zi/128"])
def test_inputs_are_rounded_to_8_bits_on_request(level: str, how: str) -> None:
    matrix, weight = make(96, 704, how, exact=False)
    x = noise(40, 704)
    x[3, 64:128] = 0
    x[4] *= 2.0**-120
    x[5] *= 2.0**100
    taken = x.float().view(40, -1, 64)
    if multiplies_bytes():
        largest = taken.abs().amax(2, keepdim=True)
        factors = torch.full_like(largest, 127.0) / largest  # torch takes 127 / x as 127 * (1 / x)
        taken = (taken * factors).nan_to_num().round() * (largest / 127)
        taken[4] = 0
    wide = taken.view(40, 704).double()
    exact, size = wide @ weight.double().T, wide.abs() @ weight.double().abs().T
    y = linear(x, matrix, epilogue=Epilogue.FLOAT).double()
    assert ((y - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5 * size).all()


def test_inputs_are_rounded_for_integer_codes_only(level: str) -> None:
    for how in ("bf16", "4t/64", "8f"):
        matrix, _ = make(32, 64, how)
        assert not quantize_inputs(matrix)


def test_scales_of_long_groups_are_divided(level: str) -> None:
    matrix, weight = make(33, 2048, "4z/1024")
    assert matrix.group == 512
    torch.testing.assert_close(unpack(matrix), weight, rtol=0, atol=0)


def test_groups_that_cannot_be_taken(level: str) -> None:
    codes = torch.zeros(8, 100, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiple of 16"):
        pack_codes(codes, torch.ones(8, 5), None, 4, 20)


def test_without_kernels_the_cause_is_named(level: str) -> None:
    matrix, _ = make(8, 8, "bf16")
    with without_cpp_kernels(), pytest.raises(RuntimeError, match="not compiled"):
        linear(torch.zeros(1, 8).bfloat16(), matrix)
    assert library.cpp_library() is not None


def test_size_is_what_the_format_takes(level: str) -> None:
    assert make(64, 128, "bf16")[0].nbytes == 64 * 128 * 2
    assert make(64, 128, "8")[0].nbytes == 64 * 128 + 64 * 4
    assert make(64, 128, "4/32")[0].nbytes == 64 * 128 // 2 + 64 * 4 * 4
    assert make(64, 128, "4t/64")[0].nbytes == 64 * 128 // 2 + 64 * 2 * 4


def test_functions_are_those_of_the_layers() -> None:
    assert set(ACTIVATIONS) == set(ops.ACTIVATIONS)
    x = noise(1000)
    with without_cpp_kernels():
        for name, number in ACTIVATIONS.items():
            same = next(other for other, code in ACTIVATIONS.items() if code == number)
            assert torch.equal(ops.activate(x, name), ops.activate(x, same))
