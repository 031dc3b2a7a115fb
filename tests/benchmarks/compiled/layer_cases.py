"""Calls of what layers compute beside attention and products with quantized weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.benchmarks.compiled.case import Case
from tests.benchmarks.compiled.gpus import Work
from tgi_cli.attention import StateMetadata
from tgi_cli.kernels.recurrence import ConvolutionLayer, RecurrenceLayer
from tgi_cli.layers import (
    triton_experts,
    triton_grouped,
    triton_lora,
    triton_ops,
    triton_recurrent,
    triton_scan,
    triton_sort,
)
from tgi_cli.layers.gates import DeltaGates, StepSizes
from tgi_cli.layers.routing import Routing
from tgi_cli.quantization.tiled_weight import ExpertRows

BF16 = torch.bfloat16
ROWS = 32
"""Tokens of a step of decodes."""


def layer_cases() -> Iterator[Case]:
    """Cases of each kernel."""
    yield from _norms()
    yield from _rotations()
    yield from _gates()
    yield from _experts()
    yield from _recurrences()
    yield from _adapters()


def _norms() -> Iterator[Case]:
    def norms(size: int, capability: int) -> None:
        x, residual, weight = torch.empty(3, 4, size, dtype=BF16)
        triton_ops.rms_norm(x, weight[0], 1e-5)
        triton_ops.add_rms_norm(x, residual, weight[0], 1e-5)
        triton_ops.add_layer_norm(x, residual, weight[0], weight[0], 1e-5)

    def heads(capability: int) -> None:
        x, weight = torch.empty(ROWS, 8, 256, dtype=BF16), torch.empty(256, dtype=BF16)
        triton_ops.rms_norm(x, weight, 1e-6)

    for size in (576, 2048, 2880, 4096, 7168, 16384):
        yield Case("ops", f"norms of {size}", partial(norms, size))
    yield Case("ops", "norms of 8 heads of 256", heads)


def _rotations() -> Iterator[Case]:
    def write(
        heads: int, kv_heads: int, dim: int, turned: int, dtype: torch.dtype, norm: bool, _: int
    ) -> None:
        qkv = torch.empty(2, heads + 2 * kv_heads, dim, dtype=BF16)
        angles = torch.empty(2, 1, turned, dtype=BF16)
        weight = torch.empty(heads + kv_heads, dim) if norm else None
        caches = torch.empty(2, 4, 16, kv_heads, dim).to(dtype)
        triton_ops.norm_rotate_write(qkv, weight, 1e-5, angles, angles, *caches, torch.arange(2))

    def turn(capability: int) -> None:
        heads, angles = torch.empty(2, 129, 64, dtype=BF16), torch.empty(2, 1, 64, dtype=BF16)
        triton_ops.rotate_(heads, angles, angles)
        triton_ops.norm_rotate_(heads, torch.empty(129, 64), 1e-6, angles, angles)

    for name, *sizes in (
        ("Llama 3 8B", 32, 8, 128, 128, BF16, False),
        ("Llama 3 8B, fp8 cache", 32, 8, 128, 128, torch.float8_e4m3fn, False),
        ("Qwen 3 30B-A3B", 32, 4, 128, 128, BF16, True),
        ("Qwen 3 30B-A3B, e5m2 cache", 32, 4, 128, 128, torch.float8_e5m2, True),
        ("Gemma 3 4B", 8, 4, 256, 256, BF16, True),
        ("Phi 2", 32, 32, 80, 32, BF16, False),
        ("GLM 4", 32, 2, 128, 64, BF16, False),
        ("Qwen 3.5", 16, 2, 256, 64, BF16, True),
    ):
        yield Case("ops", f"{name}, rotated and written", partial(write, *sizes))  # type: ignore[arg-type]
    yield Case("ops", "DeepSeek V3, rotated", turn)


def _gates() -> Iterator[Case]:
    def gated(formula: str, size: int, capability: int) -> None:
        triton_ops.gated(torch.empty(ROWS, 2 * size, dtype=BF16), formula)

    def clamped(capability: int) -> None:
        triton_ops.clamped_swiglu(torch.empty(ROWS, 2 * 2880, dtype=BF16))

    for name in {formula: name for name, formula in triton_ops.FORMULAS.items()}.values():
        yield Case("ops", f"{name} of 14336", partial(gated, name, 14336))
    yield Case("ops", "gpt-oss's gates of 2880", clamped)


def _experts() -> Iterator[Case]:
    def grouped(
        pairs: int, experts: int, out: int, depth: int, down: bool, bias: bool, capability: int
    ) -> None:
        weight = torch.empty(1, 1, 1, dtype=BF16).expand(experts, out, depth)
        ends, order = (torch.zeros(size, dtype=torch.int32) for size in (experts, pairs))
        rows = ExpertRows(ends, order, 0 if down else 4, scattered=down)
        biases = torch.empty(experts, out, dtype=BF16) if bias else None
        x = torch.empty(pairs if down else pairs // 4, depth, dtype=BF16)
        triton_grouped.triton_grouped_linear(x, weight, biases, rows)

    def work(rows: int, columns: int, depth: int, capability: int) -> dict[str, Work]:
        turn = Work((rows + columns) * depth * 2, 2 * rows * columns * depth)
        return {"_grouped_kernel": turn}

    def around(
        experts: int, routing: Routing, hidden: int, corrected: bool, capability: int
    ) -> None:
        correction = torch.empty(experts) if corrected else None
        logits = torch.empty(8, experts, dtype=BF16)
        weights, chosen = triton_experts.route(logits, routing, correction)
        triton_sort.sort_pairs(chosen, experts)
        triton_experts.combine(torch.empty(8 * routing.top_k, hidden, dtype=BF16), weights)

    sizes = ((8, (16, 64, 128)), (4096, (64, 128, 64)), (32768, (128, 128, 64)))
    for pairs, tile in sizes:
        for name, out, depth, down in (("up", 1536, 2048, False), ("down", 2048, 768, True)):
            yield Case(
                "experts",
                f"Qwen 3 30B-A3B, {name}, {pairs} pairs",
                partial(grouped, pairs, 128, out, depth, down, False),
                partial(work, *tile),
            )
    yield Case(
        "experts",
        "gpt-oss 20B in bf16, up, 8 pairs",
        partial(grouped, 8, 32, 5760, 2880, False, True),
        partial(work, *sizes[0][1]),
    )
    deepseek = Routing(8, router="sigmoid_topk", num_groups=8, top_groups=4, best_of_group=2)
    for name, *given in (
        ("Qwen 3 30B-A3B", 128, Routing(8), 2048, False),
        ("DeepSeek V3", 256, deepseek, 7168, True),
        ("gpt-oss", 32, Routing(4, router="topk_softmax"), 2880, False),
        ("Mixtral 8x7B", 8, Routing(2), 4096, False),
    ):
        yield Case("experts", f"{name}, around the products", partial(around, *given))  # type: ignore[arg-type]


def _recurrences() -> Iterator[Case]:
    step = StateMetadata.of([1, 1, 130], [-1, 2, 0], [0, 2, 3], torch.device("cpu"), {2: (128, 1)})
    tokens = 132

    def convolution(channels: int, taps: int, activation: str | None, capability: int) -> None:
        layer = ConvolutionLayer(torch.empty(taps, channels), None, activation)
        states = torch.empty(4, taps - 1, channels, dtype=BF16)
        triton_recurrent.convolution(layer, torch.empty(tokens, channels, dtype=BF16), states, step)

    def recurrence(layer: RecurrenceLayer, capability: int) -> None:
        query, key = torch.empty(2, tokens, layer.key_heads, layer.key_dim, dtype=BF16)
        value = torch.empty(tokens, layer.heads, layer.value_dim, dtype=BF16)
        gates = torch.empty(tokens, layer.heads, dtype=BF16)
        decay = gates
        if layer.channels:
            decay = torch.empty(tokens, layer.heads * layer.key_dim, dtype=BF16)
        states = torch.empty(4, layer.heads, layer.key_dim, layer.value_dim)
        beta = gates if layer.delta else None
        triton_recurrent.recurrence(layer, (query, key, value), decay, beta, states, step)

    def scan(capability: int) -> None:
        x, steps = torch.empty(2, tokens, 8192)
        b, c = torch.empty(2, tokens, 16)
        states = torch.empty(4, 8192, 16)
        triton_scan.selective_scan(x, steps, torch.empty(8192, 16), b, c, states, step)

    kimi = DeltaGates(torch.empty(32), torch.empty(32 * 128), channels=True)
    for name, run in (
        ("Qwen 3.5 convolution", partial(convolution, 8192, 4, "silu")),
        ("LFM 2 convolution", partial(convolution, 2048, 3, None)),
        (
            "Qwen 3.5 delta rule",
            partial(
                recurrence,
                DeltaGates(torch.empty(32), torch.empty(32)).layer(16, 128, 128, 1e-6),
            ),
        ),
        ("Kimi Linear delta rule", partial(recurrence, kimi.layer(32, 128, 128, 1e-6))),
        (
            "Granite 4 H Mamba-2",
            partial(recurrence, StepSizes(*torch.empty(3, 48)).layer(1, 128, 64)),
        ),
        ("Mamba-1 of 8192", scan),
    ):
        yield Case("recurrent", name, run)


def _adapters() -> Iterator[Case]:
    def adapters(rank: int, capability: int) -> None:
        x, y = torch.empty(ROWS, 4096, dtype=BF16), torch.empty(ROWS, 6144, dtype=BF16)
        a = torch.empty(3, 4 * rank, 4096, dtype=BF16)
        b = torch.empty(4 * rank, 6144, dtype=BF16)
        owners, ends, pairs = (torch.empty(size, dtype=torch.int32) for size in (6144, 4, ROWS))
        triton_lora.add_(y, x, a, b, owners, ends, pairs)

    for rank in (8, 16, 64):
        yield Case("adapters", f"rank {rank}", partial(adapters, rank))
