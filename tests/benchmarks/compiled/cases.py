"""Calls that launch each of the kernels, in the sizes of served models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from tests.benchmarks.compiled.gpus import Work
from tests.benchmarks.compiled.weight_cases import weight_calls
from tests.tools import attention_cases
from tgi_cli.attention import StateMetadata
from tgi_cli.attention.triton_latent import MANY_ROWS, latent_tile
from tgi_cli.attention.triton_launch import Launch, LayerKind
from tgi_cli.attention.triton_tiles import HeadTile, next_power_of_2
from tgi_cli.kernels.recurrence import ConvolutionLayer
from tgi_cli.layers import triton_grouped, triton_ops, triton_recurrent, triton_scan
from tgi_cli.layers.gates import DeltaGates, StepSizes
from tgi_cli.quantization.tiled_weight import ExpertRows

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A call, and what a turn of the inner loop of its kernels does, where that is known.

    Attributes:
        group: for the option ``--only``.
        name: of the model or the shapes.
        run: calls what launches kernels, for a compute capability.
        work: by the kernel's name.
    """

    group: str
    name: str
    run: Callable[[int], object]
    work: Callable[[int], dict[str, Work]] = field(default=lambda capability: {})


def all_cases() -> list[Case]:
    """Every kernel, in some sizes."""
    attention = [
        Case("attention", name, partial(attention_cases.attend, case), partial(work, case))
        for name, case, work in _attention()
    ]
    weights = (Case(*call) for call in weight_calls())
    return [*attention, *_operations(), *_experts(), *_recurrences(), *weights]


_AttentionCase = tuple[str, attention_cases.Case, Callable[..., dict[str, Work]]]


def _attention() -> Iterator[_AttentionCase]:
    for name, case in attention_cases.SERVED.items():
        if not case.latent:
            yield name, case, _attention_work
            continue
        # One kernel, with the tiles of few tokens or of many.
        for step, lens in (("decode", (1, 4096)), ("prompt", (600, 1024))):
            yield f"{name}, {step}", replace(case, lens=(lens,)), _latent_work


def _attention_work(case: attention_cases.Case, capability: int) -> dict[str, Work]:
    attention = attention_cases.attend(case, capability)
    kind = LayerKind(case.spec, case.heads, 16, attention.dtype, attention.cache_dtype)
    launch = Launch.of(kind, attention.hardware)
    width = HeadTile.of(case.spec.head_dim).dims + HeadTile.of(case.spec.value_width).dims
    stored = case.spec.head_dim + case.spec.value_width
    return {
        kernel: Work(
            tile.keys * stored * attention.cache_dtype.itemsize,
            2 * tile.rows * tile.keys * width,
        )
        for kernel, tile in (("decode_kernel", launch.decode), ("prefill_kernel", launch.prefill))
    }


def _latent_work(case: attention_cases.Case, capability: int) -> dict[str, Work]:
    attention = attention_cases.attend(case, capability)
    rank, width = case.spec.value_width, case.spec.head_dim
    rows = case.heads if case.lens[0][0] == 1 else MANY_ROWS
    dims = next_power_of_2(rank) + next_power_of_2(width - rank)
    sizes = attention.dtype.itemsize, attention.cache_dtype.itemsize
    tile = latent_tile(attention.hardware, rows, dims, *sizes)
    read = tile.keys * width * attention.cache_dtype.itemsize
    return {"latent_kernel": Work(read, 2 * tile.rows * tile.keys * (width + rank))}


