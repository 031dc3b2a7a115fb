"""Which keys the calls of a step on the CPU are given, for the layers whose queries see
alike.

A token's result must not depend on the rest of its step, and kernels add up long rows in
pieces: torch's, 512 keys at a time counted from the first one given; MKL's product of matrices,
192 at a time, but two halves of 193 to 383 (in fp32, and in bf16 on processors without AMX).
Hidden keys add zeros, so rows come out alike if the pieces end at the same keys. So a call begins
at a multiple of 512, unless its keys are one piece wherever it begins, and is not given 193 to
383 keys but 384: a decode of 200 tokens takes 93 us for it instead of 71.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.attention.base import AttentionMetadata
from tgi_cli.attention.spec import KVSpec

QUERY_TILE = 64
"""Prompt tokens per call. torch's kernel computes what a mask hides, up to 512 keys at a time
even with ``is_causal``: a prompt of 512 takes 8.5 ms of one core in one call, 5.3 ms in
tiles of 64 and 5.7 in tiles of 32 or 128."""

KEYS = 16
QUERIES = 4
"""A call gets multiples of these numbers of keys and queries."""

PIECE = 512
MATRIX_PIECE = 192
"""Keys; see above. A backend with products of its own cuts at both; plans need not know it."""

MARGIN = MATRIX_PIECE
"""An upper bound of the hidden keys at the end of a call."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """Sequences with one query token that share a call."""

    rows: Tensor | None
    """int64 [n]: their tokens in the flat batch, or None for the first n, in order."""
    blocks: Tensor
    """int32 [n * blocks of the longest]."""
    size: int
    keys: int
    mask: Tensor
    """[n, 1, 1, keys], 0 or -inf."""
    distances: Tensor
    """int64 [n, 1, keys]: how far each key is before the query, negative after it."""


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Neighbouring queries of a prefill that share a call."""

    begin: int
    end: int
    """Range of the prefill's queries."""
    first_key: int
    """Index among the gathered keys."""
    visible: int
    """Keys from there to the last that any of the queries sees."""
    keys: int
    """Number of keys, including hidden ones that pad the call."""
    hidden: int
    """Leading keys that no query sees, as they are of the chunk before."""
    ahead: int = 0
    """Number of keys visible after the last query."""
    mask: Tensor | None = None
    """[queries, keys], 0 or -inf, of a tile with queries that see keys after them."""

    def distances(self) -> Tensor:
        """int64 [1, queries, keys]: how far each key is before each query."""
        own = self.visible - self.ahead - 1
        last = torch.arange(own, own - self.keys, -1)
        return (last + torch.arange(self.begin - self.end + 1, 1)[:, None])[None]


@dataclass(frozen=True, slots=True)
class Prefills:
    """Neighbours in the batch with equally many queries and equally long KV."""

    start: int
    size: int
    query_len: int
    keys: int
    """Number of keys gathered per sequence."""
    blocks: Tensor
    """int32 [n * blocks]."""
    tiles: list[QueryTile]


