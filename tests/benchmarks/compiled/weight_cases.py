"""Calls of the sampler, of products with quantized weights, and of what stands around experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.benchmarks.compiled.gpus import Work
from tests.tools.tiled_weights import KINDS, empty_weight
from tgi_cli.kernels.sample import Draw
from tgi_cli.layers import triton_experts, triton_lora, triton_sort
from tgi_cli.layers.routing import Routing
from tgi_cli.quantization.tiled_weight import ExpertRows
from tgi_cli.quantization.triton_product import tile_of, triton_product
from tgi_cli.sampling.triton_sampler import triton_sample

BF16 = torch.bfloat16
Call = tuple[str, str, Any, Any]
"""The arguments of :class:`tests.benchmarks.compiled.cases.Case`."""


def weight_calls() -> list[Call]:
    """The arguments of cases."""
    return [*_products(), *_around_experts(), *_samplers()]


def _products() -> list[Call]:
    def product(kind: str, rows: int, capability: int) -> None:
        triton_product(torch.empty(rows, 4096, dtype=BF16), empty_weight(kind), None)

    def experts(pairs: int, capability: int) -> None:
        weight = empty_weight("mxfp4", 32, 5760, 2880)
        ends, order = (torch.empty(size, dtype=torch.int32) for size in (32, pairs))
        x = torch.empty(pairs // 4, 2880, dtype=BF16)
        triton_product(x, weight, None, ExpertRows(ends, order, shared_by=4))

    def work(kind: str, rows: float, capability: int) -> dict[str, Work]:
        form, bits, depth, _, _ = KINDS[kind]
        block_m, block_n, _ = tile_of(rows, form)
        codes, operands = depth * block_n, depth * (8 // bits)
        width = 1 if kind == "e4m3 with e4m3" else 2
        turn = Work(codes + operands * block_m * width, 2 * operands * block_m * block_n)
        return {"_product_kernel": turn}

    return [
        *(
            (
                "products",
                f"{kind}, {rows} rows",
                partial(product, kind, rows),
                partial(work, kind, rows),
            )
            for kind in KINDS
            if kind != "e4m3 with e4m3"
            for rows in (1, 32, 64, 4096)
        ),
        *(
            (
                "products",
                f"gpt-oss 20B in mxfp4, {pairs} pairs",
                partial(experts, pairs),
                partial(work, "mxfp4", pairs / 32),
            )
            for pairs in (32, 4096, 32768)
        ),
    ]


def _around_experts() -> list[Call]:
    def around(capability: int) -> None:
        weights, chosen = triton_experts.route(torch.empty(8, 128, dtype=BF16), Routing(8))
        triton_sort.sort_pairs(chosen, 128)
        triton_experts.combine(torch.empty(64, 2048, dtype=BF16), weights)

    def adapters(rank: int, capability: int) -> None:
        x, y = torch.empty(32, 4096, dtype=BF16), torch.empty(32, 6144, dtype=BF16)
        a = torch.empty(3, 4 * rank, 4096, dtype=BF16)
        b = torch.empty(4 * rank, 6144, dtype=BF16)
        owners, ends, pairs = (torch.empty(size, dtype=torch.int32) for size in (6144, 4, 32))
        triton_lora.add_(y, x, a, b, owners, ends, pairs)

    return [
        ("experts", "Qwen 3 30B-A3B", around, _unknown),
        *(("adapters", f"rank {rank}", partial(adapters, rank), _unknown) for rank in (16, 64)),
    ]


def _samplers() -> list[Call]:
    def upload(*arrays: NDArray[Any]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def sample(draws: bool, filtered: bool, capability: int) -> None:
        logits = torch.empty(2, 128_256)
        draw = Draw(np.ones(2), np.ones(2, np.float32), top_p=np.ones(2) if filtered else None)
        triton_sample(logits, logits, draw if draws else None, upload)

    return [
        ("sampler", name, partial(sample, *how), _unknown)
        for name, how in (
            ("greedy", (False, False)),
            ("temperature", (True, False)),
            ("top-p", (True, True)),
        )
    ]


def _unknown(capability: int) -> dict[str, Work]:
    return {}
