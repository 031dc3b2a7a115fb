"""Compiles the kernels of layers with a state, for GPUs that are not present.

Not collected by itself: see test_triton.py. TRITON_CACHE_DIR should be a new folder.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from tests.tools.triton_compiler import compile_for, compile_only
from tgi_cli.attention import StateMetadata
from tgi_cli.kernels.recurrence import ConvolutionLayer, RecurrenceLayer
from tgi_cli.layers import triton_recurrent, triton_scan
from tgi_cli.layers.gates import DeltaGates, GivenGates, StepSizes

CPU = torch.device("cpu")
PREFILL = StateMetadata.of([1, 1, 130], [-1, 2, 0], [0, 2, 3], CPU, {2: (128, 1)})
ONE_LONGER = StateMetadata.of([129], [-1], [0], CPU)


def decodes(rows: int, offset: int = 0) -> StateMetadata:
    """Of a graph; the slots lie as in its inputs, at any multiple of 8 bytes."""
    slots = torch.zeros(2 * rows + offset, dtype=torch.int64)[offset:].view(2, rows)
    return StateMetadata.of_decodes(slots[0], slots[1])


STEPS = (PREFILL, ONE_LONGER, decodes(1), decodes(3, 1), decodes(16))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Names and kernels that were compiled, and not launched."""
    kernels, compile_kernel = compile_only()
    monkeypatch.setattr(JITFunction, "run", compile_kernel)
    return kernels


def assert_one_kernel(kernels: list[tuple[str, Any]], capability: int) -> None:
    """Every step runs the same one: its sums have one order, whatever is in the step."""
    assert len(kernels) == len(STEPS)
    assert len({kernel.hash for _, kernel in kernels}) == 1
    _, kernel = kernels[0]
    assert kernel.asm["cubin"]
    assert f".target sm_{capability}" in kernel.asm["ptx"]
    assert kernel.metadata.shared < 48 * 1024


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("channels", "taps", "bias", "activation", "dtype"),
    [
        (8192, 4, False, "silu", torch.bfloat16),  # Qwen 3.5
        (2048, 3, False, None, torch.bfloat16),  # LFM 2
        (3328, 4, True, "silu", torch.float32),  # Granite 4 H
    ],
)
def test_convolution(
    channels: int,
    taps: int,
    bias: bool,
    activation: str | None,
    dtype: torch.dtype,
    capability: int,
    compiled: list[tuple[str, Any]],
) -> None:
    compile_for(capability)
    layer = ConvolutionLayer(
        torch.empty(taps, channels), torch.empty(channels) if bias else None, activation
    )
    states = torch.empty(4, taps - 1, channels, dtype=dtype)
    for step in STEPS:
        x = torch.empty(sum(step.query_lens_host), channels, dtype=dtype)
        triton_recurrent.convolution(layer, x, states, step)
    assert_one_kernel(compiled, capability)


def delta(heads: int, key_heads: int, dim: int, **options: Any) -> RecurrenceLayer:
    numbers = heads * (dim if options.get("channels") else 1)
    gates = DeltaGates(torch.empty(heads), torch.empty(numbers), **options)
    return gates.layer(key_heads, dim, dim, 1e-6)


CASES = {
    "Qwen 3.5": delta(32, 16, 128),
    "Kimi Linear": delta(32, 32, 128, channels=True),
    "a bounded decay": delta(8, 8, 128, channels=True, form="sigmoid", floor=-5.0),
    "OLMo Hybrid": delta(30, 30, 96, factor=2.0),
    "given": GivenGates(32).layer(16, 128, 128, 1e-6),
    "Granite 4 H": StepSizes(*torch.empty(3, 48)).layer(1, 128, 64),
    "Nemotron H": StepSizes(*torch.empty(3, 64), 0.001).layer(8, 128, 64),
    "a large state": StepSizes(*torch.empty(3, 24)).layer(1, 256, 64),
}


@pytest.mark.parametrize(("capability", "dtype"), [(89, torch.float32), (90, torch.bfloat16)])
@pytest.mark.parametrize("layer", CASES.values(), ids=CASES)
def test_recurrence(
    layer: RecurrenceLayer,
    dtype: torch.dtype,
    capability: int,
    compiled: list[tuple[str, Any]],
) -> None:
    compile_for(capability)
    keys = layer.key_heads * layer.key_dim
    values = layer.heads * layer.value_dim
    gates = torch.float32 if layer.rate is None else dtype
    states = torch.empty(4, layer.heads, layer.key_dim, layer.value_dim)
    for step in STEPS:
        tokens = sum(step.query_lens_host)
        mixed = torch.empty(tokens, 2 * keys + values, dtype=dtype)
        query, key, value = mixed.split((keys, keys, values), 1)
        numbers = layer.heads * (layer.key_dim if layer.channels else 1)
        decay = torch.empty(tokens, numbers, dtype=gates)
        beta = torch.empty(tokens, layer.heads, dtype=gates) if layer.delta else None
        qkv = (
            query.unflatten(1, (layer.key_heads, layer.key_dim)),
            key.unflatten(1, (layer.key_heads, layer.key_dim)),
            value.unflatten(1, (layer.heads, layer.value_dim)),
        )
        triton_recurrent.recurrence(layer, qkv, decay, beta, states, step)
    assert_one_kernel(compiled, capability)


@pytest.mark.parametrize(("channels", "size"), [(8192, 16), (5120, 128)])
def test_selective_scan(channels: int, size: int, compiled: list[tuple[str, Any]]) -> None:
    compile_for(90)
    states = torch.empty(4, channels, size)
    for step in STEPS:
        tokens = sum(step.query_lens_host)
        x, steps = torch.empty(2, tokens, channels)
        b, c = torch.empty(2, tokens, size)
        a = torch.empty(channels, size)
        triton_scan.selective_scan(x, steps, a, b, c, states, step)
    assert_one_kernel(compiled, 90)
