from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tgi_cli.kernels import elementwise, without_cpp_kernels
from tgi_cli.layers import ops

WIDTHS = (1, 7, 16, 40, 576, 2050)


@pytest.fixture(autouse=True)
def _seeded(level: str) -> None:
    torch.manual_seed(5)


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def close(ours: Tensor, wanted: Tensor) -> None:
    # One unit in the last place: sums are added up in another order.
    torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    weight = torch.randn(width).to(dtype)
    for rows in (1, 2, 9, 700):
        x, residual = 30 * bf16(rows, width), bf16(rows, width)
        assert elementwise.usable(x)
        before = x.clone()
        normed = ops.rms_norm(x, weight, 1e-5)
        both, total = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
        assert torch.equal(x, before)
        with without_cpp_kernels():
            close(normed, ops.rms_norm(x, weight, 1e-5))
            wanted, wanted_total = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
        close(both, wanted)
        assert torch.equal(total, wanted_total)


def test_rows_do_not_depend_on_each_other() -> None:
    x, weight = bf16(301, 200), bf16(200)
    together = ops.rms_norm(x, weight, 1e-5)
    alone = torch.cat([ops.rms_norm(row[None], weight, 1e-5) for row in x])
    assert torch.equal(together, alone)


def test_rows_with_a_stride() -> None:
    x, weight = bf16(5, 96), bf16(32)
    part = x[:, 32:64]
    assert torch.equal(
        ops.rms_norm(part, weight, 1e-5), ops.rms_norm(part.contiguous(), weight, 1e-5)
    )


@pytest.mark.parametrize(("dims", "rotated"), [(64, 64), (80, 20), (128, 128), (24, 24), (2, 2)])
@pytest.mark.parametrize("norm", [None, torch.bfloat16, torch.float32])
def test_rotation(dims: int, rotated: int, norm: torch.dtype | None) -> None:
    for tokens in (1, 3, 300):
        qkv = bf16(tokens, 5, dims)
        angle = 6.3 * torch.rand(tokens, rotated // 2)
        cos = torch.cat((angle.cos(), angle.cos()), -1)[:, None].bfloat16()
        sin = torch.cat((-angle.sin(), angle.sin()), -1)[:, None].bfloat16()
        weight = None if norm is None else torch.randn(4, dims).to(norm)
        ours, wanted = qkv.clone(), qkv.clone()

        def run(heads: Tensor, weight: Tensor | None = weight) -> None:
            if weight is None:
                ops.rotate_(heads[:, :4], cos, sin)  # noqa: B023
            else:
                ops.norm_rotate_(heads[:, :4], weight, 1e-6, cos, sin)  # noqa: B023

        run(ours)
        with without_cpp_kernels():
            run(wanted)
        torch.testing.assert_close(ours, wanted, atol=2**-6, rtol=2**-7)
        assert torch.equal(ours[:, 4], qkv[:, 4])
        if rotated < dims and weight is None:
            assert torch.equal(ours[..., rotated:], qkv[..., rotated:])


def test_nan_stays_in_its_row() -> None:
    x = bf16(3, 64)
    x[1, 5] = float("nan")
    normed = ops.rms_norm(x, torch.ones(64).bfloat16(), 1e-5)
    assert normed[1].isnan().all()
    assert normed[0].isfinite().all()
    assert normed[2].isfinite().all()


@pytest.mark.parametrize("width", [16, 40, 2050])
def test_sparse_gates(width: int) -> None:
    gate_up = bf16(9, 2 * width) + 0.3
    ours = ops.sparse_gated(gate_up, "gelu_pytorch_tanh", 0.8)
    gates, ups = gate_up.double().chunk(2, -1)
    cutoff = gates.mean(-1, True) + 0.8 * gates.std(-1, correction=0, keepdim=True)
    cut = (gates - cutoff).relu()
    wanted = torch.nn.functional.gelu(cut, approximate="tanh") * ups
    # The gate, its activation and the product are rounded.
    torch.testing.assert_close(ours.double(), wanted, atol=1e-3, rtol=2**-6)
    alone = torch.cat([ops.sparse_gated(row[None], "gelu_pytorch_tanh", 0.8) for row in gate_up])
    assert torch.equal(ours, alone)
    with without_cpp_kernels():
        close(ours, ops.sparse_gated(gate_up, "gelu_pytorch_tanh", 0.8))


def test_norms_of_heads_are_those_of_rows() -> None:
    qkv, weight = bf16(300, 6, 48), torch.randn(4, 48).bfloat16()
    normed = qkv.clone()
    ops.norm_heads_(normed[:, :4], weight, 1e-6)
    assert torch.equal(normed[:, 4:], qkv[:, 4:])
    for head in range(4):
        wanted = ops.rms_norm(qkv[:, head], weight[head], 1e-6)
        assert torch.equal(normed[:, head], wanted)
