"""What the model and the sampler read in a step: flat arrays made of the persistent batch.

In general they are created for each step and go to the device in one transfer. Where the device
reads the host's memory, a step of decodes updates arrays that persist: between two such steps of
the same sequences, every position advances by one. So only a few views are allocated, and block
tables are gathered when the sequences change, not at each step. That takes about 20 us a step at 1
to 32 rows; creating the inputs takes 45 to 60.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.attention import AttentionMetadata
from tgi_cli.engine.step import Step
from tgi_cli.models.base import ImageRows
from tgi_cli.sampling.table import MIN_TOKENS, SamplingBatch
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.lora_cache import LoraCache
from tgi_cli.worker.state_inputs import state_columns, state_metadata

_Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A scheduled step, after the persistent batch has applied its changes.

    Attributes:
        step: as the scheduler made it.
        rows: int64, of each scheduled sequence.
        adapter_slots: int32, of each sequence; None if none of them has an adapter.
        reports_prompts: whether log-probabilities or logits of prompts are requested, for which
            all hidden states are needed.
        images: tokens that stand for parts of images; None without any.
    """

    step: Step
    rows: NDArray[np.int64]
    adapter_slots: NDArray[np.int32] | None = None
    reports_prompts: bool = False
    images: ImageRows | None = None

    @property
    def only_decodes(self) -> bool:
        """Whether each sequence computes one token, and samples after it."""
        return self.step.num_decodes == len(self.rows) and not self.step.drafts

    def ends(self) -> NDArray[np.int64]:
        """Tokens of each sequence after the step."""
        return np.array(self.step.starts, np.int64) + np.array(self.step.counts, np.int64)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step of T tokens that samples N; valid until the next one is prepared.

    Attributes:
        input_ids: int64 [T].
        positions: int64 [T], or [3, T] with three axes.
        metadata: for the attention.
        batch: for the sampler. A sequence with drafts is in it once for each of its choices.
        targets: int64 [N], where the sampled tokens go: row * width + position.
        last: int64 [N], flat index of the token before each; None for all T tokens.
        images: tokens that stand for parts of images; None without any.
    """

    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    batch: SamplingBatch
    targets: Tensor
    last: Tensor | None = None
    images: ImageRows | None = None


class FlatStep(NamedTuple):
    """A step of B sequences and T tokens that samples N, as arrays on the host.

    Attributes:
        starts: int32 [B+1], where each sequence's tokens begin.
        row_of_token: int64 [T].
        positions: int64 [T].
        slots: int64 [T], of the tokens' KV.
        last: int64 [N], flat index of the token before each sampled one.
        sampled_rows, sampled_ends: int64 [N], of the sampled tokens: rows and positions.
    """

    starts: _Ints
    row_of_token: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    last: NDArray[np.int64]
    sampled_rows: NDArray[np.int64]
    sampled_ends: NDArray[np.int64]

    @classmethod
    def of(cls, batch: StepBatch, table: InputBatch) -> FlatStep:
        """The flat form of any step, with the block tables of ``table``."""
        step, rows, ends = batch.step, batch.rows, batch.ends()
        count = len(rows)
        starts = np.zeros(count + 1, np.int32)
        if batch.only_decodes:  # one token per row, all of them sampled
            starts[:] = np.arange(count + 1)
            row_of_token, positions = rows, ends - 1
        else:
            counts = np.array(step.counts, np.int64)
            np.cumsum(counts, out=starts[1:])
            row_of_token = np.repeat(rows, counts)
            # Position minus flat index is the same for all tokens of a sequence.
            positions = np.arange(len(row_of_token)) + np.repeat(ends - starts[1:], counts)
        blocks, offsets = np.divmod(positions, table.block_size)
        slots = table.host_blocks[row_of_token, blocks] * np.int64(table.block_size) + offsets
        sampled, from_end = sampled_tokens(step)
        last = starts[1:][sampled] + from_end
        sampled_rows, sampled_ends = rows[sampled], ends[sampled] + (from_end + 1)
        return cls(starts, row_of_token, positions, slots, last, sampled_rows, sampled_ends)


def sampled_tokens(step: Step) -> tuple[NDArray[np.int64], NDArray[np.int64] | int]:
    """The entry of each token that a step samples, and the place of the token before it.

    Places are counted from the end of the entry's tokens: -1 is its last one. Without drafts, that
    is the place of all.
    """
    samples = np.array(step.samples, np.int64)
    entries = np.repeat(np.arange(len(samples)), samples)
    if not step.drafts:
        return entries, -1
    return entries, np.arange(len(entries)) - np.repeat(np.cumsum(samples), samples)


class InputPreparer:
    """Prepares the inputs of each step.

    Args:
        table: the persistent batch.
        lora: plans which adapters the step uses; None if the model has no slots for adapters.
    """

    def __init__(self, table: InputBatch, lora: LoraCache | None = None) -> None:
        self._table = table
        self._lora = lora
        self._decodes = DecodeInputs(table) if table.tokens.device.type == "cpu" else None

    def reset(self) -> None:
        """Create the next step's inputs, since other code prepared the step before it."""
        if self._decodes is not None:
            self._decodes.reset()

    def prepare(self, batch: StepBatch) -> StepInputs:
        """The inputs of a step. Call it for every step, or call :meth:`reset` instead."""
        if self._decodes is not None:
            inputs = self._decodes.prepare(batch)
            if inputs is not None and not batch.reports_prompts and batch.adapter_slots is None:
                if self._lora is not None:
                    self._lora.plan(None, None)
                return inputs
        return self._prepare(batch)

    def _prepare(self, batch: StepBatch) -> StepInputs:
        """Any step's inputs, in one transfer."""
        table, step, rows, ends = self._table, batch.step, batch.rows, batch.ends()
        flat = FlatStep.of(batch, table)
        kv_lens = ends.astype(np.int32)
        images = table.image_positions
        until = images.visible_until(step)
        states = state_columns(step)
        spans = [] if until is None else [until]
        adapted = [] if batch.adapter_slots is None else [table.adapter_slots[flat.row_of_token]]
        (
            d_positions,
            d_tokens,
            d_slots,
            d_rows,
            d_targets,
            d_last,
            d_starts,
            d_lens,
            *d_more,
        ) = table.upload(
            images.rope(step, flat.row_of_token, flat.positions),
            flat.row_of_token * table.width + flat.positions,
            flat.slots,
            rows,
            flat.sampled_rows * table.width + flat.sampled_ends,
            flat.last,
            flat.starts,
            kv_lens,
            *states,
            *spans,
            *adapted,
        )
        if self._lora is not None:
            self._lora.plan(batch.adapter_slots, d_more[-1] if adapted else None)
        num_blocks = -(-int(kv_lens.max()) // table.block_size)
        metadata = AttentionMetadata(
            query_start_loc=d_starts,
            kv_lens=d_lens,
            block_table=table.blocks[:, :num_blocks].index_select(0, d_rows),
            slot_mapping=d_slots,
            query_lens_host=step.counts,
            kv_lens_host=kv_lens.tolist(),
            num_decodes=step.num_decodes - len(step.drafts),
            states=state_metadata(step, d_starts, states, d_more[: len(states)]),
            visible_until=d_more[len(states)] if spans else None,
        )
        return StepInputs(
            table.gather(d_tokens),
            d_positions,
            metadata,
            table.sampling.select(flat.sampled_rows, flat.sampled_ends),
            d_targets,
            None if len(flat.last) == len(flat.positions) else d_last,
            batch.images,
        )


class DecodeInputs:
    """Prepares steps of decodes where the device reads the host's memory.

    Args:
        table: the persistent batch, which has applied a step's changes before it is prepared.
    """

    def __init__(self, table: InputBatch) -> None:
        self._table = table
        self._tokens = table.tokens.view(-1).numpy()
        self._blocks = table.host_blocks.reshape(-1)
        self._rows: list[int] = []
        self._arrays: _DecodeArrays | None = None

    def reset(self) -> None:
        """Forget the last step's sequences."""
        self._arrays = None

    def prepare(self, batch: StepBatch) -> StepInputs | None:
        """The inputs of a step; None unless each of its sequences decodes one token.

        Call it for every step: otherwise it would miss that a row has another sequence, or more
        blocks. Between two steps of the same sequences, one that verifies drafts changes nothing
        but positions and blocks.
        """
        step, arrays = batch.step, self._arrays
        if step.new:
            arrays = self._arrays = None
        elif arrays is not None and step.appended:
            arrays.append(step)
        if not batch.only_decodes:
            return None
        if arrays is None or step.rows != self._rows:
            self._rows = step.rows
            arrays = self._arrays = _DecodeArrays(self._table, step, batch.rows)
        return arrays.advance(step, self._tokens, self._blocks)


class _DecodeArrays:
    """The arrays of one set of rows, for as long as they decode together."""

    def __init__(self, table: InputBatch, step: Step, rows: NDArray[np.int64]) -> None:
        count = len(rows)
        self._table = table
        self._indices = {row: index for index, row in enumerate(step.rows)}
        self._in_tokens = rows * table.width
        self._in_blocks = rows * table.host_blocks.shape[1]
        numbers = np.empty((6, count), np.int64)
        self._positions, self._ends, self._slots, self._targets, self._ids, self._cells = numbers
        self._kv_lens = np.empty(count, np.int32)
        self._block_table = table.host_blocks[rows]
        self._ends[:] = step.starts
        self._ends += 1
        self._batch = table.sampling.select(rows, self._ends)
        shifts = table.image_positions.shifts[rows]
        self._shifts = shifts if shifts.any() else None
        self._rope = np.empty(count, np.int64)
        # The same memory, for torch.
        self._query_start = torch.arange(count + 1, dtype=torch.int32)
        self._views = [torch.from_numpy(row) for row in numbers[:5]]
        self._lens_view = torch.from_numpy(self._kv_lens)
        self._table_view = torch.from_numpy(self._block_table)

    def append(self, step: Step) -> None:
        """Add the blocks that rows have gained."""
        for more in step.appended:
            index = self._indices.get(more.row)
            if index is not None:
                end = more.start + len(more.block_ids)
                self._block_table[index, more.start : end] = more.block_ids

    def advance(self, step: Step, tokens: _Ints, blocks: _Ints) -> StepInputs:
        """Advance to the positions of the step, and look up its tokens and slots."""
        size, positions, cells = self._table.block_size, self._positions, self._cells
        positions[:] = step.starts
        np.add(positions, 1, out=self._ends)
        self._kv_lens[:] = self._ends
        np.add(positions, self._in_tokens, out=cells)
        np.add(cells, 1, out=self._targets)
        self._ids[:] = tokens[cells]
        # slot = block * size + position % size = (block - position // size) * size + position
        np.floor_divide(positions, size, out=cells)
        np.subtract(blocks[self._in_blocks + cells], cells, out=self._slots)
        self._slots *= size
        self._slots += positions
        lens = self._ends.tolist()
        if self._batch.flags & MIN_TOKENS:
            self._batch = self._table.sampling.select(self._batch.rows, self._ends)
        states = state_columns(step)
        view_positions, _, view_slots, view_targets, view_ids = self._views
        if self._shifts is not None:
            view_positions = torch.from_numpy(np.add(positions, self._shifts, out=self._rope))
        metadata = AttentionMetadata(
            query_start_loc=self._query_start,
            kv_lens=self._lens_view,
            block_table=self._table_view[:, : -(-max(lens) // size)],
            slot_mapping=view_slots,
            query_lens_host=step.counts,
            kv_lens_host=lens,
            num_decodes=len(lens),
            states=state_metadata(
                step, self._query_start, states, [torch.from_numpy(each) for each in states]
            ),
        )
        return StepInputs(view_ids, view_positions, metadata, self._batch, view_targets)
