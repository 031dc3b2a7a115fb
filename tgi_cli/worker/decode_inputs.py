"""A step of decodes on a CPU: its inputs in arrays that stay, brought up to date.

Between two such steps of the same sequences everything moves on by one position. So nothing is
allocated but a few views, and a block table is gathered when the sequences change, not at each
step. About 20 us a step at 1 to 32 rows, where putting it together anew takes 45 to 60.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.attention import AttentionMetadata
from tgi_cli.engine.step import Step
from tgi_cli.sampling.table import MIN_TOKENS, SamplingBatch
from tgi_cli.worker.input_batch import InputBatch

_Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """What a step of N decodes works on; good until the next one is prepared.

    Attributes:
        input_ids: int64 [N], of the tokens chosen last.
        positions: int64 [N], of these.
        metadata: for the attention.
        batch: what the sampler wants to know.
        targets: int64 [N], where the tokens go that are chosen: row * width + position.
    """

    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    batch: SamplingBatch
    targets: Tensor


class DecodeInputs:
    """Prepares the steps of a worker whose device reads the host's memory.

    Args:
        rows: the persistent batch, which has taken in a step's changes before it is prepared.
    """

    def __init__(self, rows: InputBatch) -> None:
        self._table = rows
        self._tokens = rows.tokens.view(-1).numpy()
        self._blocks = rows.host_blocks.reshape(-1)
        self._rows: list[int] = []
        self._ready: _Arrays | None = None

    def prepare(self, step: Step) -> DecodeStep | None:
        """The inputs of a step; None unless each row that it computes decodes one token.

        It must be asked at every step, or it would not notice whose rows have changed hands.
        """
        count = len(step.rows)
        if step.num_decodes != count:
            self._ready = None
            return None
        arrays = self._ready
        if arrays is None or step.new or step.rows != self._rows:
            arrays = self._arrays_of(step)
        elif step.appended:
            arrays.append(step)
        return arrays.advance(step, self._tokens, self._blocks)

    def _arrays_of(self, step: Step) -> _Arrays:
        self._rows = step.rows
        self._ready = _Arrays(self._table, step)
        return self._ready


class _Arrays:
    """The state of one set of rows, as long as they decode together."""

    def __init__(self, table: InputBatch, step: Step) -> None:
        count = len(step.rows)
        rows = np.array(step.rows, np.int64)
        self._table = table
        self._places = {row: place for place, row in enumerate(step.rows)}
        self._in_tokens = rows * table.width
        self._in_blocks = rows * table.host_blocks.shape[1]
        numbers = np.empty((6, count), np.int64)
        self._positions, self._ends, self._slots, self._targets, self._ids, self._cells = numbers
        self._kv_lens = np.empty(count, np.int32)
        self._block_table = table.host_blocks[rows]
        self._ends[:] = step.starts
        self._ends += 1
        self._batch = table.sampling.select(rows, self._ends)
        # The same memory, for torch.
        self._query_start = torch.arange(count + 1, dtype=torch.int32)
        self._views = [torch.from_numpy(row) for row in numbers[:5]]
        self._lens_view = torch.from_numpy(self._kv_lens)
        self._table_view = torch.from_numpy(self._block_table)

    def append(self, step: Step) -> None:
        """Take in the blocks that rows have gained."""
        for more in step.appended:
            place = self._places.get(more.row)
            if place is not None:
                end = more.start + len(more.block_ids)
                self._block_table[place, more.start : end] = more.block_ids

    def advance(self, step: Step, tokens: _Ints, blocks: _Ints) -> DecodeStep:
        """Write where the step stands, and look up what it computes."""
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
        view_positions, _, view_slots, view_targets, view_ids = self._views
        metadata = AttentionMetadata(
            query_start_loc=self._query_start,
            kv_lens=self._lens_view,
            block_table=self._table_view[:, : -(-max(lens) // size)],
            slot_mapping=view_slots,
            query_lens_host=step.counts,
            kv_lens_host=lens,
            num_decodes=len(lens),
        )
        return DecodeStep(view_ids, view_positions, metadata, self._batch, view_targets)