class WindowPlan:
    """The calls of all layers with the window, or the chunks, of ``spec``.

    ``allowance`` is how many padded keys of a decode cost as much as a further call.
    """

    def __init__(self, spec: KVSpec, block_size: int, dtype: torch.dtype, allowance: int) -> None:
        self._spec = spec
        self.decodes: list[Decodes] = []
        self.prefills: list[Prefills] = []
        self._block_size = block_size
        self._dtype = dtype
        self._allowance = allowance
        self._masks: dict[int, Tensor] = {}
        self._masked_len = 0
        self._align, self._stride = KEYS, math.lcm(KEYS, block_size)
        reach = spec.reach if spec.spans == "none" else None
        if reach is None or reach + QUERY_TILE + 2 * self._stride > MATRIX_PIECE:
            self._align, self._stride = PIECE, math.lcm(PIECE, block_size)

    def plan(self, metadata: AttentionMetadata) -> None:
        """Make the calls of a step."""
        count = metadata.num_decodes
        self.decodes = self._plan_decodes(metadata, count) if count else []
        self.prefills = self._plan_prefills(metadata, count)
        self._masked_len = max(
            (tile.visible for group in self.prefills for tile in group.tiles if tile.mask is None),
            default=0,
        )

    def causal_mask(self, share: int, like: Tensor) -> Tensor:
        """[tile * share, longest call or more + 192], of which every tile uses a part.

        The last row sees all columns but 192 (of a window, the last of them), each token before
        it one less.
        """
        mask = self._masks.get(share)
        if mask is None or mask.shape[1] < self._masked_len + MARGIN:
            width = round_up(self._masked_len, 1024) + MARGIN
            diagonal = width - MARGIN - QUERY_TILE
            every = torch.ones(QUERY_TILE, width, dtype=torch.bool)
            hidden = every.triu(diagonal + 1)
            if self._spec.window is not None:
                hidden |= every.tril_(diagonal - self._spec.window)
            rows = hidden.repeat_interleave(share, 0)
            mask = like.new_zeros(rows.shape).masked_fill_(rows, float("-inf"))
            self._masks[share] = mask
        return mask

    def _first_key(self, position: int) -> int:
        """The beginning of a call whose first query is at ``position``."""
        return self._spec.first_visible(position) // self._align * self._align

    def _first_gathered(self, position: int) -> int:
        """The first key to gather for that call, at the beginning of a block."""
        return self._spec.first_visible(position) // self._stride * self._stride

    def _call_keys(self, visible: int) -> int:
        """Number of keys of a call, padding included, for the number that queries see."""
        keys = round_up(visible, KEYS)
        last = keys % PIECE
        if MATRIX_PIECE < last < 2 * MATRIX_PIECE:
            keys += 2 * MATRIX_PIECE - last
        return keys

    def _plan_decodes(self, metadata: AttentionMetadata, count: int) -> list[Decodes]:
        """Groups of similar length: one as long as padding is cheaper than another call."""
        lengths = [
            kv_len - self._first_gathered(kv_len - 1) for kv_len in metadata.kv_lens_host[:count]
        ]
        if count * max(lengths) - sum(lengths) <= self._allowance:
            return [self._decode_group(metadata, None, lengths)]
        order = sorted(range(count), key=lengths.__getitem__, reverse=True)
        groups: list[list[int]] = []
        waste = 0
        for row in order:
            waste += lengths[groups[-1][0]] - lengths[row] if groups else 0
            if not groups or waste > self._allowance:
                groups.append([])
                waste = 0
            groups[-1].append(row)
        return [self._decode_group(metadata, rows, [lengths[r] for r in rows]) for rows in groups]

    def _decode_group(
        self, metadata: AttentionMetadata, rows: list[int] | None, lengths: list[int]
    ) -> Decodes:
        """``lengths`` are counted from where the keys of each sequence begin."""
        size = len(lengths)
        count = self._call_keys(max(lengths))
        index = None if rows is None else torch.tensor(rows)
        table = metadata.block_table
        table = table[:size] if index is None else table.index_select(0, index)
        kv_lens = metadata.kv_lens_host
        ends = np.array([kv_lens[row] for row in rows or range(size)])[:, None]
        positions = ends - np.array(lengths)[:, None] + np.arange(count)
        hidden = positions >= ends
        columns = positions[:, :: self._block_size] // self._block_size
        # Blocks outside the window or beyond the end may be another sequence's, or free: read the
        # sequence's own nearest block again.
        columns = np.minimum(columns, (ends - 1) // self._block_size)
        window, chunk = self._spec.window, self._spec.chunk
        if window is not None or chunk is not None:
            first = np.maximum(ends - window, 0) if chunk is None else (ends - 1) // chunk * chunk
            hidden |= positions < first
            columns = np.maximum(columns, first // self._block_size)
        blocks = table.gather(1, torch.from_numpy(columns))
        mask = torch.zeros(hidden.shape, dtype=self._dtype)
        mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))
        distances = torch.from_numpy(ends - 1 - positions)[:, None]
        return Decodes(index, blocks.flatten(), size, count, mask[:, None, None, :], distances)

    def _plan_prefills(self, metadata: AttentionMetadata, first: int) -> list[Prefills]:
        groups: list[Prefills] = []
        query_lens, kv_lens = metadata.query_lens_host, metadata.kv_lens_host
        spans = self._span_ends(metadata)
        row, start = first, first  # a decode is one token, so tokens and rows agree up to here
        while row < len(query_lens):
            query_len, kv_len = query_lens[row], kv_lens[row]
            end = row + 1
            while (
                spans is None
                and end < len(query_lens)
                and (query_lens[end], kv_lens[end]) == (query_len, kv_len)
            ):
                end += 1
            own = None if spans is None else spans[start : start + query_len]
            table = metadata.block_table[row:end]
            groups.append(self._prefill_group(table, start, query_len, kv_len, own))
            start += (end - row) * query_len
            row = end
        return groups

    def _span_ends(self, metadata: AttentionMetadata) -> NDArray[np.int32] | None:
        """``visible_until`` of a step, where it matters to these layers."""
        until = metadata.visible_until
        return None if until is None or self._spec.spans == "none" else until.numpy()

    def _prefill_group(
        self,
        table: Tensor,
        start: int,
        query_len: int,
        kv_len: int,
        until: NDArray[np.int32] | None = None,
    ) -> Prefills:
        """``until`` is the part of ``visible_until`` of a sequence that is alone in its group."""
        earlier = kv_len - query_len
        seen_from = self._spec.first_visible(earlier)
        if until is not None and until.max() >= 0 and self._spec.spans == "whole":
            seen_from = 0
        base = seen_from // self._stride * self._stride
        tiles = []
        begin = 0
        while begin < query_len:
            end = min(begin + QUERY_TILE, query_len)
            if until is not None and until[begin:end].max() >= 0:
                tiles.append(self._span_tile(begin, end, earlier, base, until[begin:end]))
                begin = end
                continue
            first = self._first_key(earlier + begin)
            hidden = 0
            if (chunk := self._spec.chunk) is not None:
                # Of one chunk: all queries of a tile see the same first key.
                end = min(end, begin + chunk - (earlier + begin) % chunk)
                hidden = self._spec.first_visible(earlier + begin) - first
            visible = earlier + end - first
            keys = self._call_keys(visible)
            tiles.append(QueryTile(begin, end, first - base, visible, keys, hidden))
            begin = end
        keys = max(tile.first_key + tile.keys for tile in tiles)
        # As in a decode, blocks that are no longer or not yet the sequence's are not read.
        columns = np.clip(
            np.arange(base, base + keys, self._block_size) // self._block_size,
            seen_from // self._block_size,
            (kv_len - 1) // self._block_size,
        )
        blocks = table.index_select(1, torch.from_numpy(columns)).flatten()
        return Prefills(start, len(table), query_len, keys, blocks, tiles)

    def _span_tile(
        self, begin: int, end: int, earlier: int, base: int, until: NDArray[np.int32]
    ) -> QueryTile:
        """A tile with queries that see keys after them."""
        positions = range(earlier + begin, earlier + end)
        seen = list(map(self._spec.visible, positions, until.tolist()))
        first = min(each.start for each in seen) // self._align * self._align
        visible = max(each.stop for each in seen) - first
        keys = self._call_keys(visible)
        places = np.arange(first, first + keys)
        starts, stops = (
            np.array([getattr(each, side) for each in seen])[:, None] for side in ("start", "stop")
        )
        hidden = torch.from_numpy((places < starts) | (places >= stops))
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        last = positions[-1] + 1 - first
        return QueryTile(begin, end, first - base, visible, keys, 0, visible - last, mask)


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below ``value``."""
    return -(-value // multiple) * multiple
