"""Run by test_graphs_triton.py under Triton's interpreter: decode graphs over its attention.

The stand-in for a graph runs the step's work anew, on the same tensors: launches of kernels are
no operators that could be recorded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.unit.worker.fake_graphs import TinyModel
from tests.unit.worker.fakes import CPU, new_row, run, step_of
from tgi_cli.attention import KVSpec, PagedAttention, StateCache
from tgi_cli.attention.reference import ReferenceAttention
from tgi_cli.attention.triton import TritonAttention
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.cuda_graphs import DecodeGraphs
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.upload import Uploader

VOCAB, BLOCK = 97, 16
WANTED = SamplingParams(temperature=0.0)


class Model(TinyModel):
    DIM = 16


class Again:
    """Implements :class:`tgi_cli.worker.cuda_graphs.Graph` for one attention, and its states."""

    def __init__(self, attention: PagedAttention, states: StateCache | None = None) -> None:
        self._attention = attention
        self._states = states

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        self._work, self._output = work, work()
        self._step = None if self._states is None else self._states.step
        return self._output

    def replay(self) -> None:
        self._attention.plan_padded(None, len(self._output))
        if self._states is not None:
            assert self._step is not None
            self._states.plan(self._step)
        self._output.copy_(self._work())


def tokens_of(kind: type[PagedAttention], graphs: bool) -> list[list[int]]:
    upload = Uploader(CPU, packed=True)
    rows = InputBatch(4, 64, BLOCK, CPU, upload, shared=False)
    specs = [KVSpec(Model.KV_HEADS, Model.DIM), KVSpec(Model.KV_HEADS, Model.DIM, window=9)]
    attention = kind(specs, BLOCK, torch.float32, CPU)
    attention.allocate(12)
    model = Model(VOCAB)
    runner = ModelRunner(model, attention, rows, VOCAB)
    lengths = (3, 15, 20)
    new = [
        new_row(row, [7 * row + i for i in range(length)], [3 * row + 2, 3 * row, 3 * row + 1])
        for row, length in enumerate(lengths)
    ]
    prefill = step_of(*((row, 0, n, True) for row, n in enumerate(lengths)), new=new)
    found = [run(runner, prefill).token_ids]
    if graphs:
        runner.graphs = DecodeGraphs(
            model, attention, rows, VOCAB, [2, 4], lambda: lambda: Again(attention)
        )
        runner.graphs.capture()
    for step, batch in enumerate(([2, 0, 1], [1, 0, 2], [0, 2])):
        entries = [(row, lengths[row] + step, 1, True) for row in batch]
        found.append(run(runner, step_of(*entries)).token_ids)
    return found


if __name__ == "__main__":
    expected = tokens_of(ReferenceAttention, graphs=False)
    assert tokens_of(TritonAttention, graphs=True) == expected, "differs"
    print("equal")
