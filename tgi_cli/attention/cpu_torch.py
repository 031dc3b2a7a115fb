"""Paged attention on CPUs with stock torch.

What makes it fast, measured on one core with 9 query and 3 KV heads of 64 in bf16 and 32 sequences
of 192 tokens: KV is gathered by whole blocks (60 us for the keys, 440 by advanced indexing);
query heads that share a KV head become further queries of it (960 us, 5500 with
``enable_gqa``); decodes of similar length share one padded call.

A token's result does not depend on what shares its step, to the last bit: not on the lengths
beside it, nor on how its prompt was cut into chunks, nor on whether it was computed as prompt
or as decode. torch's kernel adds up a row the same way whatever else it computes, as long as
it is given a multiple of 16 keys (hidden ones add zeros) and a multiple of 4 queries (its
remainders of 1 to 3 take other code and more time: 930 us for 3, 720 for 4), and as long as
long sums are cut at the same keys, which the plan ensures. The same holds with a cap and with
sinks: the steps outside that kernel keep its rules. This was verified on x86 with AVX-512;
elsewhere a last bit may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgi_cli.attention.base import AttentionMetadata, PagedAttention
from tgi_cli.attention.cpu_plan import (
    MARGIN,
    QUERIES,
    Decodes,
    Prefills,
    WindowPlan,
)
from tgi_cli.attention.cpu_scores import Scoring, alike
from tgi_cli.attention.fp8 import FP8_DTYPES, FromFP8
from tgi_cli.attention.spec import KVSpec, Spans

_CALL_COST = 64 * 1024
"""Padded KV elements that cost as much as a further call: about 50 us."""


class CpuAttention(PagedAttention):
    """Decodes together in padded calls, prefills in tiles; any floating dtype."""

    def __init__(
        self,
        specs: Sequence[KVSpec],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(specs, block_size, dtype, device, cache_dtype)
        self._entered = torch.empty(0, dtype=torch.int64)
        self._upcast = FromFP8(self.cache_dtype, dtype) if self.cache_dtype in FP8_DTYPES else None
        self._allowance = _CALL_COST // max(
            (spec.num_kv_heads * spec.head_dim for spec in self.specs), default=1
        )
        self._plans = self._make_plans()

    def _make_plans(self) -> dict[tuple[int | None, int | None, Spans], WindowPlan]:
        return {
            (spec.window, spec.chunk, spec.spans): WindowPlan(
                spec, self.block_size, self.dtype, self._allowance
            )
            for spec in self.specs
            if not spec.index
        }

    def beside(self) -> Self:
        other = super().beside()
        other._plans = self._make_plans()
        return other

    def plan(self, metadata: AttentionMetadata) -> None:
        self.planned = metadata
        self._entered = self._plan_entered(metadata)
        for plan in self._plans.values():
            plan.plan(metadata)

    def store(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        if len(self._entered):
            # A mask hides a score but not a NaN: what a broken request left behind must not reach
            # the next owner of its block through the places not written yet.
            self.raw(self.key_cache[layer]).index_fill_(0, self._entered, 0)
            self.raw(self.value_cache[layer]).index_fill_(0, self._entered, 0)
        super().store(layer, key, value)

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        spec = self.specs[layer]
        if sinks is not None:
            sinks = sinks.to(torch.float32).view(spec.num_kv_heads, -1)
        scoring = Scoring(scale, softcap, sinks, bias)
        if key is not None:
            self.store(layer, key, value)
        plan = self._plans[spec.window, spec.chunk, spec.spans]
        if len(plan.decodes) == 1 and not plan.prefills:
            return self._decode(layer, plan.decodes[0], query, scoring)
        output = query.new_empty(*query.shape[:2], spec.value_width)
        for decodes in plan.decodes:
            if decodes.rows is None:
                queries = query[: decodes.size]
                output[: decodes.size] = self._decode(layer, decodes, queries, scoring)
            else:
                queries = query.index_select(0, decodes.rows)
                output.index_copy_(0, decodes.rows, self._decode(layer, decodes, queries, scoring))
        for prefills in plan.prefills:
            self._prefill(layer, plan, prefills, query, scoring, output)
        return output

    def _decode(self, layer: int, group: Decodes, query: Tensor, scoring: Scoring) -> Tensor:
        keys, values = self._gather(layer, group)
        distances, width = group.distances, self.specs[layer].value_width
        return scoring.attend_tokens(query, keys, values, group.mask, width, distances)

    def _prefill(
        self,
        layer: int,
        plan: WindowPlan,
        group: Prefills,
        query: Tensor,
        scoring: Scoring,
        output: Tensor,
    ) -> None:
        heads, head_dim = query.shape[1:]
        kv_heads, width = self.specs[layer].num_kv_heads, self.specs[layer].value_width
        share = heads // kv_heads
        tokens = slice(group.start, group.start + group.size * group.query_len)
        keys, values = self._gather(layer, group)
        # [sequence, token, KV head, query head of it, head_dim]
        queries = query[tokens].view(group.size, group.query_len, kv_heads, share, head_dim)
        outputs = output[tokens].view(group.size, group.query_len, kv_heads, share, width)
        mask = plan.causal_mask(share, query)
        for tile in group.tiles:
            count = tile.end - tile.begin
            rows = count * share
            filling = -rows % QUERIES
            left = mask.shape[1] - MARGIN - tile.visible
            seen = slice(tile.first_key, tile.first_key + tile.keys)
            some = queries[:, tile.begin : tile.end].transpose(1, 2)
            some = some.reshape(group.size, kv_heads, rows, head_dim)
            if filling or width > head_dim:
                some = pad(some, (0, max(width - head_dim, 0), filling, 0))
            if tile.mask is None:
                hidden = mask[-rows - filling :, left : left + tile.keys]
            else:
                hidden = tile.mask.repeat_interleave(share, 0)
                hidden = torch.cat((hidden[:1].expand(filling, -1), hidden))
            if tile.hidden:
                hidden = hidden.clone()
                hidden[:, : tile.hidden] = float("-inf")
            attended = scoring.attend(
                some,
                keys[:, :, seen],
                values[:, :, seen],
                hidden,
                None if scoring.bias is None else tile.distances(),
            )
            outputs[:, tile.begin : tile.end].transpose(1, 2).copy_(
                attended[:, :, filling:, :width].view(group.size, kv_heads, count, share, width)
            )

    def _gather(self, layer: int, group: Decodes | Prefills) -> tuple[Tensor, Tensor]:
        """Keys and values of n sequences of equally many blocks: [n, kv_heads, keys, width].

        Both as wide as the wider one. Values that are part of the keys are given with what else is
        there.
        """
        spec = self.specs[layer]
        keys = self._sequences(self.key_cache[layer], group)
        if spec.values_in_keys:
            return keys, keys
        return alike(keys, self._sequences(self.value_cache[layer], group))

    def _sequences(self, cache: Tensor, group: Decodes | Prefills) -> Tensor:
        gathered = self.raw(cache).index_select(0, group.blocks)
        if self._upcast is not None:
            gathered = self._upcast(gathered)
        tokens = gathered.view(group.size, -1, *gathered.shape[2:])
        return tokens[:, : group.keys].transpose(1, 2)

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
            return metadata.slot_mapping[:0]
        rows, columns = torch.tensor(ends).unbind(1)
        return metadata.block_table[rows, columns].long()
