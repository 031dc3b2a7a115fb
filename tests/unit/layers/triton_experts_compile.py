"""Compiles the kernels around experts and of adapters, for GPUs that are not present.

Not collected by itself: see test_triton.py. TRITON_CACHE_DIR should be a new folder.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from tests.tools.sass import registers_and_stack
from tests.tools.triton_compiler import compile_for, compile_only
from tgi_cli.layers import triton_experts, triton_ops, triton_sort
from tgi_cli.layers.routing import Routing
from tgi_cli.layers.triton_lora import add_


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    kernels, compile_kernel = compile_only()
    monkeypatch.setattr(JITFunction, "run", compile_kernel)
    compile_for(90)
    return kernels


def assert_compiled(kernels: list[tuple[str, Any]], count: int) -> None:
    assert len(kernels) == count
    for _, kernel in kernels:
        assert kernel.asm["cubin"]
        assert ".target sm_90" in kernel.asm["ptx"]
        assert registers_and_stack(kernel)[1] == 0, "it spills"


def test_routing(compiled: list[tuple[str, Any]]) -> None:
    qwen = torch.empty(3, 128, dtype=torch.bfloat16)
    triton_experts.route(qwen, Routing(8))
    deepseek = Routing(8, router="sigmoid_topk", num_groups=8, top_groups=4, best_of_group=2)
    triton_experts.route(torch.empty(3, 256), deepseek, torch.empty(256))
    gpt_oss = torch.empty(3, 32, dtype=torch.bfloat16)
    triton_experts.route(gpt_oss, Routing(4, router="topk_softmax"))
    assert_compiled(compiled, 3)


def test_what_stands_around_products(compiled: list[tuple[str, Any]]) -> None:
    triton_sort.sort_pairs(torch.empty(8, 4, dtype=torch.int32), 32)
    triton_experts.combine(torch.empty(32, 2880, dtype=torch.bfloat16), torch.empty(8, 4))
    triton_ops.clamped_swiglu(torch.empty(32, 5760, dtype=torch.bfloat16))
    assert_compiled(compiled, 3)


@pytest.mark.parametrize("rank", [8, 64])
def test_adapters(rank: int, compiled: list[tuple[str, Any]]) -> None:
    x, y = torch.empty(32, 4096).bfloat16(), torch.empty(32, 6144).bfloat16()
    a, b = torch.empty(3, 4 * rank, 4096).bfloat16(), torch.empty(4 * rank, 6144).bfloat16()
    owners, ends, pairs = (torch.empty(size, dtype=torch.int32) for size in (6144, 4, 32))
    add_(y, x, a, b, owners, ends, pairs)
    assert_compiled(compiled, 2)
