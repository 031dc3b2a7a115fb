"""Compiles every kernel that the wrappers would launch, for GPUs that need not be here.

The interpreter takes Python that the compiler refuses, so equal results alone prove little. Not
collected by itself: see test_triton_ops.py. TRITON_CACHE_DIR should be a new folder.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tgi_cli.layers import triton_ops


class AbsentGPU:
    """Says what to compile for. What would run on it, fails."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was compiled, and is not launched."""
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> None:
        kernels.append(run(self, *args, warmup=True, **options))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    driver.set_active(AbsentGPU(90))
    return kernels


def norms(size: int, dtype: torch.dtype) -> None:
    x, residual, weight, bias = torch.empty(4, 2, size, dtype=dtype)
    weight, bias = weight[0], bias[0]
    triton_ops.rms_norm(x, weight, 1e-5)
    triton_ops.rms_norm(x.view(2, -1, 64), weight[:64], 1e-5)
    triton_ops.add_rms_norm(x, residual, weight, 1e-5)
    triton_ops.add_layer_norm(x, residual, weight, bias, 1e-5)


def assert_made(kernels: list[Any], count: int, capability: int = 90) -> None:
    assert len(kernels) == count
    for kernel in kernels:
        assert kernel.asm["cubin"]
        assert f".target sm_{capability}" in kernel.asm["ptx"]


@pytest.mark.parametrize(("size", "dtype"), [(576, torch.bfloat16), (16384, torch.float32)])
def test_norms(size: int, dtype: torch.dtype, compiled: list[Any]) -> None:
    norms(size, dtype)
    assert_made(compiled, 4)


def test_norms_for_the_generation_before(compiled: list[Any]) -> None:
    driver.set_active(AbsentGPU(80))
    norms(4096, torch.bfloat16)
    assert_made(compiled, 4, 80)
    assert "ld.global.v4.b32" in compiled[2].asm["ptx"]  # 16 bytes at once


@pytest.mark.parametrize(("dims", "rotated"), [(128, 128), (80, 32)])
def test_rotation(dims: int, rotated: int, compiled: list[Any]) -> None:
    qkv = torch.empty(2, 40, dims, dtype=torch.bfloat16)
    angles, weight = torch.empty(2, 1, rotated, dtype=qkv.dtype), torch.empty(32, dims)
    triton_ops.rotate_(qkv[:, :32], angles, angles)
    triton_ops.norm_rotate_(qkv[:, :32], weight, 1e-5, angles, angles)
    assert_made(compiled, 2)


def test_gates(compiled: list[Any]) -> None:
    names = {formula: name for name, formula in triton_ops._FORMULAS.items()}
    for name in names.values():
        triton_ops.gated(torch.empty(2, 2 * 1536, dtype=torch.bfloat16), name)
    assert_made(compiled, len(names))
