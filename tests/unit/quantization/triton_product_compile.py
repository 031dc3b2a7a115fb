"""Compiles products with quantized weights, for GPUs that are not present.

The interpreter accepts Python that the compiler refuses, so equal results alone prove little. Not
collected by itself: see test_triton_product.py. TRITON_CACHE_DIR should be a new folder.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from tests.tools.sass import registers_and_stack
from tests.tools.tiled_weights import empty_weight
from tests.tools.triton_compiler import compile_for, compile_only
from tgi_cli.quantization.tiled_weight import ExpertRows
from tgi_cli.quantization.triton_product import triton_product
from tgi_cli.quantization.triton_quantize import quantize_rows


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    kernels, compile_kernel = compile_only()
    monkeypatch.setattr(JITFunction, "run", compile_kernel)
    return kernels


def assert_compiled(kernels: list[tuple[str, Any]], capability: int) -> None:
    _, kernel = kernels[-1]
    assert kernel.asm["cubin"]
    assert f".target sm_{capability}" in kernel.asm["ptx"]
    assert registers_and_stack(kernel)[1] == 0, "it spills"
    assert kernel.metadata.shared <= 160 << 10, "an A100 has no more"


@pytest.mark.parametrize(
    ("kind", "rows", "capability"),
    [
        ("int4", 1, 90),
        ("int4", 40, 80),
        ("int4", 4096, 90),
        ("int4 with minima", 1, 90),
        ("int4 with minima", 4096, 90),
        ("int8 with minima", 40, 80),
        ("int8 with minima", 4096, 90),
        ("int8", 1, 80),
        ("int8", 4096, 90),
        ("mxfp4", 20, 90),
        ("nf4", 1, 90),
        ("e4m3", 300, 80),
        ("e4m3 with e4m3", 8, 90),
        ("e4m3 with e4m3", 4096, 90),
    ],
)
def test_dense(kind: str, rows: int, capability: int, compiled: list[tuple[str, Any]]) -> None:
    compile_for(capability)
    x = torch.empty(rows, 4096, dtype=torch.bfloat16)
    triton_product(x, empty_weight(kind), torch.empty(4096, dtype=x.dtype))
    assert_compiled(compiled, capability)


def test_dense_without_a_bias(compiled: list[tuple[str, Any]]) -> None:
    """Where a fifth stage would spill."""
    compile_for(100)
    x = torch.empty(1, 4096, dtype=torch.bfloat16)
    triton_product(x, empty_weight("int4 in groups of 32"), None)
    assert_compiled(compiled, 100)


GPT_OSS, QWEN, DEEPSEEK = (32, 5760, 2880), (128, 1536, 2048), (256, 512, 7168)
"""Experts, outputs and inputs."""


@pytest.mark.parametrize(
    ("kind", "sizes", "rows", "capability"),
    [
        ("mxfp4", GPT_OSS, 32, 90),
        ("mxfp4", GPT_OSS, 32768, 80),
        ("int4", QWEN, 32768, 80),
        ("e4m3", DEEPSEEK, 32768, 80),
    ],
)
def test_experts(
    kind: str,
    sizes: tuple[int, int, int],
    rows: int,
    capability: int,
    compiled: list[tuple[str, Any]],
) -> None:
    compile_for(capability)
    weight = empty_weight(kind, *sizes)
    pairs = ExpertRows(
        torch.empty(sizes[0], dtype=torch.int32), torch.empty(rows, dtype=torch.int32), shared_by=4
    )
    triton_product(torch.empty(rows // 4, sizes[2]).bfloat16(), weight, None, pairs)
    assert_compiled(compiled, capability)


def test_rounding_of_rows(compiled: list[tuple[str, Any]]) -> None:
    compile_for(90)
    quantize_rows(torch.empty(4, 4096, dtype=torch.bfloat16))
    assert_compiled(compiled, 90)
    assert "cvt.rn.satfinite.e4m3x2" in compiled[0][1].asm["ptx"]
