"""Chooses the attention backend of a CUDA device by timing each with the model's layers.

Decodes run in CUDA graphs, as they do in a server; prompts do not. Times are relative to the
fastest and averaged over steps, so that no step outweighs the others.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from tgi_cli.attention import AttentionMetadata, KVSpec, PagedAttention, create_attention
from tgi_cli.config import BLOCK_SIZE
from tgi_cli.device.distributed import Shard
from tgi_cli.kernels import custom_kernels_enabled
from tgi_cli.layers import Attention
from tgi_cli.models import CausalLM
from tgi_cli.worker.graph_capture import cuda_graphs
from tgi_cli.worker.sizing.memory import release_unused_memory

log = logging.getLogger(__name__)

CANDIDATES = ("triton", "flashinfer")
"""Backends to compare; the first is the default where nothing can be measured."""
DECODES = ((1, 2048), (32, 1024), (128, 1024))
"""Rows, and context of each."""
PROMPTS = ((1, 2048, 2048), (4, 64, 2048))
"""Sequences, new tokens of each, and context including them."""
REPEATS = 5

Seconds = Callable[[PagedAttention, Callable[[], Tensor]], float]
"""Returns the time of a backend's work."""


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """Parameters of attention in a layer; layers with equal ones are measured once."""

    spec: KVSpec
    heads: int
    scale: float
    softcap: float | None = None
    sinks: bool = False


def choose_attention(
    model: CausalLM,
    dtype: torch.dtype,
    device: torch.device,
    cache_dtype: torch.dtype,
    max_tokens: int,
    shard: Shard,
) -> str | None:
    """The backend that is fastest on this device, or None for the default one.

    Measured only where there is a choice: on CUDA, with FlashInfer installed, for a model whose
    layers all attend by :class:`~tgi_cli.layers.Attention`. All shards take the same.

    Args:
        model: whose layers are measured.
        dtype, cache_dtype: of queries, and of cached keys and values.
        device: device of the model.
        max_tokens: most tokens of a sequence that is served.
        shard: this process's share of the model.
    """
    kinds = layer_kinds(model)
    if device.type != "cuda" or not kinds or not custom_kernels_enabled():
        return None
    if find_spec("flashinfer") is None:
        return None

    def make(name: str) -> PagedAttention:
        specs = [kind.spec for kind in kinds]
        return create_attention(name, specs, BLOCK_SIZE, dtype, device, cache_dtype)

    with torch.inference_mode():
        chosen = fastest(CANDIDATES, make, kinds, max_tokens, event_seconds)
    release_unused_memory(device)
    return CANDIDATES[shard.smallest(chosen)]


def layer_kinds(model: CausalLM) -> list[MeasuredLayer]:
    """The distinct layers of a model; empty if any cannot be measured."""
    kinds: dict[MeasuredLayer, None] = {}
    caches = set()
    for layer in model.modules():
        if isinstance(layer, Attention):
            caches.add(layer.layer)
            if layer.slopes is not None:
                return []
            spec = model.kv_specs[layer.layer]
            sinks = layer.sinks is not None
            kinds[MeasuredLayer(spec, layer.heads[0], layer.scale, layer.softcap, sinks)] = None
    return list(kinds) if caches == set(range(len(model.kv_specs))) else []


def fastest(
    candidates: Sequence[str],
    make: Callable[[str], PagedAttention],
    kinds: Sequence[MeasuredLayer],
    max_tokens: int,
    seconds: Seconds,
) -> int:
    """The index of the candidate that takes the least time; the first if none can be measured.

    A candidate that raises is left out.

    Args:
        candidates: names of backends.
        make: creates one with a cache per kind, without blocks.
        kinds: kinds of layers.
        max_tokens: most tokens of a sequence that is served.
        seconds: measures.
    """
    times: dict[int, list[float]] = {}
    for index, name in enumerate(candidates):
        try:
            times[index] = _times(make(name), kinds, max_tokens, seconds)
        # An optional library that compiles on this machine for this GPU may raise any error, and
        # is then not used.
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("attention by %s is not used: %s", name, problem)
    if not times:
        return 0
    best = [min(each) for each in zip(*times.values(), strict=True)]
    relative = {
        index: statistics.geometric_mean(t / b for t, b in zip(own, best, strict=True))
        for index, own in times.items()
    }
    chosen = min(relative, key=lambda index: relative[index])
    shown = ", ".join(f"{candidates[index]} {mean:.2f}" for index, mean in relative.items())
    log.info("attention by %s; times relative to the fastest: %s", candidates[chosen], shown)
    return chosen


def _times(
    attention: PagedAttention, kinds: Sequence[MeasuredLayer], max_tokens: int, seconds: Seconds
) -> list[float]:
    """Seconds of each step."""
    steps = [(rows, 1, context) for rows, context in DECODES]
    steps += PROMPTS
    steps = [(n, min(new, max_tokens), min(context, max_tokens)) for n, new, context in steps]
    size = attention.block_size
    attention.allocate(max(rows * -(-context // size) for rows, _, context in steps))
    for cache in map(attention.raw, attention.stored):
        cache.zero_()
    times = []
    for rows, tokens, context in steps:
        metadata = _metadata(attention, rows, tokens, context)
        work = _work(attention, kinds, rows * tokens)
        fixed = tokens == 1 and attention.decode_buffers(rows, metadata.block_table.shape[1])
        # Twice: libraries and compilers do at first use what a graph cannot hold.
        for _ in range(2):
            if fixed:
                attention.plan_padded(metadata, rows)
            else:
                attention.plan(metadata)
            work()
        times.append(seconds(attention, work))
    return times


def _work(
    attention: PagedAttention, kinds: Sequence[MeasuredLayer], tokens: int
) -> Callable[[], Tensor]:
    """A call of all layers, over what is in the cache."""
    dtype, device = attention.dtype, attention.device
    inputs = [
        (
            torch.ones(tokens, kind.heads, kind.spec.head_dim, dtype=dtype, device=device),
            torch.zeros(kind.heads, dtype=dtype, device=device) if kind.sinks else None,
        )
        for kind in kinds
    ]

    def work() -> Tensor:
        for layer, (kind, (query, sinks)) in enumerate(zip(kinds, inputs, strict=True)):
            output = attention(layer, query, None, None, kind.scale, kind.softcap, sinks)
        return output

    return work


def _metadata(attention: PagedAttention, rows: int, tokens: int, context: int) -> AttentionMetadata:
    """Metadata of sequences whose blocks are scattered over the cache."""
    size, device = attention.block_size, attention.device
    width = -(-context // size)
    order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(0))
    table = order.view(rows, width)
    positions = torch.arange(context - tokens, context)
    slots = table[:, positions // size] * size + positions % size
    return AttentionMetadata(
        torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32).to(device),
        torch.full((rows,), context, dtype=torch.int32).to(device),
        table.int().to(device),
        slots.flatten().to(device),
        [tokens] * rows,
        [context] * rows,
        rows if tokens == 1 else 0,
    )


def event_seconds(attention: PagedAttention, work: Callable[[], Tensor]) -> float:
    """The median of some runs, by CUDA events; of a step of a fixed size, as a CUDA graph."""
    run: Callable[[], object] = work
    if attention.planned is None:
        graph = cuda_graphs()()
        graph.capture(work)
        run = graph.replay
    times: list[float] = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])
