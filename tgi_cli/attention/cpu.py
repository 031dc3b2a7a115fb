"""Paged attention out of stock torch, as fast as that goes on a CPU.

What counts, measured on one core with 9 query and 3 KV heads of 64 in bf16 and 32 sequences
of 192 tokens: KV is gathered by whole blocks (60 us for the keys, 440 by advanced indexing);
query heads that share a KV head become further queries of it (960 us, 5500 with
``enable_gqa``); decodes of similar length share one padded call.

A token's result does not depend on what shares its step, to the last bit: not on the lengths
beside it, nor on how its prompt was cut into chunks, nor on whether it was computed as prompt
or as decode. torch's kernel adds up a row the same way whatever else it computes, as long as
it is given a multiple of 16 keys (hidden ones add zeros) and a multiple of 4 queries (its
remainders of 1 to 3 take other code - and more time: 930 us for 3, 720 for 4). So it is on
x86 with AVX-512; elsewhere a last bit may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from tgi_cli.attention.base import AttentionMetadata, KVSpec, PagedAttention

_QUERY_TILE = 64
"""Prompt tokens per call. torch's kernel computes what a mask hides, up to 512 keys at a time
even when told ``is_causal``: a prompt of 512 takes 8.5 ms of one core in one call, 5.3 ms in
tiles of 64 and 5.7 in tiles of 32 or 128."""

_KEYS = 16
_QUERIES = 4
"""Of these a call gets whole multiples; see above."""

_CALL_COST = 64 * 1024
"""Padded KV elements that cost as much as a further call: about 50 us."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one query token that share a call."""

    rows: Tensor | None
    """int64 [n]: their tokens in the flat batch; None: the first n, in order."""
    blocks: Tensor
    """int32 [n * blocks of the longest]."""
    size: int
    mask: Tensor
    """[n, 1, 1, keys], 0 or -inf."""


@dataclass(frozen=True, slots=True)
class _Prefills:
    """Neighbours in the batch with equally many queries and equally long KV."""

    start: int
    size: int
    query_len: int
    kv_len: int
    blocks: Tensor
    """int32 [n * blocks]."""


