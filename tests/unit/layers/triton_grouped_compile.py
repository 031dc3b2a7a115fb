"""Compiles the grouped product for GPUs that are not present, without spilled registers.

Not collected by itself: see test_triton.py. TRITON_CACHE_DIR should be a new folder.
"""

from __future__ import annotations

import pytest
import torch
from triton.runtime.jit import JITFunction

from tests.tools.sass import registers_and_stack
from tests.tools.triton_compiler import compile_for, compile_only
from tgi_cli.layers.triton_grouped import triton_grouped_linear
from tgi_cli.quantization.tiled_weight import ExpertRows


@pytest.mark.parametrize(
    ("capability", "pairs", "experts", "out", "depth", "dtype"),
    [
        (90, 8, 128, 1536, 2048, torch.bfloat16),
        (80, 1024, 32, 5760, 2880, torch.float16),
        (90, 8192, 32, 1024, 704, torch.bfloat16),
        (90, 64, 8, 64, 128, torch.float32),
    ],
)
def test_a_product(
    capability: int,
    pairs: int,
    experts: int,
    out: int,
    depth: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels, compile_kernel = compile_only()
    monkeypatch.setattr(JITFunction, "run", compile_kernel)
    compile_for(capability)
    x, bias = torch.empty(pairs, depth, dtype=dtype), torch.empty(experts, out, dtype=dtype)
    weight = torch.empty(1, 1, 1, dtype=dtype).expand(experts, out, depth)
    ends, order = (torch.empty(size, dtype=torch.int32) for size in (experts, pairs))
    rows = ExpertRows(ends, order, shared_by=2)
    triton_grouped_linear(x, weight, bias if dtype == torch.float16 else None, rows)
    ((_, kernel),) = kernels
    ptx = kernel.asm["ptx"]
    assert kernel.asm["cubin"]
    assert f"sm_{capability}" in ptx
    assert registers_and_stack(kernel)[1] == 0, "it spills"
    assert kernel.metadata.shared <= 160 << 10, "an A100 has no more"
