"""Compiles every kernel that the wrappers would launch, for GPUs that are not present.

The interpreter accepts Python that the compiler refuses, so equal results alone prove little. Not
collected by itself: see test_triton.py. TRITON_CACHE_DIR should be a new folder.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from tests.tools.sass import registers_and_stack
from tests.tools.triton_compiler import compile_for, compile_only
from tgi_cli.layers import triton_ops


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Names and kernels that were compiled, and not launched."""
    kernels, compile_kernel = compile_only()
    monkeypatch.setattr(JITFunction, "run", compile_kernel)
    compile_for(90)
    return kernels


def norms(size: int, dtype: torch.dtype) -> None:
    x, residual, weight, bias = torch.empty(4, 2, size, dtype=dtype)
    weight, bias = weight[0], bias[0]
    triton_ops.rms_norm(x, weight, 1e-5)
    triton_ops.rms_norm(x.view(2, -1, 64), weight[:64], 1e-5)
    triton_ops.add_rms_norm(x, residual, weight, 1e-5)
    triton_ops.add_layer_norm(x, residual, weight, bias, 1e-5)


def assert_compiled(kernels: list[tuple[str, Any]], count: int, capability: int = 90) -> None:
    assert len(kernels) == count
    for _, kernel in kernels:
        assert kernel.asm["cubin"]
        assert f".target sm_{capability}" in kernel.asm["ptx"]
        assert registers_and_stack(kernel)[1] == 0, "it spills"


@pytest.mark.parametrize(("size", "dtype"), [(576, torch.bfloat16), (16384, torch.float32)])
def test_norms(size: int, dtype: torch.dtype, compiled: list[tuple[str, Any]]) -> None:
    norms(size, dtype)
    assert_compiled(compiled, 4)


def test_norms_for_the_generation_before(compiled: list[tuple[str, Any]]) -> None:
    compile_for(80)
    norms(4096, torch.bfloat16)
    assert_compiled(compiled, 4, 80)
    assert "ld.global.v4.b32" in compiled[2][1].asm["ptx"]  # 16 bytes at once


@pytest.mark.parametrize(("dims", "rotated"), [(128, 128), (80, 32), (256, 64)])
def test_rotation(dims: int, rotated: int, compiled: list[tuple[str, Any]]) -> None:
    qkv = torch.empty(2, 40, dims, dtype=torch.bfloat16)
    angles, weight = torch.empty(2, 1, rotated, dtype=qkv.dtype), torch.empty(32, dims)
    triton_ops.rotate_(qkv[:, :32], angles, angles)
    triton_ops.norm_rotate_(qkv[:, :32], weight, 1e-5, angles, angles)
    assert_compiled(compiled, 2)


def test_gates(compiled: list[tuple[str, Any]]) -> None:
    names = {formula: name for name, formula in triton_ops.FORMULAS.items()}
    for name in names.values():
        triton_ops.gated(torch.empty(2, 2 * 1536, dtype=torch.bfloat16), name)
    assert_compiled(compiled, len(names))
