"""CUDA graphs of steps with prompts: recorded per number of decodes and of prompt tokens.

A step with a few prompt tokens takes the device hardly longer than one without, but launching its
kernels one by one takes the host several milliseconds. So steps with up to
:data:`PROMPT_TOKENS` of them are replayed, too; larger ones compute longer than the host launches.

Such a step has a fixed layout: ``decodes`` rows with one token each, then sequences that share
``tokens`` tokens. Where there are fewer, padding follows: rows without KV, sequences without
tokens, tokens without a sequence. Positions, lengths, slots and where sequences begin are read from
one buffer, which the host fills and copies for each step.

Where all sequences are greedy and few end with the step, a second graph computes the head, chooses
their tokens and puts them into the pool, as after a step of decodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.attention import AttentionMetadata, PagedAttention
from tgi_cli.sampling.sampler import Sampled
from tgi_cli.worker.cuda_graphs import MAX_HEAD_ROWS, choice_buffer, packed_choice
from tgi_cli.worker.executors import ForwardOutput, RunnableModel
from tgi_cli.worker.graph_capture import Graph, GraphSet, cuda_graphs
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.lora_cache import LoraCache
from tgi_cli.worker.step_inputs import StepBatch, sampled_tokens

DECODES = (8, 32, 128, 256)
PROMPT_TOKENS = (32, 64, 128, 256, 512)
"""Sizes to capture, each pair of them. Padding costs the device little where weights take most of
its time, and each graph takes some memory and time at startup."""

MAX_CHOICE_LOGITS = 1 << 23
"""Logits of the graphs that choose tokens, which hold no more than the largest of them."""

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

    @property
    def samples(self) -> int:
        """Sampled tokens that its graphs look up; where a step has more, another launch does."""
        return self.decodes + min(self.tokens, _MIN_SEQUENCES)


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
        return cls(*[buffer[part] for part in _parts(size)])


@cache
def _parts(size: MixedSize) -> list[slice]:
    tokens, sequences = size.all_tokens, size.all_sequences
    lengths = [*[tokens] * 5, sequences, sequences, sequences + 1]
    return [slice(*ends) for ends in pairwise([0, *accumulate(lengths)])]


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
        model: computes hidden states and logits.
        attention: holds the KV cache; it must have :meth:`PagedAttention.plan_fixed`.
        rows: the persistent batch.
        sizes: from :func:`mixed_sizes`.
        make: makes graphs that share their memory.
        lora: of the model; None if it has no slots for adapters.
        vocab_size: width of the logits that the choice reads.
        greedy: as of :class:`tgi_cli.worker.cuda_graphs.DecodeGraphs`; None to leave the head and
            the choice of tokens to others.
        own_logits: likewise.

    Attributes:
        choices: the graphs of the choice, and their outputs (:class:`ForwardOutput`'s ``choose``).
    """

    def __init__(
        self,
        model: RunnableModel,
        attention: PagedAttention,
        rows: InputBatch,
        sizes: Sequence[MixedSize],
        make: Callable[[], Callable[[], Graph]] = cuda_graphs,
        lora: LoraCache | None = None,
        vocab_size: int = 0,
        greedy: Callable[[Tensor], Sampled] | None = None,
        own_logits: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(attention.device, make)
        self._model = model
        self._attention = attention
        self._rows = rows
        self._lora = lora
        self._vocab_size = vocab_size
        self._greedy = greedy
        self._logits = own_logits or model.logits
        self._pin = attention.device.type == "cuda"
        self._hidden: Tensor | None = None
        self._last: Tensor | None = None
        """Hidden states of the tokens before the sampled ones."""
        self._chosen: Tensor | None = None
        """int32 [samples, 2]; see :func:`tgi_cli.worker.cuda_graphs.packed_choice`."""
        self._inputs = torch.empty(0, dtype=torch.int64)
        self._views: dict[MixedSize, tuple[Tensor, _Inputs]] = {}
        """By size: its part of the buffer, as a whole and in parts."""
        self._padding: dict[MixedSize, NDArray[np.int64]] = {}
        """By size: the inputs of a step without sequences."""
        self._metadata: dict[MixedSize, AttentionMetadata] = {}
        """By size. Graphs read their tensors."""
        self.choices: dict[MixedSize, tuple[Graph, Tensor]] = {}
        self.resize(sizes)

    def resize(self, sizes: Sequence[MixedSize]) -> None:
        """Capture these sizes from the next capture on."""
        self._sizes = sorted(sizes)
        self._decodes = sorted({size.decodes for size in sizes})
        self._tokens = sorted({size.tokens for size in sizes})
        self._sequences = [MixedSize(0, tokens).sequences for tokens in self._tokens]

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
        rows = bisect_left(self._decodes, decodes)
        place = max(bisect_left(self._tokens, tokens), bisect_left(self._sequences, sequences))
        if not sequences or rows == len(self._decodes) or place == len(self._tokens):
            return None
        return MixedSize(self._decodes[rows], self._tokens[place])

    def run(self, batch: StepBatch) -> ForwardOutput:
        """See :meth:`tgi_cli.worker.executors.Executor.run`."""
        size = self._size_of(batch)
        assert size is not None
        staged = torch.empty(_length(size), dtype=torch.int64, pin_memory=self._pin)
        rows, ends = self._fill(staged.numpy(), batch, size)
        buffer, inputs = self._views[size]
        buffer.copy_(staged, non_blocking=True)
        graph, hidden = self.captured[size]
        graph.replay()
        count, choose = len(rows), None
        chosen = self._rows.sampling.select(rows, ends)
        if count > size.samples:
            last = hidden.index_select(0, inputs.last[:count])
        else:
            assert self._last is not None
            last = self._last[:count]
            if not chosen.flags and size in self.choices:
                choose = partial(self._choose, size, count)
        return ForwardOutput(last, chosen, inputs.targets[:count], choose=choose)

    def _choose(self, size: MixedSize, count: int) -> Tensor:
        graph, chosen = self.choices[size]
        graph.replay()
        return chosen[:count]

    def _fill(
        self, staged: NDArray[np.int64], batch: StepBatch, size: MixedSize
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Write a step with padding around it; returns rows and positions of sampled tokens."""
        table, step, rows = self._rows, batch.step, batch.rows
        staged[:] = self._padding[size]
        inputs = _Inputs.of(staged, size)
        decodes, first = _decodes_of(batch), size.decodes  # first: where prompts begin
        counts = np.array(step.counts, np.int64)
        ends = np.array(step.starts, np.int64) + counts
        prompts = len(rows) - decodes
        for to, source in ((inputs.rows, rows), (inputs.kv_lens, ends)):
            to[:decodes] = source[:decodes]
            to[first : first + prompts] = source[decodes:]
        # Where the tokens of each sequence end.
        token_ends = np.arange(1, len(rows) + 1)
        np.cumsum(counts[decodes:], out=token_ends[decodes:])
        token_ends[decodes:] += first
        end = int(token_ends[-1])
        inputs.starts[first + 1 : first + prompts + 1] = token_ends[decodes:]
        inputs.starts[first + prompts + 1 :] = end
        # Padding is at the first position of the first row.
        token_rows = np.zeros(size.all_tokens, np.int64)
        token_rows[:decodes] = rows[:decodes]
        token_rows[first:end] = np.repeat(rows[decodes:], counts[decodes:])
        positions, cells, slots = inputs.positions, inputs.cells, inputs.slots
        np.subtract(ends[:decodes], 1, out=positions[:decodes])
        # Position minus flat index is the same for all tokens of a sequence.
        shifts = np.repeat(ends[decodes:] - token_ends[decodes:], counts[decodes:])
        np.add(np.arange(first, end), shifts, out=positions[first:end])
        np.multiply(token_rows, table.width, out=cells)
        cells += positions
        # slot = block * size + position % size = (block - position // size) * size + position
        np.floor_divide(positions, table.block_size, out=slots)
        np.subtract(table.host_blocks[token_rows, slots], slots, out=slots)
        slots *= table.block_size
        slots += positions
        slots[decodes:first] = slots[end:] = -1
        if table.image_positions.shifted:
            own = np.r_[:decodes, first:end]
            positions[own] = table.image_positions.rope(step, token_rows[own], positions[own])
        sampled, from_end = sampled_tokens(step)
        np.add(token_ends[sampled], from_end, out=inputs.last[: len(sampled)])
        sampled_rows, sampled_ends = rows[sampled], ends[sampled] + (from_end + 1)
        targets = inputs.targets[: len(sampled)]
        np.multiply(sampled_rows, table.width, out=targets)
        targets += sampled_ends
        return sampled_rows, sampled_ends

    def prepare(self) -> None:
        blocks = self._rows.blocks
        sequences = max(size.all_sequences for size in self._sizes)
        length = max(map(_length, self._sizes))

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        self._inputs = zeros(length, dtype=torch.int64)
        samples = max((size.samples for size in self._sizes if self.chooses(size)), default=0)
        self._chosen = choice_buffer(samples, self._device)
        self._views = {
            size: (self._inputs[: _length(size)], _Inputs.of(self._inputs, size))
            for size in self._sizes
        }
        self._padding = {size: self._padding_of(size) for size in self._sizes}
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

    def _padding_of(self, size: MixedSize) -> NDArray[np.int64]:
        padding = np.zeros(_length(size), np.int64)
        inputs = _Inputs.of(padding, size)
        inputs.slots[:] = -1
        inputs.targets[:] = self._rows.scratch
        inputs.starts[:] = np.minimum(np.arange(len(inputs.starts)), size.decodes)
        return padding

    def plan(self, key: MixedSize) -> None:
        self._views[key][0].copy_(torch.from_numpy(self._padding[key]))
        if self._lora is not None:
            self._lora.plan(None, None)
        self._attention.plan_fixed(self._metadata[key], self._rows.width)

    def compute(self, key: MixedSize) -> Tensor:
        inputs, table, metadata = self._views[key][1], self._rows, self._metadata[key]
        metadata.query_start_loc.copy_(inputs.starts)
        metadata.kv_lens.copy_(inputs.kv_lens)
        torch.index_select(table.blocks, 0, inputs.rows, out=metadata.block_table)
        input_ids = table.gather(inputs.cells)
        hidden = self._model.forward(input_ids, inputs.positions, self._attention)
        if self._hidden is None or self._last is None:  # the largest one, before any is captured
            self._hidden = torch.empty_like(hidden)
            most = max(size.samples for size in self._sizes)
            self._last = hidden.new_empty(most, hidden.shape[1])
        torch.index_select(hidden, 0, inputs.last[: key.samples], out=self._last[: key.samples])
        return self._hidden[: len(hidden)].copy_(hidden)

    def run_once(self, key: MixedSize) -> None:
        super().run_once(key)
        if self.chooses(key):
            self._pack(key)

    def record(self, key: MixedSize, make: Callable[[], Graph]) -> None:
        super().record(key, make)
        if self.chooses(key):
            graph = make()
            self.choices[key] = graph, graph.capture(lambda: self._pack(key))

    def measure(self) -> int:
        rows = max((size.samples for size in self._sizes if self.chooses(size)), default=0)
        # The largest graphs, which are measured, may choose no tokens. Logits are of 16 bits first.
        return super().measure() + 6 * rows * self._vocab_size

    def chooses(self, size: MixedSize) -> bool:
        """Whether it has a graph that chooses tokens."""
        if self._greedy is None or size.samples > MAX_HEAD_ROWS:
            return False
        return size.samples * self._vocab_size <= MAX_CHOICE_LOGITS

    def _pack(self, size: MixedSize) -> Tensor:
        """See :func:`tgi_cli.worker.cuda_graphs.packed_choice`."""
        assert self._greedy is not None
        assert self._last is not None
        assert self._chosen is not None
        samples = size.samples
        logits = self._logits(self._last[:samples])
        targets = self._views[size][1].targets[:samples]
        return packed_choice(self._greedy(logits), self._rows, targets, self._chosen[:samples])

    def drop(self) -> None:
        self.choices.clear()
        self._metadata.clear()
        self._views.clear()
        self._hidden = self._last = self._chosen = None
        super().drop()


def _decodes_of(batch: StepBatch) -> int:
    """Leading sequences of one token: those with drafts follow them."""
    return batch.step.num_decodes - len(batch.step.drafts)
