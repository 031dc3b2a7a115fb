"""Triton's kernels against their references. Not collected by itself: see test_triton.py.

On a machine with CUDA it may be run as it stands, and then tests what the compiler made.
"""

from __future__ import annotations

import os

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tgi_cli.layers import ops, triton_ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

tokens = st.integers(0, 4)
dtypes = st.sampled_from(DTYPES)
widths = st.sampled_from([1, 8, 31, 64, 100, 576, 1030])
seeds = st.integers(0, 1000)
matrix = settings(max_examples=25, deadline=None, derandomize=True, database=None)


def close(ours: Tensor, wanted: Tensor) -> None:
    """The references round several times; the interpreter rounds to bfloat16 downwards."""
    assert ours.dtype == wanted.dtype
    assert ours.shape == wanted.shape
    allowed = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}[ours.dtype]
    torch.testing.assert_close(ours.float(), wanted.float(), atol=allowed, rtol=allowed)


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).clamp_(-3, 3).to(DEVICE, dtype)


def reference(tensor: Tensor) -> Tensor:
    """A copy for the reference, on the CPU, where that is what ops takes."""
    return tensor.detach().to("cpu", copy=True)


@matrix
@given(tokens, widths, dtypes, dtypes, st.integers(0, 3), seeds)
def test_rms_norm(
    tokens: int,
    width: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    gap: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = numbers(tokens, width + gap, dtype=dtype)[:, :width]
    weight = numbers(width, dtype=weight_dtype)
    wanted = ops.rms_norm(reference(x), reference(weight), 1e-5)
    close(triton_ops.rms_norm(x, weight, 1e-5).cpu(), wanted)


@matrix
@given(tokens, st.integers(1, 5), widths, dtypes, seeds)
def test_rms_norm_of_heads_among_others(
    tokens: int, heads: int, dims: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    qkv = numbers(tokens, heads + 3, dims, dtype=dtype)
    x, weight = qkv[:, 1 : heads + 1], numbers(dims, dtype=dtype)
    wanted = ops.rms_norm(reference(x), reference(weight), 1e-5)
    close(triton_ops.rms_norm(x, weight, 1e-5).cpu(), wanted)


@matrix
@given(tokens, widths, dtypes, st.integers(0, 3), seeds)
def test_add_rms_norm(tokens: int, width: int, dtype: torch.dtype, gap: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = numbers(tokens, width + gap, dtype=dtype)[:, :width]
    wide = numbers(tokens, width + 2, dtype=dtype)
    residual, beside, weight = wide[:, :width], reference(wide), numbers(width, dtype=dtype)
    wanted, total = ops.add_rms_norm(reference(x), reference(residual), reference(weight), 1e-5)
    close(triton_ops.add_rms_norm(x, residual, weight, 1e-5).cpu(), wanted)
    close(residual.cpu(), total)
    assert torch.equal(wide.cpu()[:, width:], beside[:, width:])


@matrix
@given(tokens, widths.filter(lambda width: width > 1), dtypes, st.booleans(), seeds)
def test_add_layer_norm(
    tokens: int, width: int, dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, residual = numbers(2, tokens, width, dtype=dtype)
    weight, bias = numbers(2, width, dtype=dtype)
    wanted, total = ops.add_layer_norm(
        reference(x),
        reference(residual),
        reference(weight),
        reference(bias) if has_bias else None,
        1e-2,
    )
    ours = triton_ops.add_layer_norm(x, residual, weight, bias if has_bias else None, 1e-2)
    close(ours.cpu(), wanted)
    close(residual.cpu(), total)


@matrix
@given(
    tokens,
    st.integers(1, 40),
    st.sampled_from([(4, 4), (64, 64), (80, 32), (96, 96), (128, 128), (30, 10), (256, 64)]),
    st.booleans(),
    dtypes,
    dtypes,
    seeds,
)
def test_rotation(
    tokens: int,
    heads: int,
    sizes: tuple[int, int],
    norm: bool,
    dtype: torch.dtype,
    angle_dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    dims, rotated = sizes
    qkv = numbers(tokens, heads + 3, dims, dtype=dtype)
    weight = numbers(heads, dims, dtype=dtype)
    cosines, sines = numbers(2, tokens, 1, rotated, dtype=angle_dtype).clamp_(-1, 1)
    wanted = reference(qkv)
    turned, reference_angles = wanted[:, 1 : heads + 1], (reference(cosines), reference(sines))
    if norm:
        ops.norm_rotate_(turned, reference(weight), 1e-5, *reference_angles)
        triton_ops.norm_rotate_(qkv[:, 1 : heads + 1], weight, 1e-5, cosines, sines)
    else:
        ops.rotate_(turned, *reference_angles)
        triton_ops.rotate_(qkv[:, 1 : heads + 1], cosines, sines)
    qkv = qkv.cpu()
    close(qkv[:, 1 : heads + 1], turned)
    for other in (slice(0, 1), slice(heads + 1, None)):
        assert torch.equal(qkv[:, other], wanted[:, other])
    if not norm:
        assert torch.equal(qkv[..., rotated:], wanted[..., rotated:])


def test_kernels_know_every_activation() -> None:
    assert set(triton_ops.FORMULAS) == set(ops.ACTIVATIONS)


@matrix
@given(
    tokens,
    st.sampled_from([1, 45, 64, 1500]),
    st.sampled_from(sorted(ops.ACTIVATIONS)),
    dtypes,
    st.integers(0, 3),
    seeds,
)
def test_gated(
    tokens: int, size: int, activation: str, dtype: torch.dtype, gap: int, seed: int
) -> None:
    torch.manual_seed(seed)
    gate_up = numbers(tokens, 2 * size + gap, dtype=dtype)[:, : 2 * size]
    before = reference(gate_up)
    close(triton_ops.gated(gate_up, activation).cpu(), ops.gated(before.clone(), activation))
    assert torch.equal(gate_up.cpu(), before)


def test_large_values_stay_numbers() -> None:
    gate_up = torch.tensor([[-90.0, 90.0, -1e4, 1e4, 1.0, 1.0, 1.0, 1.0]]).to(DEVICE)
    for activation in ops.ACTIVATIONS:
        wanted = ops.gated(reference(gate_up), activation)
        close(triton_ops.gated(gate_up, activation).cpu(), wanted)
