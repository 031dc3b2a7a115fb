"""CUDA graphs of steps with prompts: recorded per number of decodes and of prompt tokens.

A step with a few prompt tokens takes the device hardly longer than one without, but launching its
kernels one by one takes the host several milliseconds. So steps with up to
:data:`PROMPT_TOKENS` of them are replayed, too; larger ones compute longer than the host launches.

Such a step has a fixed layout: ``decodes`` rows with one token each, then sequences that share
``tokens`` tokens. Where there are fewer, padding follows: rows without KV, sequences without
tokens, tokens without a sequence. Positions, lengths, slots and where sequences begin are read from
one buffer, which the host fills and copies for each step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tgi_cli.attention import AttentionMetadata, PagedAttention
from tgi_cli.worker.executors import Forward, ForwardOutput
from tgi_cli.worker.graph_capture import Graph, GraphSet, cuda_graphs
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.lora_cache import LoraCache
from tgi_cli.worker.step_inputs import FlatStep, StepBatch

DECODES = (8, 32, 128, 256)
PROMPT_TOKENS = (32, 64, 128, 256, 512)
"""Sizes to capture, each pair of them. Padding costs the device little where weights take most of
its time, and each graph takes some memory and time at startup."""

_MIN_SEQUENCES = 8
_TOKENS_PER_SEQUENCE = 4
"""A graph takes one sequence per so many prompt tokens: attention launches programs for each
of them, which end at once if it has no tokens."""


class MixedSize(NamedTuple):
    """The size of a step with prompts."""

    decodes: int
    tokens: int

    @property
    def sequences(self) -> int:
        """Sequences that share ``tokens``."""
        return max(_MIN_SEQUENCES, self.tokens // _TOKENS_PER_SEQUENCE)

    @property
    def all_tokens(self) -> int:
        return self.decodes + self.tokens

    @property
    def all_sequences(self) -> int:
        return self.decodes + self.sequences


class _Inputs(NamedTuple):
    """Parts of a buffer of int64, on the host (numpy) or the device; T tokens, B sequences."""

    cells: Any
    """[T], flat index of each token in the pool; 0 for padding."""
    positions: Any
    """[T], for rotary embedding; 0 for padding."""
    slots: Any
    """[T], of their KV; -1 for padding."""
    last: Any
    """[T], of which the first N: flat index of the token before each sampled one."""
    targets: Any
    """[T], of which the first N: flat index of each sampled token in the pool."""
    rows: Any
    """[B]; 0 for padding."""
    kv_lens: Any
    """[B]; 0 for padding."""
    starts: Any
    """[B+1], where each sequence's tokens begin."""

    @classmethod
    def of(cls, buffer: Any, size: MixedSize) -> _Inputs:
        """The parts of a numpy array or a tensor of at least :func:`_length` numbers."""
        tokens, sequences = size.all_tokens, size.all_sequences
        ends = np.cumsum([0, *[tokens] * 5, sequences, sequences, sequences + 1]).tolist()
        return cls(*(buffer[begin:end] for begin, end in pairwise(ends)))


def _length(size: MixedSize) -> int:
    return 5 * size.all_tokens + 3 * size.all_sequences + 1


def mixed_sizes(max_batch_size: int, max_prompt_tokens: int) -> list[MixedSize]:
    """Sizes to capture, in ascending order.

    Args:
        max_batch_size: rows of the persistent batch.
        max_prompt_tokens: the most prompt tokens in a step.
    """
    return [
        MixedSize(decodes, tokens)
        for decodes in _up_to(DECODES, max_batch_size)
        for tokens in _up_to(PROMPT_TOKENS, max_prompt_tokens)
    ]


def _up_to(sizes: Sequence[int], limit: int) -> list[int]:
    limit = min(limit, sizes[-1])
    return [*(size for size in sizes if size < limit), limit]


