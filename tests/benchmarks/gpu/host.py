"""Measure the host's part of steps on a GPU, without one: launches are left out.

    python -m tests.benchmarks.gpu.host [--shape 8b] [--rows 1 32 256] [--before]

A model with the layers and heads of the shape, but few dimensions, runs on the CPU as if it were on
a GPU: modules choose Triton's kernels, arguments are bound and specialized, metadata is prepared.
Kernels are neither compiled nor launched (tests/tools/triton_stub.py), and matrix products only
allocate their result. What is left out is what the driver takes for a launch, 2 to 4 us each, and
for a CUDA graph's, some 10 us. Torch's own small operations run on the CPU. CPU time of the
thread, medians.

"graphs" replays steps as served: decodes, and mixed steps of up to 512 prompt tokens. "eager" runs
the modules: larger mixed steps. ``--before`` lets Triton dispatch each launch itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.benchmarks.gpu.sections import shown
from tests.benchmarks.gpu.shapes import SHAPES, write_shape
from tests.tools.triton_stub import StubGPU, stub_gpu
from tgi_cli.attention import create_attention
from tgi_cli.engine.step import BlockAppend, NewRow, Step
from tgi_cli.models import load_model, read_config
from tgi_cli.quantization import unquantized
from tgi_cli.sampling import sampler
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.cuda_graphs import DecodeGraphs
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.mixed_graphs import MixedGraphs, MixedSize
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.sizing.profile_steps import add_row
from tgi_cli.worker.upload import Uploader

CPU = torch.device("cpu")
CONTEXT, LONGEST, BLOCK, VOCAB = 1024, 2048, 16, 512
PROMPT = 256
"""Prompt tokens of a mixed step."""
STEPS = 40
GREEDY = SamplingParams(temperature=0.0)
ROOFLINE_MS = {"8b": {1: 3.5, 32: 4.5, 256: 11.5}}
"""Milliseconds in which an H200 reads what such a step needs, at 4.3 TB/s; the shares of
docs/benchmarks-kernels.md refer to it."""


class NoGraph:
    """Instead of a CUDA graph: nothing is recorded, and nothing repeated."""

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        return work()

    def replay(self) -> None:
        pass


class ZeroTokens(InputBatch):
    """Tokens are uploaded as to a GPU, and written as one of the vocabulary: what a kernel that was
    not launched has chosen is none."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._on_host = None

    def write(self, flat_indices: Tensor, token_ids: Tensor) -> None:
        super().write(flat_indices, torch.zeros_like(token_ids))

    def record_write(self, flat_indices: Tensor, token_ids: Tensor) -> None:
        super().record_write(flat_indices, torch.zeros_like(token_ids))


def unlaunched_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A matrix product that is not computed."""
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@contextmanager
def runner_of(shape: str, rows: int, cached: bool) -> Iterator[tuple[ModelRunner, StubGPU]]:
    """A runner with graphs over a model of the shape's layers and heads."""
    small = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": VOCAB,
        "head_dim": 16,
        "max_position_embeddings": LONGEST,
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_shape(shape, folder, **small)
        model = load_model(read_config(folder), torch.float16, CPU, load_format="dummy")
        gpu = stack.enter_context(stub_gpu(zeroed=False))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(patch.object(unquantized, "linear", unlaunched_linear))
        stack.enter_context(patch.object(sampler, "can_sample", lambda logits: False))
        if not cached:
            stack.enter_context(uncached_launches())
        attention = create_attention("triton", model.kv_specs, BLOCK, torch.float16, CPU)
        attention.allocate(64)
        table = ZeroTokens(rows, LONGEST, BLOCK, Uploader(CPU, packed=True))
        runner = ModelRunner(model, attention, table, VOCAB)
        make = lambda: NoGraph  # noqa: E731
        decodes = DecodeGraphs(model, attention, table, VOCAB, [rows], make, greedy=sampler.greedy)
        decodes.capture()
        mixed = MixedGraphs(
            model,
            attention,
            table,
            [MixedSize(rows, PROMPT)],
            make,
            vocab_size=VOCAB,
            greedy=sampler.greedy,
        )
        mixed.capture()
        runner.graphs, runner.mixed_graphs = decodes, mixed
        yield runner, gpu


@contextmanager
def uncached_launches() -> Iterator[None]:
    """Have Triton dispatch each launch."""
    from tgi_cli.device.triton_launch import CachedKernel

    with patch.object(CachedKernel, "__getitem__", lambda self, grid: self.kernel[grid]):
        yield


def step_of(number: int, rows: int, prompt: int) -> Step:
    """Decodes of ``rows``, or of one fewer and a prompt. A row needs a block every 16 steps."""
    decodes = rows - bool(prompt)
    step = Step(number, num_decodes=decodes)
    for row in range(decodes):
        length = CONTEXT - row % BLOCK + number
        if not number:
            step.new.append(_row(row, length))
        elif length % BLOCK == 1:
            step.appended.append(BlockAppend(row, length // BLOCK, [row % 64]))
        add_row(step, row, length - 1, 1)
    if prompt:
        step.new.append(_row(decodes, prompt))
        add_row(step, decodes, 0, prompt)
    return step


def _row(row: int, length: int) -> NewRow:
    blocks = [block % 64 for block in range(-(-length // BLOCK))]
    return NewRow(row, row, [1] * length, length, blocks, GREEDY)


def microseconds(runner: ModelRunner, rows: int, prompt: int) -> tuple[float, float]:
    """Of launching a step, and of sampling and reading its result."""
    launches, results = [], []
    for number in range(STEPS):
        step = step_of(number, rows, prompt)
        began = time.thread_time()
        handle = runner.launch(step)
        launched = time.thread_time()
        runner.sample(handle).wait()
        results.append(time.thread_time() - launched)
        launches.append(launched - began)
    settled = slice(STEPS // 4, None)
    return tuple(1e6 * statistics.median(each[settled]) for each in (launches, results))  # type: ignore[return-value]


def measure(shape: str, rows: int, cached: bool = True) -> Iterator[dict[str, Any]]:
    """Rows of the table: each kind of step, by graphs and eager."""
    with runner_of(shape, rows, cached) as (runner, _):
        graphs = runner.graphs, runner.mixed_graphs
        for kind, prompt in (("decode", 0), ("mixed", PROMPT)):
            for how in ("graphs", "eager"):
                runner.graphs, runner.mixed_graphs = graphs if how == "graphs" else (None, None)
                launch, result = microseconds(runner, rows, prompt)
                yield {
                    "step": kind,
                    "rows": rows,
                    "how": how,
                    "launch us": launch,
                    "sample and result us": result,
                    "all us": launch + result,
                }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--before", action="store_true", help="let Triton dispatch each launch")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("Triton interprets: unset TRITON_INTERPRET")
    torch.set_num_threads(1)
    columns: list[str] = []
    for rows in options.rows:
        for row in measure(options.shape, rows, not options.before):
            roofline = ROOFLINE_MS.get(options.shape, {}).get(rows)
            if roofline is not None:
                row["of the roofline's step"] = row["all us"] / (1e3 * roofline)
            if not columns:
                columns = list(row)
                print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
            print(f"| {' | '.join(shown(row.get(name)) for name in columns)} |", flush=True)


if __name__ == "__main__":
    main()