def _operations() -> list[Case]:
    def norms(capability: int) -> None:
        x, residual, weight = torch.empty(3, 4, 4096, dtype=BF16)
        triton_ops.rms_norm(x, weight[0], 1e-5)
        triton_ops.add_rms_norm(x, residual, weight[0], 1e-5)
        triton_ops.add_layer_norm(x, residual, weight[0], weight[0], 1e-5)

    def rotation(cache_dtype: torch.dtype, capability: int) -> None:
        qkv = torch.empty(2, 48, 128, dtype=BF16)
        angles, weight = torch.empty(2, 1, 128, dtype=BF16), torch.empty(40, 128)
        caches = torch.empty(2, 4, 16, 8, 128).to(cache_dtype)
        slots = torch.arange(2)
        triton_ops.norm_rotate_write(qkv, weight, 1e-5, angles, angles, *caches, slots)

    def gates(capability: int) -> None:
        triton_ops.gated(torch.empty(2, 2 * 14336, dtype=BF16), "silu")

    return [
        Case("ops", "norms of 4096", norms),
        Case("ops", "48 heads of 128", partial(rotation, BF16)),
        Case("ops", "48 heads of 128, fp8 cache", partial(rotation, torch.float8_e4m3fn)),
        Case("ops", "SiLU of 14336", gates),
    ]


def _experts() -> list[Case]:
    def grouped(pairs: int, experts: int, out: int, depth: int, capability: int) -> None:
        weight = torch.empty(1, 1, 1, dtype=BF16).expand(experts, out, depth)
        ends, order = (torch.zeros(size, dtype=torch.int32) for size in (experts, pairs))
        triton_grouped.triton_grouped_linear(
            torch.empty(pairs, depth, dtype=BF16), weight, None, ExpertRows(ends, order)
        )

    def work(rows: int, columns: int, depth: int, capability: int) -> dict[str, Work]:
        return {"_kernel": Work((rows + columns) * depth * 2, 2 * rows * columns * depth)}

    return [
        Case(
            "experts",
            f"Qwen 3 30B-A3B, {pairs} pairs",
            partial(grouped, pairs, 128, 1536, 2048),
            partial(work, *tile),
        )
        for pairs, tile in ((8, (16, 64, 128)), (4096, (64, 128, 64)), (32768, (128, 128, 64)))
    ]


def _recurrences() -> list[Case]:
    step = StateMetadata.of([1, 1, 130], [-1, 2, 0], [0, 2, 3], CPU, {2: (128, 1)})
    tokens = 132

    def convolution(capability: int) -> None:
        layer = ConvolutionLayer(torch.empty(4, 8192), None, "silu")
        states = torch.empty(4, 3, 8192, dtype=BF16)
        triton_recurrent.convolution(layer, torch.empty(tokens, 8192, dtype=BF16), states, step)

    def delta(capability: int) -> None:
        layer = DeltaGates(torch.empty(32), torch.empty(32)).layer(16, 128, 128, 1e-6)
        query, key = torch.empty(2, tokens, 16, 128, dtype=BF16)
        value, gates = torch.empty(tokens, 32, 128, dtype=BF16), torch.empty(tokens, 32, dtype=BF16)
        states = torch.empty(4, 32, 128, 128)
        triton_recurrent.recurrence(layer, (query, key, value), gates, gates, states, step)

    def mamba(capability: int) -> None:
        layer = StepSizes(*torch.empty(3, 48)).layer(1, 128, 64)
        query, key = torch.empty(2, tokens, 1, 128, dtype=BF16)
        value, gates = torch.empty(tokens, 48, 64, dtype=BF16), torch.empty(tokens, 48, dtype=BF16)
        states = torch.empty(4, 48, 128, 64)
        triton_recurrent.recurrence(layer, (query, key, value), gates, None, states, step)

    def scan(capability: int) -> None:
        x, steps = torch.empty(2, tokens, 8192)
        b, c = torch.empty(2, tokens, 16)
        states = torch.empty(4, 8192, 16)
        triton_scan.selective_scan(x, steps, torch.empty(8192, 16), b, c, states, step)

    return [
        Case("recurrent", "Qwen 3.5 convolution", convolution),
        Case("recurrent", "Qwen 3.5 delta rule", delta),
        Case("recurrent", "Granite 4 H Mamba-2", mamba),
        Case("recurrent", "Mamba-1 of 8192", scan),
    ]