class MixedGraphs(GraphSet[MixedSize]):
    """Implements :class:`tgi_cli.worker.executors.Executor` for steps with prompts.

    Args:
        model: computes hidden states.
        attention: holds the KV cache; it must have :meth:`PagedAttention.plan_fixed`.
        rows: the persistent batch.
        sizes: from :func:`mixed_sizes`.
        make: makes graphs that share their memory.
        lora: of the model; None if it has no slots for adapters.
    """

    def __init__(
        self,
        model: Forward,
        attention: PagedAttention,
        rows: InputBatch,
        sizes: Sequence[MixedSize],
        make: Callable[[], Callable[[], Graph]] = cuda_graphs,
        lora: LoraCache | None = None,
    ) -> None:
        super().__init__(attention.device, make)
        self._model = model
        self._attention = attention
        self._rows = rows
        self._lora = lora
        self._pin = attention.device.type == "cuda"
        self._hidden: Tensor | None = None
        self._inputs = torch.empty(0, dtype=torch.int64)
        self._metadata: dict[MixedSize, AttentionMetadata] = {}
        """By size. Graphs read their tensors."""
        self.resize(sizes)

    def resize(self, sizes: Sequence[MixedSize]) -> None:
        """Capture these sizes from the next capture on."""
        self._sizes = sorted(sizes)
        self._decodes = sorted({size.decodes for size in sizes})
        self._tokens = sorted({size.tokens for size in sizes})

    def keys(self) -> list[MixedSize]:
        return sorted(self._sizes, key=lambda size: size.all_tokens, reverse=True)

    def supports(self, batch: StepBatch) -> bool:
        """Whether it has prompts, no more than there are graphs for, and no adapters, states,
        images or reports on prompts."""
        if batch.adapter_slots is not None or batch.reports_prompts or batch.step.state_out:
            return False
        if not self._rows.image_positions.plain(batch.step):
            return False
        return self._size_of(batch) in self.captured

    def _size_of(self, batch: StepBatch) -> MixedSize | None:
        """The smallest size that a step fits in."""
        step = batch.step
        decodes = _decodes_of(batch)
        tokens, sequences = step.num_tokens - decodes, len(batch.rows) - decodes
        if not sequences or decodes > self._decodes[-1]:
            return None
        rows = self._decodes[bisect_left(self._decodes, decodes)]
        sizes = (MixedSize(rows, each) for each in self._tokens if each >= tokens)
        return next((size for size in sizes if size.sequences >= sequences), None)

    def run(self, batch: StepBatch) -> ForwardOutput:
        """See :meth:`tgi_cli.worker.executors.Executor.run`."""
        table, size = self._rows, self._size_of(batch)
        assert size is not None
        flat = FlatStep.of(batch, table)
        staged = torch.empty(_length(size), dtype=torch.int64, pin_memory=self._pin)
        self._fill(_Inputs.of(staged.numpy(), size), flat, batch, size)
        self._inputs[: len(staged)].copy_(staged, non_blocking=True)
        inputs, count = _Inputs.of(self._inputs, size), len(flat.last)
        graph, hidden = self.captured[size]
        graph.replay()
        return ForwardOutput(
            hidden.index_select(0, inputs.last[:count]),
            table.sampling.select(flat.sampled_rows, flat.sampled_ends),
            inputs.targets[:count],
        )

    def _fill(self, inputs: _Inputs, flat: FlatStep, batch: StepBatch, size: MixedSize) -> None:
        """Write a step, and padding around it."""
        table, decodes, tokens = self._rows, _decodes_of(batch), len(flat.positions)
        gap = size.decodes - decodes
        end = tokens + gap
        positions = table.image_positions.rope(batch.step, flat.row_of_token, flat.positions)
        sources = (flat.row_of_token * table.width + flat.positions, positions, flat.slots)
        for to, source, padding in zip(inputs[:3], sources, (0, 0, -1), strict=True):
            to[:decodes], to[decodes : size.decodes] = source[:decodes], padding
            to[size.decodes : end], to[end:] = source[decodes:], padding
        end = len(batch.rows) + gap
        for to, source in ((inputs.rows, batch.rows), (inputs.kv_lens, batch.ends())):
            to[:decodes], to[decodes : size.decodes] = source[:decodes], 0
            to[size.decodes : end], to[end:] = source[decodes:], 0
        inputs.starts[: size.decodes] = np.arange(size.decodes)
        inputs.starts[size.decodes : end + 1] = flat.starts[decodes:] + gap
        inputs.starts[end + 1 :] = tokens + gap
        count = len(flat.last)
        inputs.last[:count] = flat.last + np.where(flat.last >= decodes, gap, 0)
        inputs.targets[:count] = flat.sampled_rows * table.width + flat.sampled_ends

    def prepare(self) -> None:
        blocks = self._rows.blocks
        sequences = max(size.all_sequences for size in self._sizes)
        length = max(map(_length, self._sizes))

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        self._inputs = zeros(length, dtype=torch.int64)
        starts, lens = zeros(sequences + 1), zeros(sequences)
        table = zeros(sequences, blocks.shape[1])
        self._metadata = {
            size: AttentionMetadata(
                starts[: size.all_sequences + 1],
                lens[: size.all_sequences],
                table[: size.all_sequences],
                _Inputs.of(self._inputs, size).slots,
                [],
                [],
                size.decodes,
            )
            for size in self._sizes
        }

    def plan(self, key: MixedSize) -> None:
        inputs = _Inputs.of(self._inputs, key)
        self._inputs.zero_()
        inputs.slots.fill_(-1)
        inputs.starts[: key.decodes].copy_(torch.arange(key.decodes))
        inputs.starts[key.decodes :].fill_(key.decodes)
        if self._lora is not None:
            self._lora.plan(None, None)
        self._attention.plan_fixed(self._metadata[key], self._rows.width)

    def compute(self, key: MixedSize) -> Tensor:
        inputs, table, metadata = _Inputs.of(self._inputs, key), self._rows, self._metadata[key]
        metadata.query_start_loc.copy_(inputs.starts)
        metadata.kv_lens.copy_(inputs.kv_lens)
        torch.index_select(table.blocks, 0, inputs.rows, out=metadata.block_table)
        input_ids = table.gather(inputs.cells)
        hidden = self._model.forward(input_ids, inputs.positions, self._attention)
        if self._hidden is None:  # the first, and largest one, before any is captured
            self._hidden = torch.empty_like(hidden)
        return self._hidden[: len(hidden)].copy_(hidden)

    def drop(self) -> None:
        self._metadata.clear()
        self._hidden = None
        super().drop()


def _decodes_of(batch: StepBatch) -> int:
    """Leading sequences of one token: those with drafts follow them."""
    return batch.step.num_decodes - len(batch.step.drafts)
