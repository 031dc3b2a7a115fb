"""The oracle: one sequence at a time, in fp32, on any device. Simple before fast."""

from __future__ import annotations

import torch
from torch import Tensor

from tgi_cli.attention.base import AttentionMetadata, PagedAttention


class ReferenceAttention(PagedAttention):
    """softmax(q k^T * scale) v over the gathered blocks of each sequence."""

    _metadata: AttentionMetadata

    def plan(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        metadata, window = self._metadata, self.specs[layer].window
        self.write(layer, key, value, metadata.slot_mapping)
        output = torch.empty_like(query)
        groups = query.shape[1] // key.shape[1]
        start = 0
        for row, (query_len, kv_len) in enumerate(
            zip(metadata.query_lens_host, metadata.kv_lens_host, strict=True)
        ):
            end = start + query_len
            first = self.first_block(layer, kv_len - query_len)
            keys = self._gather(self.key_cache[layer], row, first, kv_len)
            values = self._gather(self.value_cache[layer], row, first, kv_len)
            keys = keys.repeat_interleave(groups, 0)
            values = values.repeat_interleave(groups, 0)
            scores = query[start:end].transpose(0, 1).float() @ keys.transpose(1, 2) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            # The queries are the last of the sequence: the first sees all keys but query_len-1.
            diagonal = keys.shape[1] - query_len
            hidden = torch.ones_like(scores[0], dtype=torch.bool).triu_(diagonal + 1)
            if window is not None:
                hidden |= torch.ones_like(hidden).tril_(diagonal - window)
            scores = scores.masked_fill_(hidden, float("-inf"))
            if sinks is None:
                weights = scores.softmax(-1)
            else:
                sink = sinks.float()[:, None, None].expand(-1, query_len, 1)
                weights = torch.cat((scores, sink), -1).softmax(-1)[:, :, :-1]
            output[start:end] = (weights @ values).transpose(0, 1).to(query.dtype)
            start = end
        return output

    def _gather(self, cache: Tensor, row: int, first: int, kv_len: int) -> Tensor:
        """Of a sequence, from block ``first`` on: fp32 [kv_heads, keys, head_dim]."""
        last = -(-kv_len // self.block_size)
        table = self._metadata.block_table[row, first:last]
        tokens = self.raw(cache).index_select(0, table).view(cache.dtype).flatten(0, 1)
        return tokens[: kv_len - first * self.block_size].transpose(0, 1).float()
