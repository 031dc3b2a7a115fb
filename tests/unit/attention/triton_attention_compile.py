"""Compiles the kernels of attention as it would launch them, for GPUs that are not present.

The interpreter takes Python that the compiler refuses, so equal results alone prove little. Not
collected by itself: see test_triton.py. TRITON_CACHE_DIR should be a new folder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from tests.tools.attention_cases import E4M3, SERVED, SHARED, Case, attend
from tests.tools.paged_run import CPU, make_metadata
from tests.tools.sass import code_of, registers_and_stack
from tests.tools.triton_compiler import compile_for, compile_only
from tgi_cli.attention import KVSpec
from tgi_cli.attention.triton import TritonAttention
from tgi_cli.attention.triton_tiles import REGISTERS_PER_PROCESSOR
from tgi_cli.layers import triton_ops


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Names and kernels that were compiled, and not launched."""
    kernels, compile_kernel = compile_only()
    monkeypatch.setattr(JITFunction, "run", compile_kernel)
    return kernels


SHARED_PER_PROCESSOR = {80: 164 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10}
"""https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities"""

SHORT = ((1, 4096), (600, 1024))
"""Without prompts whose keys are split."""

CASES = {
    "llama 3": (90, SERVED["Llama 3 8B"]),
    "llama 3, 8 bits": (90, replace(SERVED["Llama 3 8B, fp8 cache"], lens=SHORT)),
    "llama 3 on a B200": (100, replace(SERVED["Llama 3 8B"], lens=SHORT)),
    "gpt-oss": (90, replace(SERVED["gpt-oss"], lens=SHORT)),
    "gemma 2": (90, replace(SERVED["Gemma 2 2B"], lens=SHORT)),
    "gemma 2 on a B200": (100, replace(SERVED["Gemma 2 2B"], lens=SHORT)),
    "gemma 2, 8 bits": (90, replace(SERVED["Gemma 2 2B, fp8 cache"], lens=SHORT)),
    "gemma 3 with images": (90, Case(8, 4, 256, window=1024, spans="window", lens=SHORT)),
    "paligemma 2": (90, replace(SERVED["Gemma 2 2B"], spans="whole", lens=SHORT)),
    "drafts, 8 bits": (
        80,
        Case(32, 4, 128, torch.float16, E4M3, lens=((1, 2000), (5, 900))),
    ),
    "phi 3 on an A100": (80, replace(SERVED["Phi 3 mini"], cache_dtype=torch.float8_e5m2)),
    "a small GPU": (89, Case(6, 2, 80, torch.float16, lens=((1, 2000),))),
    "mimo": (90, replace(SERVED["MiMo"], lens=SHORT)),
    "llama 4": (90, replace(SERVED["Llama 4"], lens=SHORT)),
    "falcon rw": (80, replace(SERVED["Falcon RW"], lens=SHORT)),
    "deepseek v3": (90, SERVED["DeepSeek V3"]),
    "deepseek v2 lite, 8 bits": (
        80,
        replace(SERVED["DeepSeek V3, one of 8, fp8 cache"], lens=SHORT),
    ),
    "minicpm 3 on a small GPU": (89, SERVED["MiniCPM 3"]),
    "latents in float32": (
        80,
        Case(16, 1, 576, torch.float32, value_dim=512, sinks=True, latent=True, lens=SHORT),
    ),
    "float32": (80, Case(4, 2, 64, torch.float32, lens=((1, 2000),))),
}


def names_of(case: Case) -> set[str]:
    """The kernels that a case runs."""
    names = {"work_kernel", "_write_kernel"}
    names |= {"latent_kernel"} if case.latent else {"decode_kernel"}
    # A short window is one chunk.
    if (case.window or case.chunk or 4096) > 320:
        names.add("reduce_kernel")
    if max(query for query, _ in case.lens) > 16:
        names |= set() if case.latent else {"prefill_kernel"}
        if (100, 8192) in case.lens and not case.latent:
            names.add("reduce_tiles_kernel")
    return names


@pytest.mark.parametrize(("capability", "case"), CASES.values(), ids=CASES)
def test_attention(capability: int, case: Case, compiled: list[tuple[str, Any]]) -> None:
    compile_for(capability)
    attention = attend(case, capability)
    kernels = dict(compiled)
    assert set(kernels) == names_of(case)
    for name, kernel in kernels.items():
        assert f".target sm_{capability}" in kernel.asm["ptx"]
        assert kernel.metadata.shared <= SHARED[capability]
        registers, stack = registers_and_stack(kernel)
        assert (name, stack) == (name, 0)
        if name == "decode_kernel":
            # Of programs that wait for others, the last ones would run alone.
            (launch,) = attention.launches.values()
            warps = kernel.metadata.num_warps
            at_once = REGISTERS_PER_PROCESSOR // (-(-registers // 8) * 8 * 32 * warps)
            at_once = min(
                at_once, SHARED_PER_PROCESSOR[capability] // (kernel.metadata.shared + 1024)
            )
            assert launch.programs <= max(at_once, 1) * attention.hardware.processors
        if name in ("decode_kernel", "prefill_kernel", "latent_kernel"):
            assert "mma." in kernel.asm["ptx"], "an instruction of tensor cores"
    # Keys and values go to shared memory in pieces of 16 bytes, while others are computed with.
    # (Rows of latents in 8 bits are not: they are widened for two products.)
    by_pieces = {"decode_kernel", "prefill_kernel"}
    if case.cache_dtype is None:
        by_pieces.add("latent_kernel")
    for name in set(kernels) & by_pieces:
        copies = [line for line in kernels[name].asm["ptx"].splitlines() if "cp.async.c" in line]
        assert any("0x10" in line for line in copies)
    # With 32 rows there is no instruction for a group of warps.
    if (
        "prefill_kernel" in kernels
        and capability == 90
        and kernels["prefill_kernel"].metadata.num_warps == 8
    ):
        assert "wgmma.mma_async" in kernels["prefill_kernel"].asm["ptx"]


def test_machine_code_is_read(compiled: list[tuple[str, Any]]) -> None:
    compile_for(90)
    attend(replace(SERVED["Llama 3.2 1B"], lens=((1, 4096),)), 90)
    code = code_of(dict(compiled)["decode_kernel"])
    assert (code.stack, code.spills) == (0, 0)
    assert 0 < code.matrix_instructions < code.loop_length


@pytest.mark.parametrize("window", [None, 2000])
def test_each_kernel_is_compiled_once_whatever_the_step(
    window: int | None, compiled: list[tuple[str, Any]]
) -> None:
    """What serving launches was compiled at warm-up, whose steps are others."""
    compile_for(90)
    attention = TritonAttention([KVSpec(2, 64, window)], 16, torch.float16, CPU)
    attention.allocate(1)
    steps = (
        [(1, 1)],
        [(1, 5000), (1, 3), (7, 7), (64, 9000), (600, 600)],
        [(3, 17)] * 33,
        [(100, 40000), (1, 100_000)],
        [(16, 4096)],
    )
    for lens in steps:
        queries, kvs = (list(each) for each in zip(*lens, strict=True))
        attention.plan(make_metadata([[0] * (-(-kv // 16)) for kv in kvs], queries, kvs, 16))
        qkv = torch.empty(sum(queries), 12, 64, dtype=torch.float16)
        attention(0, *qkv.split([8, 2, 2], 1), 0.1)
    for name in dict(compiled):
        assert len({kernel.hash for each, kernel in compiled if each == name}) == 1, name


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
