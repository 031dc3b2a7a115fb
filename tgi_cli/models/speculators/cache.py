"""A proposer's keys and values, in tensors of their own under the target's block ids.

A key and its value are kept in the slot of the last token that they depend on. So a block depends
on nothing but the tokens up to its end, as the target's does, and what holds for the target's
blocks holds for the proposer's: prefixes are shared, a preempted sequence comes back to them,
copy-on-write copies both.

EAGLE-3 heads and MTP layers take pairs of a token and the hidden state before it. The pair of the
token at position p is kept in the slot of p, and the first token has none, so that the slot of
position 0 stays empty and no query may see it. Attention has chunks of positions (Llama 4), and
hides the slot by one: positions are moved up by ``lead``, a multiple of the block size, and the
chunks are of ``lead + 1`` positions. So position 0 is the last one of its chunk, and the others are
in the next chunk together. No block in front of the sequence's own is ever read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.attention import AttentionMetadata, KVSpec, create_attention
from tgi_cli.models.speculators.base import Ints


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of a :class:`DraftCache`.

    Attributes:
        block_size: block size of the target's cache, in tokens.
        num_drafts: tokens after the last known one, at most.
        max_positions: the context that is served.
        first: the first position that has keys and values: 0, or 1 of pairs.
    """

    block_size: int
    num_drafts: int
    max_positions: int
    first: int = 0

    @property
    def scratch(self) -> int:
        """Blocks of a row after those of the target, at most."""
        return (self.num_drafts - 1) // self.block_size + 1

    @property
    def lead(self) -> int:
        """By how much positions are moved up."""
        if not self.first:
            return 0
        return -(-(self.max_positions + self.num_drafts) // self.block_size) * self.block_size

    @property
    def width(self) -> int:
        """Blocks of a row, at most."""
        return -(-self.max_positions // self.block_size) + self.scratch


class DraftCache:
    """Keys and values of some layers, and attention over them.

    Args:
        specs: specifications of the layers. None has a window or chunks.
        shape: sizes.
        dtype: dtype of the proposer.
        device: device of its tensors.
        backend: see :func:`tgi_cli.attention.create_attention`.

    Attributes:
        attention: planned by :meth:`plan`.

    Raises:
        ValueError: a layer has a window or chunks.
    """

    def __init__(
        self,
        specs: Sequence[KVSpec],
        shape: CacheShape,
        dtype: torch.dtype,
        device: torch.device,
        backend: str | None = None,
    ) -> None:
        if shape.first and any(spec.reach is not None for spec in specs):
            raise ValueError("layers of pairs have neither windows nor chunks")
        chunk = shape.lead + shape.first
        own = [replace(spec, chunk=chunk) for spec in specs] if shape.first else list(specs)
        self.attention = create_attention(backend, own, shape.block_size, dtype, device)
        self.shape = shape
        self._device = device
        self._num_blocks = 0
        self._lead_blocks = shape.lead // shape.block_size
        self._tables: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self._device_tables = torch.from_numpy(self._tables)
        self._count = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.attention.block_bytes

    def allocate(self, num_blocks: int, max_rows: int) -> None:
        """Take memory for the target's blocks, and for scratch blocks of all rows."""
        self._num_blocks = num_blocks
        self.attention.allocate(num_blocks + max_rows * self.shape.scratch)
        self._tables = np.zeros((max_rows, self._lead_blocks + self.shape.width), np.int32)
        self._device_tables = torch.from_numpy(self._tables)
        if self._device.type != "cpu":
            self._device_tables = self._device_tables.to(self._device)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See :meth:`tgi_cli.attention.PagedAttention.copy_blocks`."""
        self.attention.copy_blocks(pairs)

    def begin(self, rows: Ints, held: Ints, block_tables: NDArray[np.int32]) -> None:
        """Set the sequences that the next plans are of.

        Args:
            rows: int64 [B].
            held: int64 [B], tokens of each whose blocks the target has.
            block_tables: int32 [rows, blocks], the target's.
        """
        self._count = len(rows)
        if not self._count:
            return
        blocks = -(-held // self.shape.block_size)
        most = int(blocks.max())
        own = self._tables[: self._count, self._lead_blocks :]
        own[:, :most] = block_tables[rows, :most]
        scratch = np.arange(self.shape.scratch)
        ids = self._num_blocks + rows[:, None] * self.shape.scratch + scratch
        np.put_along_axis(own, blocks[:, None] + scratch, ids.astype(np.int32), axis=1)
        if self._device.type != "cpu":
            columns = slice(self._lead_blocks, self._lead_blocks + most + len(scratch))
            own = np.ascontiguousarray(self._tables[: self._count, columns])
            self._device_tables[: self._count, columns].copy_(torch.from_numpy(own))

    def plan(self, starts: Ints, counts: Ints) -> Tensor:
        """Plan a pass over positions ``starts .. starts + counts`` of each sequence.

        Args:
            starts, counts: int64 [B], in the order of :meth:`begin`; at least one position each, up
                to ``num_drafts - 1`` after the tokens that are held.

        Returns:
            int64 [T], the positions, on the device.
        """
        shape, lead = self.shape, self.shape.lead
        query_start = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        sequence = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(sequence)) + np.repeat(starts - query_start[:-1], counts)
        blocks, offsets = np.divmod(positions, shape.block_size)
        slots = self._tables[sequence, self._lead_blocks + blocks].astype(np.int64)
        slots = slots * shape.block_size + offsets
        kv_lens = starts + counts + lead
        longest = -(-int(kv_lens.max()) // shape.block_size)
        several = np.flatnonzero(counts != 1)
        decodes = int(several[0]) if len(several) else len(counts)
        self._clear(starts)
        self.attention.plan(
            AttentionMetadata(
                query_start_loc=self._upload(query_start),
                kv_lens=self._upload(kv_lens.astype(np.int32)),
                block_table=self._device_tables[: self._count, :longest],
                slot_mapping=self._upload(slots),
                query_lens_host=counts.tolist(),
                kv_lens_host=kv_lens.tolist(),
                num_decodes=decodes,
            )
        )
        return self._upload(positions)

    def _clear(self, starts: Ints) -> None:
        """Zero the blocks of sequences that begin, if their first slot stays empty.

        A mask hides a score but not a NaN that a broken request may have left there.
        """
        begin = np.flatnonzero(starts == self.shape.first) if self.shape.first else ()
        if len(begin):
            blocks = self._upload(self._tables[begin, self._lead_blocks].astype(np.int64))
            for cache in map(self.attention.raw, self.attention.stored):
                cache.index_fill_(0, blocks, 0)

    def _upload(self, array: NDArray[np.int32] | Ints) -> Tensor:
        return torch.from_numpy(array).to(self._device)
