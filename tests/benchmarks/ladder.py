"""What each step from torch's operations to a program of C++ kernels gives, on a CPU.

    python -m tests.benchmarks.ladder CHECKPOINT [--rounds 5]

The same model on each rung of the ladder, in bfloat16: forward and head of 1, 8 and 32 sequences
of 192 tokens, and of a prompt of 512. All rungs take turns in one process; medians.
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
"""Sequences, and tokens of each in the step."""


@contextmanager
def plain() -> Iterator[None]:
    """Weights as they are: torch brings them into its kernels' order in every product."""
    with without_cpp_kernels(), patch.object(unquantized, "ONEDNN_DTYPES", frozenset()):
        yield


@contextmanager
def products_alone() -> Iterator[None]:
    """Of the kernels in C++."""
    with patch.object(elementwise, "usable", lambda *_: False):
        yield


@dataclass
class Rung:
    """One way to run the model; everything about it happens within ``inside``."""

    name: str
    inside: Callable[[], Any]
    attention: str
    program: bool = False


RUNGS = (
    Rung("torch, plain weights", plain, "cpu"),
    Rung("torch, weights packed once", without_cpp_kernels, "cpu"),
    Rung("products in C++", products_alone, "cpu"),
    Rung("attention in C++", products_alone, "native"),
    Rung("small operations in C++", nullcontext, "native"),
    Rung("one program", nullcontext, "native", program=True),
)


class Contestant:
    """A loaded model on its rung."""

    def __init__(self, rung: Rung, path: Path) -> None:
        self.rung = rung
        with rung.inside():
            self.model: Any = load_model(read_config(path), torch.bfloat16, CPU)
            self.attention = create_attention(
                rung.attention, self.model.kv_specs, BLOCK, torch.bfloat16, CPU
            )
            program = compile_program(self.model, self.attention) if rung.program else None
            self.forward = (program or self.model).forward
            self.attention.allocate(32 * (CONTEXT // BLOCK + 1) + 64)

    def milliseconds(self, sequences: int, tokens: int) -> float:
        """Of a step."""
        length = CONTEXT if tokens == 1 else tokens
        metadata, positions = step_of(sequences, tokens, length)
        ids = positions % 200 + 5
        with ExitStack() as stack:
            stack.enter_context(self.rung.inside())
            stack.enter_context(torch.inference_mode())
            began = time.perf_counter()
            self.attention.plan(metadata)
            hidden = self.forward(ids, positions, self.attention)
            self.model.logits(hidden[metadata.query_start_loc[1:].long() - 1])
            return 1e3 * (time.perf_counter() - began)


def step_of(sequences: int, tokens: int, length: int) -> tuple[AttentionMetadata, Tensor]:
    """A step that computes the last ``tokens`` of each sequence of ``length``, and positions."""
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
    contestants = [Contestant(rung, options.model) for rung in RUNGS]
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.rounds + 1):  # the first is not counted
        for column, (sequences, tokens) in COLUMNS.items():
            for contestant in contestants:
                times = [contestant.milliseconds(sequences, tokens) for _ in range(5)]
                key = contestant.rung.name, column
                taken.setdefault(key, []).append(statistics.median(times))
    print(f"| ms ({torch.get_num_threads()} threads) | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for rung in RUNGS:
        cells = (f"{statistics.median(taken[rung.name, column][1:]):.1f}" for column in COLUMNS)
        print(f"| {rung.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
