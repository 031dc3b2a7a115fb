"""Collected by test_cuda_graphs_triton.py under Triton's interpreter: graphs over its attention.

The stand-in for a graph runs the step's work anew, on the same tensors: launches of kernels are
no operators that could be recorded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.unit.worker.fake_graphs import TinyModel, greedy
from tests.unit.worker.fakes import CPU, new_row, run, step_of
from tgi_cli.attention import AttentionMetadata, KVSpec, PagedAttention, StateCache
from tgi_cli.attention.reference import ReferenceAttention
from tgi_cli.attention.triton import TritonAttention
from tgi_cli.sampling.params import SamplingParams
from tgi_cli.worker.cuda_graphs import DecodeGraphs
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.mixed_graphs import MixedGraphs, MixedSize
from tgi_cli.worker.runner import ModelRunner
from tgi_cli.worker.upload import Uploader

VOCAB, BLOCK = 97, 16
WANTED = SamplingParams(temperature=0.0)


class Model(TinyModel):
    DIM = 16


class Again:
    """Implements :class:`tgi_cli.worker.graph_capture.Graph` for one attention, and its states."""

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


class Remembering(TritonAttention):
    """Knows its last plan of a step of unknown lengths."""

    fixed: tuple[AttentionMetadata, int] | None = None

    def plan_fixed(self, metadata: AttentionMetadata, max_context: int) -> None:
        self.fixed = metadata, max_context
        super().plan_fixed(metadata, max_context)


class AgainFixed(Again):
    """The same of steps with prompts."""

    def __init__(self, attention: Remembering) -> None:
        super().__init__(attention)
        self._remembering = attention
        self.replays = 0

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        output = super().capture(work)
        self._fixed = self._remembering.fixed
        return output

    def replay(self) -> None:
        assert self._fixed is not None
        self.replays += 1
        self._remembering.plan_fixed(*self._fixed)
        self._output.copy_(self._work())


def tokens_of(attention: PagedAttention, graphs: bool) -> list[list[int]]:
    """Of prompts, decodes, and decodes beside a prompt's chunks."""
    upload = Uploader(CPU, packed=True)
    rows = InputBatch(4, 64, BLOCK, upload)
    attention.allocate(16)
    for cache in (*attention.key_cache, *attention.value_cache):
        cache.zero_()
    model = Model(VOCAB)
    runner = ModelRunner(model, attention, rows, VOCAB)
    mixed = None
    if graphs:
        assert isinstance(attention, Remembering)
        runner.graphs = DecodeGraphs(
            model, attention, rows, VOCAB, [2, 4], lambda: lambda: Again(attention), greedy=greedy
        )
        runner.graphs.capture()
        mixed = runner.mixed_graphs = MixedGraphs(
            model,
            attention,
            rows,
            [MixedSize(2, 48)],
            lambda: lambda: AgainFixed(attention),
            vocab_size=VOCAB,
            greedy=greedy,
        )
        mixed.capture()
    lengths = (3, 15, 20)
    new = [
        new_row(row, [7 * row + i for i in range(length)], [3 * row + 2, 3 * row, 3 * row + 1])
        for row, length in enumerate(lengths)
    ]
    last = new_row(3, [5 * i % VOCAB for i in range(37)], [12, 15, 13, 14])
    prefill = step_of(*((row, 0, n, True) for row, n in enumerate(lengths)), new=new)
    found = [run(runner, prefill).token_ids]
    known = list(lengths)
    for batch, chunk in (
        ([2, 0, 1], None),
        ([1, 2], (0, 30)),
        ([0], (30, 7)),
        ([1, 0, 2], None),
        ([0, 3], None),
    ):
        entries = []
        for row in batch:
            known += [37] if row == len(known) else []
            entries.append((row, known[row], 1, True))
            known[row] += 1
        if chunk is not None:
            entries.append((3, *chunk, sum(chunk) == 37))
        starts = [last] if chunk is not None and not chunk[0] else []
        found.append(run(runner, step_of(*entries, new=starts)).token_ids)
    if mixed is not None:
        ((graph, _),) = mixed.captured.values()
        assert isinstance(graph, AgainFixed)
        assert graph.replays == 3, "the prompts, and two chunks beside decodes"
    return found


def test_steps_with_graphs_give_the_tokens_of_the_reference() -> None:
    specs = [KVSpec(Model.KV_HEADS, Model.DIM), KVSpec(Model.KV_HEADS, Model.DIM, window=9)]
    given = specs, BLOCK, torch.float32, CPU
    expected = tokens_of(ReferenceAttention(*given), graphs=False)
    assert tokens_of(Remembering(*given), graphs=True) == expected
