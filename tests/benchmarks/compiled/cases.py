"""Calls that launch each of the kernels, in the sizes of served models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from tests.benchmarks.compiled.case import Case
from tests.benchmarks.compiled.gpus import Work
from tests.benchmarks.compiled.layer_cases import layer_cases
from tests.benchmarks.compiled.weight_cases import weight_cases
from tests.tools import attention_cases
from tests.tools.paged_run import CPU
from tgi_cli.attention import KVSpec
from tgi_cli.attention.triton import TritonAttention
from tgi_cli.attention.triton_cache import list_pages
from tgi_cli.attention.triton_latent import MANY_ROWS, latent_tile
from tgi_cli.attention.triton_launch import Launch, LayerKind
from tgi_cli.attention.triton_tiles import HeadTile, next_power_of_2

GRAPH_ROWS, GRAPH_BLOCKS = 32, 8192
"""Of what a CUDA graph of decodes reads."""


def all_cases() -> list[Case]:
    """Every kernel, in some sizes."""
    return [*_attention(), *_metadata(), *layer_cases(), *weight_cases()]


def _attention() -> Iterator[Case]:
    for name, case in attention_cases.SERVED.items():
        if not case.latent:
            run, work = partial(attention_cases.attend, case), partial(_attention_work, case)
            yield Case("attention", name, run, work)
            continue
        # One kernel, with the tiles of few tokens or of many.
        for step, lens in (("decode", (1, 4096)), ("prompt", (600, 1024))):
            own = replace(case, lens=(lens,))
            run, work = partial(attention_cases.attend, own), partial(_latent_work, own)
            yield Case("attention", f"{name}, {step}", run, work)


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


def _metadata() -> Iterator[Case]:
    """What writes down where a step's keys are."""

    def stage(capability: int) -> None:
        attention = TritonAttention([KVSpec(8, 128)], 16, torch.bfloat16, CPU)
        attention.decode_buffers(GRAPH_ROWS, GRAPH_BLOCKS)
        attention.plan_padded(None, GRAPH_ROWS)

    def pages(window: int, capability: int) -> None:
        table = torch.empty(1, GRAPH_BLOCKS, dtype=torch.int32).expand(GRAPH_ROWS, -1)
        lens, starts, listed = torch.empty(3, GRAPH_ROWS + 1, dtype=torch.int32)
        list_pages(table, lens[:-1], starts, listed, window, 16)

    yield Case("attention", "32 decodes of a graph", stage)
    yield Case("attention", "FlashInfer's pages", partial(pages, 0))
    yield Case("attention", "FlashInfer's pages in a window", partial(pages, 4096))
