"""Attention of served model families, and a call of it for a compiler."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tests.tools.paged_run import CPU, make_metadata
from tgi_cli.attention import KVSpec, Spans
from tgi_cli.attention.triton import TritonAttention
from tgi_cli.attention.triton_tiles import Hardware

SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities"""

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """A layer, what is cached of it, and a step: queries and KV length of each sequence."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    value_dim: int | None = None
    chunk: int | None = None
    distances: int = 0
    latent: bool = False
    spans: Spans = "none"
    lens: tuple[tuple[int, int], ...] = ((1, 4096), (100, 8192), (600, 1024))

    @property
    def spec(self) -> KVSpec:
        return KVSpec(
            self.kv_heads,
            self.dim,
            self.window,
            self.value_dim,
            self.chunk,
            self.latent,
            spans=self.spans,
        )


_MODELS = {
    "Llama 3 8B": Case(32, 8, 128),
    "Llama 3.2 1B": Case(32, 8, 64),
    "Qwen 2.5 7B": Case(28, 4, 128),
    "Qwen 3 30B-A3B": Case(32, 4, 128),
    "Mistral 7B": Case(32, 8, 128, window=4096),
    "Gemma 2 2B": Case(8, 4, 256, softcap=50.0, window=4096),
    "gpt-oss": Case(64, 8, 64, window=128, sinks=True),
    "Phi 3 mini": Case(32, 32, 96, window=2047),
    "Phi 2": Case(32, 32, 80),
    "MiMo": Case(64, 8, 192, window=128, sinks=True, value_dim=128),
    "Llama 4": Case(40, 8, 128, chunk=8192),
    "Falcon RW": Case(32, 32, 64, distances=2),
    "DeepSeek V3, one of 8": Case(16, 1, 576, value_dim=512, latent=True),
    "DeepSeek V3": Case(128, 1, 576, value_dim=512, latent=True),
    "MiniCPM 3": Case(40, 1, 288, value_dim=256, latent=True),
}
SERVED = {
    **_MODELS,
    **{
        f"{name}, fp8 cache": replace(_MODELS[name], cache_dtype=E4M3)
        for name in ("Llama 3 8B", "Llama 3.2 1B", "Gemma 2 2B", "MiMo", "DeepSeek V3, one of 8")
    },
    "Llama 3 8B, float16": replace(_MODELS["Llama 3 8B"], dtype=torch.float16),
}
"""Configurations that are compiled, and whose figures docs/benchmarks-kernels.md has."""


def attend(case: Case, capability: int) -> TritonAttention:
    """Call attention once. The kernels are to be compiled in place of their launch."""
    attention = TritonAttention([case.spec], 16, case.dtype, CPU, case.cache_dtype)
    attention.hardware = Hardware(108, SHARED[capability], divmod(capability, 10))
    attention.allocate(1)
    queries, kvs = (list(lens) for lens in zip(*case.lens, strict=True))
    metadata = make_metadata([[0] * (-(-kv // 16)) for kv in kvs], queries, kvs, 16)
    if case.spans != "none":
        metadata.visible_until = torch.full((sum(queries),), -1, dtype=torch.int32)
    attention.plan(metadata)
    qkv = torch.empty(sum(queries), case.heads + 2 * case.kv_heads, case.dim, dtype=case.dtype)
    query, key, value = qkv.split([case.heads, case.kv_heads, case.kv_heads], 1)
    if case.value_dim is not None:
        value = torch.empty(sum(queries), case.kv_heads, case.value_dim, dtype=case.dtype)
    sinks = torch.empty(case.heads, dtype=case.dtype) if case.sinks else None
    bias = torch.empty(case.heads, case.distances) if case.distances else None
    attention(0, query, key, None if case.latent else value, 0.1, case.softcap, sinks, bias)
    return attention
