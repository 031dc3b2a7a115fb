"""Compiles the kernels of attention as it would launch them, for GPUs that are not present.

The interpreter takes Python that the compiler refuses, so equal results alone prove little. Not
collected by itself: see test_triton.py. TRITON_CACHE_DIR should be a new folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from tests.tools.paged_run import CPU, make_metadata
from tests.tools.triton_compiler import compile_for, compile_only
from tgi_cli.attention import KVSpec
from tgi_cli.attention.triton import TritonAttention
from tgi_cli.attention.triton_tiles import Hardware
from tgi_cli.layers import triton_ops

SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities"""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Names and kernels that were compiled, and not launched."""
    kernels, compile_kernel = compile_only()
    monkeypatch.setattr(JITFunction, "run", compile_kernel)
    return kernels


@dataclass(frozen=True)
class Case:
    capability: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    value_dim: int | None = None
    chunk: int | None = None
    distances: int = 0
    lens: tuple[tuple[int, int], ...] = ((1, 4096), (600, 1024))


CASES = {
    "llama 3": Case(90, 32, 8, 128, torch.bfloat16),
    "gpt-oss, 8 bits": Case(
        90, 64, 8, 64, torch.bfloat16, torch.float8_e4m3fn, window=128, sinks=True
    ),
    "gemma 2": Case(90, 8, 4, 256, torch.bfloat16, softcap=50.0),
    "drafts, 8 bits": Case(
        80, 32, 4, 128, torch.float16, torch.float8_e4m3fn, lens=((1, 2000), (5, 900))
    ),
    "phi 3 on an A100": Case(80, 32, 32, 96, torch.bfloat16, torch.float8_e5m2, window=2047),
    "a small GPU": Case(89, 6, 2, 80, torch.float16, lens=((1, 2000),)),
    "mimo": Case(90, 64, 8, 192, torch.bfloat16, window=128, sinks=True, value_dim=128),
    "llama 4": Case(90, 40, 8, 128, torch.bfloat16, chunk=8192),
    "falcon rw": Case(80, 32, 32, 64, torch.bfloat16, distances=2),
    "deepseek v3": Case(90, 128, 1, 576, torch.bfloat16, value_dim=512),
    "deepseek v2 lite, 8 bits": Case(
        80, 16, 1, 576, torch.bfloat16, torch.float8_e4m3fn, value_dim=512
    ),
    "minicpm 3 on a small GPU": Case(89, 40, 1, 288, torch.bfloat16, value_dim=256),
    "latents in float32": Case(80, 16, 1, 576, torch.float32, value_dim=512, sinks=True),
    "float32": Case(80, 4, 2, 64, torch.float32, lens=((1, 2000),)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention(case: Case, compiled: list[tuple[str, Any]]) -> None:
    compile_for(case.capability)
    latent = case.kv_heads == 1
    spec = KVSpec(case.kv_heads, case.dim, case.window, case.value_dim, case.chunk, latent)
    attention = TritonAttention([spec], 16, case.dtype, CPU, case.cache_dtype)
    attention.hardware = Hardware(108, SHARED[case.capability], divmod(case.capability, 10))
    attention.allocate(1)
    queries, kvs = (list(lens) for lens in zip(*case.lens, strict=True))
    attention.plan(make_metadata([[0] * (-(-kv // 16)) for kv in kvs], queries, kvs, 16))
    heads = case.heads + 2 * case.kv_heads
    qkv = torch.empty(sum(queries), heads, case.dim, dtype=case.dtype)
    query, key, value = qkv.split([case.heads, case.kv_heads, case.kv_heads], 1)
    if case.value_dim is not None:
        value = torch.empty(sum(queries), case.kv_heads, case.value_dim, dtype=case.dtype)
    sinks = torch.empty(case.heads, dtype=case.dtype) if case.sinks else None
    bias = torch.empty(case.heads, case.distances) if case.distances else None
    attention(0, query, key, None if latent else value, 0.1, case.softcap, sinks, bias)
    expected = {"_write_kernel", "latent_kernel" if latent else "decode_kernel", "reduce_kernel"}
    if queries[-1] > 16 and not latent:
        expected.add("prefill_kernel")
    kernels = dict(compiled)
    assert set(kernels) == expected
    for kernel in kernels.values():
        assert kernel.asm["cubin"]
        assert f".target sm_{case.capability}" in kernel.asm["ptx"]
        assert kernel.metadata.shared <= SHARED[case.capability]
    # Keys and values go to shared memory in pieces of 16 bytes, while others are computed with.
    # (Rows of latents in 8 bits are not: they are widened for two products.)
    by_pieces = {"decode_kernel", "prefill_kernel"}
    if case.cache_dtype is None:
        by_pieces.add("latent_kernel")
    for name in expected & by_pieces:
        copies = [line for line in kernels[name].asm["ptx"].splitlines() if "cp.async.c" in line]
        assert any("0x10" in line for line in copies)
    if "prefill_kernel" in expected and case.capability == 90:
        assert "wgmma.mma_async" in kernels["prefill_kernel"].asm["ptx"]


def test_padded_decodes(compiled: list[tuple[str, Any]]) -> None:
    compile_for(90)
    attention = TritonAttention([KVSpec(1, 16)], 16, torch.float16, CPU)
    attention.decode_buffers(4, 100)
    attention.plan_padded(None, 4)
    attention.plan_padded(make_metadata([[0]], [1], [1], 16), 4)
    assert dict(compiled)["_stage_kernel"].asm["cubin"]


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("norm", [True, False])
def test_rotation_that_writes(
    cache_dtype: torch.dtype, norm: bool, compiled: list[tuple[str, Any]]
) -> None:
    compile_for(90 if norm else 80)
    qkv = torch.empty(2, 48, 128, dtype=torch.bfloat16)
    angles, weight = torch.empty(2, 1, 96, dtype=qkv.dtype), torch.empty(40, 128)
    key_cache, value_cache = torch.empty(2, 4, 16, 8, 128).to(cache_dtype)
    triton_ops.norm_rotate_write(
        qkv, weight if norm else None, 1e-5, angles, angles, key_cache, value_cache, torch.arange(2)
    )
    assert dict(compiled)["_rotate_kernel"].asm["cubin"]
