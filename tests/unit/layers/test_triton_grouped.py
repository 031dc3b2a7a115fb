"""The grouped product of Triton, in processes of their own: how Triton runs is decided once.

Interpreted, it computes what the reference does. Compiled, for GPUs that are not present, it
shows that the compiler accepts it, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# https://pypi.org/project/triton/#files: Linux has wheels.
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None and sys.platform != "linux", reason="Triton is for Linux"
)

INTERPRETED = """
import torch
from tgi_cli.layers.grouped import Groups, looped_linear
from tgi_cli.layers.triton_grouped import triton_grouped_linear
from tgi_cli.quantization.tiled_weight import ExpertRows

torch.manual_seed(0)
for tokens, top_k, experts, used, out, depth, dtype, bias in (
    (0, 2, 6, 6, 40, 24, torch.float32, True),
    (1, 2, 6, 6, 40, 24, torch.float32, False),
    (23, 3, 5, 3, 70, 40, torch.float32, True),
    (40, 2, 3, 3, 24, 136, torch.float16, True),
):
    groups = Groups.sort(torch.rand(tokens, used).argsort(1)[:, :top_k], experts)
    x = torch.randn(tokens * top_k, depth + 8).to(dtype)[:, :depth]
    weight = torch.randn(experts, out, depth).to(dtype)
    added = torch.randn(experts, out).to(dtype) if bias else None
    wanted = looped_linear(x, weight, added, groups)
    product = triton_grouped_linear(x, weight, added, ExpertRows(groups.ends, groups.pairs))
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(product, wanted, atol=tolerance, rtol=0)
print("equal")
"""

COMPILED = """
import torch
from triton.runtime.jit import JITFunction
from tests.tools.triton_compiler import compile_for, compile_only
from tgi_cli.layers.triton_grouped import triton_grouped_linear
from tgi_cli.quantization.tiled_weight import ExpertRows

kernels, JITFunction.run = compile_only()
for capability, pairs, experts, out, depth, dtype in (
    (90, 8, 128, 1536, 2048, torch.bfloat16),
    (80, 1024, 32, 5760, 2880, torch.float16),
    (90, 8192, 32, 1024, 704, torch.bfloat16),
    (90, 64, 8, 64, 128, torch.float32),
):
    compile_for(capability)
    x, bias = torch.empty(pairs, depth, dtype=dtype), torch.empty(experts, out, dtype=dtype)
    weight = torch.empty(1, 1, 1, dtype=dtype).expand(experts, out, depth)
    ends, order = (torch.empty(size, dtype=torch.int32) for size in (experts, pairs))
    rows = ExpertRows(ends, order, shared_by=2)
    triton_grouped_linear(x, weight, bias if dtype == torch.float16 else None, rows)
    kernel = kernels[-1][1]
    ptx = kernel.asm["ptx"]
    assert kernel.asm["cubin"] and f"sm_{capability}" in ptx
    assert ".local " not in ptx, "it spills"
    assert kernel.metadata.shared <= 160 << 10, "an A100 has no more"
print(len(kernels))
"""


def run(script: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_interpreted_it_is_the_reference() -> None:
    assert run(INTERPRETED, TRITON_INTERPRET="1") == "equal"


def test_it_compiles_without_spilling(tmp_path: Path) -> None:
    assert run(COMPILED, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)) == "4"