class CpuAttention(PagedAttention):
    """Decodes together in padded calls, prefills in tiles; any floating dtype."""

    def __init__(
        self,
        specs: Sequence[KVSpec],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(specs, block_size, dtype, device)
        self._slots = torch.empty(0, dtype=torch.int64)
        self._entered = self._slots
        self._decodes: list[_Decodes] = []
        self._prefills: list[_Prefills] = []
        self._masks: dict[int, Tensor] = {}
        self._masked_len = 0

    def plan(self, metadata: AttentionMetadata) -> None:
        self._slots = metadata.slot_mapping
        self._entered = self._plan_entered(metadata)
        count = metadata.num_decodes
        self._decodes = self._plan_decodes(metadata, count) if count else []
        self._prefills = self._plan_prefills(metadata, count)
        self._masked_len = max((group.kv_len for group in self._prefills), default=0)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        if len(self._entered):
            # A mask hides a score but not a NaN: what a broken request left behind must not
            # reach the next owner of its block through the places not written yet.
            self.key_cache[layer].index_fill_(0, self._entered, 0)
            self.value_cache[layer].index_fill_(0, self._entered, 0)
        self.write(layer, key, value, self._slots)
        if len(self._decodes) == 1 and not self._prefills:
            return self._decode(layer, self._decodes[0], query, scale)
        output = query.new_empty(query.shape)
        for decodes in self._decodes:
            if decodes.rows is None:
                queries = query[: decodes.size]
                output[: decodes.size] = self._decode(layer, decodes, queries, scale)
            else:
                queries = query.index_select(0, decodes.rows)
                output.index_copy_(0, decodes.rows, self._decode(layer, decodes, queries, scale))
        for prefills in self._prefills:
            self._prefill(layer, prefills, query, scale, output)
        return output

    def _decode(self, layer: int, group: _Decodes, query: Tensor, scale: float) -> Tensor:
        size, heads, head_dim = query.shape
        kv_heads = self.specs[layer].num_kv_heads
        share = heads // kv_heads
        keys, values = self._gather(layer, group.blocks, size)
        queries = query.view(size, kv_heads, share, head_dim)
        if share % _QUERIES:
            queries = pad(queries, (0, 0, 0, -share % _QUERIES))
        attended = scaled_dot_product_attention(
            queries, keys, values, attn_mask=group.mask, scale=scale
        )
        return attended[:, :, :share].reshape(size, heads, head_dim)

    def _prefill(
        self,
        layer: int,
        group: _Prefills,
        query: Tensor,
        scale: float,
        output: Tensor,
    ) -> None:
        heads, head_dim = query.shape[1:]
        kv_heads = self.specs[layer].num_kv_heads
        share = heads // kv_heads
        tokens = slice(group.start, group.start + group.size * group.query_len)
        keys, values = self._gather(layer, group.blocks, group.size)
        # [sequence, token, KV head, query head of it, head_dim]
        queries = query[tokens].view(group.size, group.query_len, kv_heads, share, head_dim)
        outputs = output[tokens].view(group.size, group.query_len, kv_heads, share, head_dim)
        mask = self._causal_mask(share, query)
        for begin in range(0, group.query_len, _QUERY_TILE):
            end = min(begin + _QUERY_TILE, group.query_len)
            rows = (end - begin) * share
            filling = -rows % _QUERIES
            visible = group.kv_len - group.query_len + end
            width = _round_up(visible, _KEYS)
            left = mask.shape[1] - _KEYS - visible
            tile = queries[:, begin:end].transpose(1, 2)
            tile = tile.reshape(group.size, kv_heads, rows, head_dim)
            attended = scaled_dot_product_attention(
                pad(tile, (0, 0, filling, 0)) if filling else tile,
                keys[:, :, :width],
                values[:, :, :width],
                attn_mask=mask[-rows - filling :, left : left + width],
                scale=scale,
            )
            outputs[:, begin:end].transpose(1, 2).copy_(
                attended[:, :, filling:].view(group.size, kv_heads, end - begin, share, head_dim)
            )

    def _gather(self, layer: int, blocks: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Keys and values of n sequences of equally many blocks: [n, kv_heads, keys, head_dim]."""
        return (
            self._sequences(self.key_cache[layer].index_select(0, blocks), size),
            self._sequences(self.value_cache[layer].index_select(0, blocks), size),
        )

    def _sequences(self, blocks: Tensor, size: int) -> Tensor:
        tokens = blocks.view(size, -1, *blocks.shape[2:])
        lacking = -tokens.shape[1] % _KEYS  # none with blocks of 16
        if lacking:
            tokens = pad(tokens, (0, 0, 0, 0, 0, lacking))
        return tokens.transpose(1, 2)

    def _causal_mask(self, share: int, like: Tensor) -> Tensor:
        """[tile * share, longest KV or more + 16], of which every tile uses a part.

        The last row sees all columns but 16, each token before it one less.
        """
        mask = self._masks.get(share)
        if mask is None or mask.shape[1] < self._masked_len + _KEYS:
            width = _round_up(self._masked_len, 1024) + _KEYS
            hidden = torch.ones(_QUERY_TILE, width, dtype=torch.bool)
            hidden.triu_(width - _KEYS - _QUERY_TILE + 1)
            rows = hidden.repeat_interleave(share, 0)
            mask = like.new_zeros(rows.shape).masked_fill_(rows, float("-inf"))
            self._masks[share] = mask
        return mask

    def _plan_entered(self, metadata: AttentionMetadata) -> Tensor:
        """int64: the blocks that this step writes from their first token on, but not to the end."""
        size = self.block_size
        ends = [
            (row, kv_len // size)
            for row, (query_len, kv_len) in enumerate(
                zip(metadata.query_lens_host, metadata.kv_lens_host, strict=True)
            )
            if 0 < kv_len % size <= query_len
        ]
        if not ends:
            return self._slots[:0]
        rows, columns = torch.tensor(ends).unbind(1)
        return metadata.block_table[rows, columns].long()

    def _plan_decodes(self, metadata: AttentionMetadata, count: int) -> list[_Decodes]:
        """Groups of similar length: one as long as padding is cheaper than another call."""
        lengths = metadata.kv_lens_host[:count]
        element_cost = max(spec.num_kv_heads * spec.head_dim for spec in self.specs)
        allowance = _CALL_COST // element_cost
        if count * max(lengths) - sum(lengths) <= allowance:
            return [self._decode_group(metadata, None, lengths)]
        order = sorted(range(count), key=lengths.__getitem__, reverse=True)
        groups: list[list[int]] = []
        waste = 0
        for row in order:
            waste += lengths[groups[-1][0]] - lengths[row] if groups else 0
            if not groups or waste > allowance:
                groups.append([])
                waste = 0
            groups[-1].append(row)
        return [self._decode_group(metadata, rows, [lengths[r] for r in rows]) for rows in groups]

    def _decode_group(
        self, metadata: AttentionMetadata, rows: list[int] | None, lengths: list[int]
    ) -> _Decodes:
        size = len(lengths)
        width = -(-max(lengths) // self.block_size)
        index = None if rows is None else torch.tensor(rows)
        if index is None:
            blocks = metadata.block_table[:size, :width]
        else:
            blocks = metadata.block_table.index_select(0, index)[:, :width]
        keys = width * self.block_size
        beyond = torch.arange(_round_up(keys, _KEYS)) >= torch.tensor(lengths)[:, None]
        mask = torch.zeros(beyond.shape, dtype=self.dtype).masked_fill_(beyond, float("-inf"))
        # The table's own padding may hold anything: read the sequence's first block again.
        blocks = blocks.where(~beyond[:, : keys : self.block_size], blocks[:, :1])
        return _Decodes(index, blocks.flatten(), size, mask[:, None, None, :])

    def _plan_prefills(self, metadata: AttentionMetadata, first: int) -> list[_Prefills]:
        groups: list[_Prefills] = []
        query_lens, kv_lens = metadata.query_lens_host, metadata.kv_lens_host
        row, start = first, first  # a decode is one token, so tokens and rows agree up to here
        while row < len(query_lens):
            query_len, kv_len = query_lens[row], kv_lens[row]
            end = row + 1
            while end < len(query_lens) and (query_lens[end], kv_lens[end]) == (query_len, kv_len):
                end += 1
            width = -(-kv_len // self.block_size)
            blocks = metadata.block_table[row:end, :width].flatten()
            groups.append(_Prefills(start, end - row, query_len, kv_len, blocks))
            start += (end - row) * query_len
            row = end
        return groups


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
