"""Calls of products with quantized weights, and of the sampler."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.benchmarks.compiled.case import Case
from tests.benchmarks.compiled.gpus import Work
from tests.tools.tiled_weights import KINDS, empty_weight
from tgi_cli.kernels.sample import Draw
from tgi_cli.quantization.tiled_weight import ExpertRows
from tgi_cli.quantization.triton_dense import BLOCK_K, BLOCK_N, few_rows_product
from tgi_cli.quantization.triton_dense import tile_of as dense_tile_of
from tgi_cli.quantization.triton_product import tile_of, triton_product
from tgi_cli.quantization.triton_quantize import quantize_rows
from tgi_cli.sampling.triton_sampler import triton_sample

BF16 = torch.bfloat16
FP8_INPUTS = "e4m3 with e4m3"
FP8_CAPABILITY = 89
"""The first one with tensor cores for fp8: what rounds activations is not launched on others."""
EARLY_CAPABILITY = 90
"""The first one that begins kernels early."""


def weight_cases() -> Iterator[Case]:
    """Cases of each kernel."""
    yield from _products()
    yield from _dense_products()
    yield from _experts()
    yield Case("products", "a row of 4096 to e4m3", _rounding)
    yield from _samplers()


def _work(kind: str, rows: float, capability: int) -> dict[str, Work]:
    _, bits, depth, _, _ = KINDS[kind]
    block_m, block_n, _ = tile_of(rows, empty_weight(kind))
    codes, operands = depth * block_n, depth * (8 // bits)
    width = 1 if kind == FP8_INPUTS else 2
    turn = Work(codes + operands * block_m * width, 2 * operands * block_m * block_n)
    return {"_product_kernel": turn}


def _products() -> Iterator[Case]:
    def product(kind: str, rows: int, capability: int) -> None:
        if kind != FP8_INPUTS or capability >= FP8_CAPABILITY:
            triton_product(torch.empty(rows, 4096, dtype=BF16), empty_weight(kind), None)

    for kind in KINDS:
        for rows in (1, 32, 64, 4096):
            run, work = partial(product, kind, rows), partial(_work, kind, rows)
            yield Case("products", f"{kind}, {rows} rows", run, work)


def _dense_products() -> Iterator[Case]:
    """Of few rows; begun before the kernel before has ended where a GPU can."""

    def product(rows: int, outputs: int, inputs: int, capability: int) -> None:
        x, weight = torch.empty(rows, inputs, dtype=BF16), torch.empty(outputs, inputs, dtype=BF16)
        few_rows_product(x, weight, None, dependent=capability >= EARLY_CAPABILITY)

    def work(rows: int, capability: int) -> dict[str, Work]:
        block_m, _ = dense_tile_of(rows)
        turn = Work((block_m + BLOCK_N) * BLOCK_K * 2, 2 * block_m * BLOCK_N * BLOCK_K)
        return {"_few_rows_kernel": turn}

    for name, outputs, inputs in (
        ("Llama 3 8B's gates", 28672, 4096),
        ("Llama 3 8B's attention", 4096, 4096),
        ("gpt-oss' queries and keys", 5120, 2880),
    ):
        for rows in (1, 32, 64):
            run = partial(product, rows, outputs, inputs)
            yield Case("products", f"{name} in bf16, {rows} rows", run, partial(work, rows))


def _experts() -> Iterator[Case]:
    def product(
        kind: str, pairs: int, top_k: int, experts: int, outputs: int, inputs: int, capability: int
    ) -> None:
        if kind == FP8_INPUTS and capability < FP8_CAPABILITY:
            return
        weight = empty_weight(kind, experts, outputs, inputs)
        ends, order = (torch.empty(size, dtype=torch.int32) for size in (experts, pairs))
        x = torch.empty(pairs // top_k, inputs, dtype=BF16)
        triton_product(x, weight, None, ExpertRows(ends, order, shared_by=top_k))

    for name, kind, *sizes in (
        ("gpt-oss 20B", "mxfp4", 4, 32, 5760, 2880),
        ("Qwen 3 30B-A3B", "int4", 8, 128, 1536, 2048),
        ("DeepSeek V3, one of 8", FP8_INPUTS, 8, 256, 512, 7168),
    ):
        for pairs in (32, 4096, 32768):
            yield Case(
                "products",
                f"{name} in {kind}, {pairs} pairs",
                partial(product, kind, pairs, *sizes),
                partial(_work, kind, pairs / sizes[1]),
            )


def _rounding(capability: int) -> None:
    """With one scale, for torch's product; products in blocks round groups of 128."""
    if capability >= FP8_CAPABILITY:
        quantize_rows(torch.empty(32, 4096, dtype=BF16))


def _samplers() -> Iterator[Case]:
    def upload(*arrays: NDArray[Any]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def sample(vocabulary: int, draws: bool, filtered: bool, same: bool, capability: int) -> None:
        logits, scores = torch.empty(2, 2, vocabulary)
        draw = Draw(np.ones(2), np.ones(2, np.float32), top_p=np.ones(2) if filtered else None)
        triton_sample(logits, logits if same else scores, draw if draws else None, upload)

    for vocabulary in (128_256, 262_144):
        for name, *how in (
            ("greedy", False, False, True),
            ("temperature", True, False, True),
            ("top-p", True, True, True),
            ("top-p and penalties", True, True, False),
        ):
            run = partial(sample, vocabulary, *how)
            yield Case("sampler", f"{name} of {vocabulary}", run)
