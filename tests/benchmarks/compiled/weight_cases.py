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


def _kind_for(kind: str, capability: int) -> str:
    """What serves weights of a kind: without tensor cores for fp8, e4m3 is widened to 16 bits."""
    return "e4m3" if kind == FP8_INPUTS and capability < FP8_CAPABILITY else kind


def _work(kind: str, rows: float, capability: int) -> dict[str, Work]:
    kind = _kind_for(kind, capability)
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
        kind: str,
        pairs: int,
        top_k: int,
        experts: int,
        outputs: int,
        inputs: int,
        bias: bool,
        down: bool,
        capability: int,
    ) -> None:
        weight = empty_weight(_kind_for(kind, capability), experts, outputs, inputs)
        ends, order = (torch.empty(size, dtype=torch.int32) for size in (experts, pairs))
        x = torch.empty(pairs if down else pairs // top_k, inputs, dtype=BF16)
        biases = torch.empty(experts, outputs, dtype=BF16) if bias else None
        rows = ExpertRows(ends, order, 0 if down else top_k, scattered=down)
        triton_product(x, weight, biases, rows)

    # Experts per token, experts, outputs and inputs of the product before the activation; outputs
    # of the one after it and its inputs; whether they have biases.
    for name, kind, top_k, experts, up, down, bias in (
        ("gpt-oss 20B", "mxfp4", 4, 32, (5760, 2880), (2880, 2880), True),
        ("Qwen 3 30B-A3B", "int4", 8, 128, (1536, 2048), (2048, 768), False),
        ("Qwen 3 30B-A3B", FP8_INPUTS, 8, 128, (1536, 2048), (2048, 768), False),
        ("DeepSeek V3, one of 8", FP8_INPUTS, 8, 256, (512, 7168), (7168, 256), False),
    ):
        for pairs in (32, 4096, 32768):
            for side, sizes in (("up", up), ("down", down)):
                yield Case(
                    "products",
                    f"{name} in {kind}, {side}, {pairs} pairs",
                    partial(product, kind, pairs, top_k, experts, *sizes, bias, side == "down"),
                    partial(_work, kind, pairs / experts),
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
