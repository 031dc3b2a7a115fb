"""Attention speed: decodes relative to memory bandwidth, prefills relative to matrix products.

    python -m tests.benchmarks.attention [--backend triton] [--kv-dtype float8_e4m3fn]

Needs only the repository and torch. A decode's rate counts the keys and values that it reads, a
prefill's the operations that it computes (half of them under a causal mask). There are enough
layers to exceed the caches. Decodes run in a CUDA graph if the backend supports it, as they do in
a server. The default shape is Llama-3.1-8B's: 32 heads, 8 KV heads, head dimension 128.

Other benchmarks use ``figures``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.benchmarks.gpu.device import Device, measure, seconds_of
from tgi_cli.attention import AttentionMetadata, KVSpec, PagedAttention, create_attention

BLOCK = 16
BEYOND_CACHES = 256 << 20
"""Bytes of keys and values to read before the first ones are read again."""
DECODES = [(1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024), (1, 16384), (8, 16384)]
"""Rows, and context length of each."""
PROMPTS = [(1, 512, 512), (1, 8192, 8192), (4, 2048, 2048), (1, 2048, 16384)]
"""Rows, new tokens of each, and context length including them."""


@dataclass(frozen=True)
class Load:
    """The shape of a layer."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Figure:
    """One line of the table: ``rate`` is bytes or operations per second, ``share`` of the limit."""

    name: str
    microseconds: float
    rate: float
    share: float


def figures(
    device: Device,
    load: Load | None = None,
    backend: str | None = None,
    decodes: list[tuple[int, int]] | None = None,
    prompts: list[tuple[int, int, int]] | None = None,
) -> Iterator[Figure]:
    """Measure one layer of each step: time, and share of the device's limit."""
    load = load or Load()
    for rows, context in DECODES if decodes is None else decodes:
        seconds, moved = _decode(device.device, load, backend, rows, context)
        name = f"decode {rows} x {context}"
        yield Figure(name, seconds * 1e6, moved / seconds, moved / seconds / device.bandwidth)
    for rows, tokens, context in PROMPTS if prompts is None else prompts:
        seconds, operations = _prefill(device.device, load, backend, rows, tokens, context)
        rate = operations / seconds
        name = f"prefill {rows} x {tokens} of {context}"
        yield Figure(name, seconds * 1e6, rate, rate / device.matrix_flops)


def _visible(load: Load, context: int) -> int:
    return context if load.window is None else min(context, load.window)


def _decode(
    device: torch.device, load: Load, backend: str | None, rows: int, context: int
) -> tuple[float, float]:
    """Return seconds and bytes of one layer."""
    element = (load.kv_dtype or load.dtype).itemsize
    moved = 2 * rows * _visible(load, context) * load.kv_heads * load.head_dim * element
    layers = max(1, min(64, -(-BEYOND_CACHES // moved))) if device.type == "cuda" else 1
    attention, metadata = _prepared(device, load, backend, layers, rows, 1, context)
    query, key, value = _projections(device, load, rows)

    def step() -> None:
        for layer in range(layers):
            attention(layer, query, key, value, load.head_dim**-0.5)

    if device.type == "cuda" and attention.decode_buffers(rows, metadata.block_table.shape[1]):
        attention.plan_padded(metadata, rows)
        return _graph_seconds(step) / layers, moved
    attention.plan(metadata)
    return seconds_of(step, device) / layers, moved


def _prefill(
    device: torch.device, load: Load, backend: str | None, rows: int, tokens: int, context: int
) -> tuple[float, float]:
    """Return seconds and operations of one layer."""
    attention, metadata = _prepared(device, load, backend, 1, rows, tokens, context)
    attention.plan(metadata)
    query, key, value = _projections(device, load, rows * tokens)
    visible = sum(_visible(load, position + 1) for position in range(context - tokens, context))
    operations = 4.0 * rows * visible * load.heads * load.head_dim

    def step() -> None:
        attention(0, query, key, value, load.head_dim**-0.5)

    if device.type == "cuda":
        return _event_seconds(step, 20), operations
    return seconds_of(step, device), operations


def _prepared(
    device: torch.device,
    load: Load,
    backend: str | None,
    layers: int,
    rows: int,
    tokens: int,
    context: int,
) -> tuple[PagedAttention, AttentionMetadata]:
    """Return attention with a random KV cache in random block order, and the step's metadata."""
    spec = KVSpec(load.kv_heads, load.head_dim, load.window)
    attention = create_attention(backend, [spec] * layers, BLOCK, load.dtype, device, load.kv_dtype)
    width = -(-context // BLOCK)
    attention.allocate(rows * width)
    for cache in (*attention.key_cache, *attention.value_cache):
        for block in cache.split(4096):  # type: ignore[no-untyped-call]
            block.copy_(torch.randn(block.shape, dtype=load.dtype, device=device))
    table = torch.randperm(rows * width).view(rows, width)
    positions = torch.arange(context - tokens, context)
    slots = table[:, positions // BLOCK] * BLOCK + positions % BLOCK
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32).to(device),
        kv_lens=torch.full((rows,), context, dtype=torch.int32).to(device),
        block_table=table.int().to(device),
        slot_mapping=slots.flatten().to(device),
        query_lens_host=[tokens] * rows,
        kv_lens_host=[context] * rows,
        num_decodes=rows if tokens == 1 else 0,
    )
    return attention, metadata


def _projections(device: torch.device, load: Load, tokens: int) -> tuple[Tensor, ...]:
    heads = [load.heads, load.kv_heads, load.kv_heads]
    qkv = torch.randn(tokens, sum(heads), load.head_dim, dtype=load.dtype, device=device)
    return torch.split(qkv, heads, 1)


def _event_seconds(work: Callable[[], object], count: int) -> float:
    """Return the median time of a call over rounds of ``count``, by CUDA events."""
    for _ in range(3):
        work()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / count)
    return float(statistics.median(times))


def _graph_seconds(work: Callable[[], object]) -> float:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return _event_seconds(graph.replay, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", help="one of tgi_cli.attention.BACKENDS")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-dtype")
    parser.add_argument("--decodes", help="ROWSxCONTEXT, such as 1x1024,8x1024")
    parser.add_argument("--prompts", help="ROWSxTOKENSxCONTEXT, such as 1x512x512")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    load = Load(
        arguments.heads,
        arguments.kv_heads,
        arguments.head_dim,
        arguments.window,
        dtype,
        None if arguments.kv_dtype is None else getattr(torch, arguments.kv_dtype),
    )
    device = measure(torch.device(arguments.device), dtype)
    print(f"{device.name}: copies {device.copy_bytes / 1e9:.0f} GB/s, ", end="")
    print(f"products {device.matrix_flops / 1e12:.2f} TFLOP/s")

    def sizes(text: str | None) -> list[tuple[int, ...]] | None:
        if text is None:
            return None
        return [tuple(map(int, part.split("x"))) for part in text.split(",") if part]

    decodes, prompts = sizes(arguments.decodes), sizes(arguments.prompts)
    for figure in figures(device, load, arguments.backend, decodes, prompts):  # type: ignore[arg-type]
        unit, size = ("GB/s", 1e9) if figure.name.startswith("decode") else ("TFLOP/s", 1e12)
        print(
            f"{figure.name:28}{figure.microseconds:10.1f} us {figure.rate / size:9.2f} {unit:8}"
            f"{figure.share:5.0%}"
        )


if __name__ == "__main__":
    main()
