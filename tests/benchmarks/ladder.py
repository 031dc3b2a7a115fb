"""Measure the gain of each optimization on a CPU, from torch's operations to one C++ program.

    python -m tests.benchmarks.ladder CHECKPOINT [--rounds 5]

Runs the same bfloat16 model with each set of optimizations: forward and head for 1, 8 and 32
sequences of 192 tokens, and for a prompt of 512. All variants take turns in one process; figures
are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tgi_cli.attention import AttentionMetadata, create_attention
from tgi_cli.kernels import elementwise, without_cpp_kernels
from tgi_cli.models import load_model, read_config
from tgi_cli.models.cpu_program import compile_program
from tgi_cli.quantization import unquantized

CPU = torch.device("cpu")
BLOCK = 16
CONTEXT = 192
COLUMNS = {"1 decoding": (1, 1), "8": (8, 1), "32": (32, 1), "prompt of 512": (1, 512)}
"""Sequences, and new tokens of each."""


@contextmanager
def plain() -> Iterator[None]:
    """Without prepacked weights: torch reorders them in every product."""
    with without_cpp_kernels(), patch.object(unquantized, "ONEDNN_DTYPES", frozenset()):
        yield


@contextmanager
def products_only() -> Iterator[None]:
    """Use only the matrix products of the C++ kernels."""
    with patch.object(elementwise, "usable", lambda *_: False):
        yield


@dataclass
class Variant:
    """A way to load and run the model, within the context manager ``context``."""

    name: str
    context: Callable[[], Any]
    attention: str
    program: bool = False


VARIANTS = (
    Variant("torch, plain weights", plain, "cpu"),
    Variant("torch, weights packed once", without_cpp_kernels, "cpu"),
    Variant("products in C++", products_only, "cpu"),
    Variant("attention in C++", products_only, "native"),
    Variant("small operations in C++", nullcontext, "native"),
    Variant("one program", nullcontext, "native", program=True),
)


class Contestant:
    """A model loaded for a variant."""

    def __init__(self, variant: Variant, path: Path) -> None:
        self.variant = variant
        with variant.context():
            self.model: Any = load_model(read_config(path), torch.bfloat16, CPU)
            self.attention = create_attention(
                variant.attention, self.model.kv_specs, BLOCK, torch.bfloat16, CPU
            )
            program = compile_program(self.model, self.attention) if variant.program else None
            self.forward = (program or self.model).forward
            self.attention.allocate(32 * (CONTEXT // BLOCK + 1) + 64)

    def milliseconds(self, sequences: int, tokens: int) -> float:
        """Run a step and return its time."""
        length = CONTEXT if tokens == 1 else tokens
        metadata, positions = step_of(sequences, tokens, length)
        ids = positions % 200 + 5
        with ExitStack() as stack:
            stack.enter_context(self.variant.context())
            stack.enter_context(torch.inference_mode())
            began = time.perf_counter()
            self.attention.plan(metadata)
            hidden = self.forward(ids, positions, self.attention)
            self.model.logits(hidden[metadata.query_start_loc[1:].long() - 1])
            return 1e3 * (time.perf_counter() - began)


def step_of(sequences: int, tokens: int, length: int) -> tuple[AttentionMetadata, Tensor]:
    """Return metadata and positions of a step with the last ``tokens`` of each sequence."""
    blocks = -(-length // BLOCK)
    table = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    own = torch.arange(length - tokens, length)
    slots = table.long()[:, own // BLOCK] * BLOCK + own % BLOCK
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(0, sequences * tokens + 1, tokens, dtype=torch.int32),
        kv_lens=torch.full((sequences,), length, dtype=torch.int32),
        block_table=table,
        slot_mapping=slots.flatten(),
        query_lens_host=[tokens] * sequences,
        kv_lens_host=[length] * sequences,
        num_decodes=sequences if tokens == 1 else 0,
    )
    return metadata, own.repeat(sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    contestants = [Contestant(variant, options.model) for variant in VARIANTS]
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.rounds + 1):  # the first one warms up
        for column, (sequences, tokens) in COLUMNS.items():
            for contestant in contestants:
                times = [contestant.milliseconds(sequences, tokens) for _ in range(5)]
                key = contestant.variant.name, column
                taken.setdefault(key, []).append(statistics.median(times))
    print(f"| ms ({torch.get_num_threads()} threads) | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for variant in VARIANTS:
        cells = (f"{statistics.median(taken[variant.name, column][1:]):.1f}" for column in COLUMNS)
        print(f"| {variant.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
