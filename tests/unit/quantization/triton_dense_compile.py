"""Compiles products of dense weights with few rows, for GPUs that are not present.

The interpreter accepts Python that the compiler refuses, and does not begin kernels early. Not
collected by itself: see test_triton_dense.py. TRITON_CACHE_DIR should be a new folder.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from tests.tools.sass import (
    FETCH,
    GLOBAL,
    SIGNAL,
    WAIT,
    opcodes_before,
    opcodes_of,
    registers_and_stack,
)
from tests.tools.triton_compiler import compile_for, compile_only
from tgi_cli.layers import triton_ops
from tgi_cli.quantization.triton_dense import few_rows_product

BF16 = torch.bfloat16


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    kernels, compile_kernel = compile_only()
    monkeypatch.setattr(JITFunction, "run", compile_kernel)
    return kernels


def product(
    rows: int, outputs: int, inputs: int, dependent: bool, dtype: torch.dtype = BF16
) -> None:
    x, weight = torch.empty(rows, inputs, dtype=dtype), torch.empty(outputs, inputs, dtype=dtype)
    few_rows_product(x, weight, None, dependent)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "capability", "dtype"),
    [
        (1, 4096, 4096, 80, BF16),
        (32, 4096, 2880, 80, torch.float16),
        (64, 4096, 4096, 80, BF16),
        (1, 4096, 4096, 90, BF16),
        (64, 28672, 4096, 90, BF16),
        (32, 4096, 4096, 100, BF16),
    ],
)
def test_it_fits(
    rows: int,
    outputs: int,
    inputs: int,
    capability: int,
    dtype: torch.dtype,
    compiled: list[tuple[str, Any]],
) -> None:
    compile_for(capability)
    product(rows, outputs, inputs, False, dtype)
    _, kernel = compiled[-1]
    assert f".target sm_{capability}" in kernel.asm["ptx"]
    assert registers_and_stack(kernel)[1] == 0, "it spills"
    assert 2 * (kernel.metadata.shared + 1024) <= 228 << 10, "two programs of a multiprocessor"
    assert not {FETCH, WAIT, SIGNAL}.intersection(_beginning(kernel))


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "capability"),
    [
        (1, 4096, 4096, 90),
        (32, 28672, 4096, 90),
        (64, 4096, 2880, 90),
        (16, 4096, 4096, 100),
    ],
)
def test_weights_are_fetched_before_the_wait_and_memory_is_read_after_it(
    rows: int, outputs: int, inputs: int, capability: int, compiled: list[tuple[str, Any]]
) -> None:
    """See the rules of tgi_cli.device.dependent_launch."""
    compile_for(capability)
    product(rows, outputs, inputs, True)
    _, kernel = compiled[-1]
    assert kernel.metadata.launch_pdl
    before = opcodes_before(kernel, WAIT)
    # 64 rows of the weight, of 8 lines each, by 128 threads.
    assert before.count(FETCH) == 4
    assert not {*GLOBAL}.intersection(before)
    assert {"STG", "LDGSTS"} <= set(opcodes_of(kernel))
    assert registers_and_stack(kernel)[1] == 0, "it spills"


@pytest.mark.parametrize(("capability", "signals"), [(80, 0), (90, 1), (100, 1)])
def test_what_comes_before_a_product_lets_it_begin(
    capability: int, signals: int, compiled: list[tuple[str, Any]]
) -> None:
    """Before it reads anything, if the GPU can."""
    compile_for(capability)
    x, residual = torch.empty(2, 4, 4096, dtype=BF16)
    triton_ops.add_rms_norm(x, residual, x[0], 1e-5)
    triton_ops.gated(torch.empty(4, 2 * 4096, dtype=BF16), "silu")
    assert len(compiled) == 2
    for _, kernel in compiled:
        opcodes = opcodes_of(kernel)
        assert opcodes.count(SIGNAL) == signals
        assert SIGNAL in _beginning(kernel) or not signals
        assert WAIT not in opcodes
        assert not kernel.metadata.launch_pdl


def _beginning(kernel: Any) -> list[str]:
    """The opcodes before the first access to global memory."""
    opcodes = opcodes_of(kernel)
    return opcodes[: next(i for i, opcode in enumerate(opcodes) if opcode in GLOBAL)]
