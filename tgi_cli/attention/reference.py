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
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        metadata = self._metadata
        self.write(layer, key, value, metadata.slot_mapping)
        output = torch.empty_like(query)
        groups = query.shape[1] // key.shape[1]
        start = 0
        for row, (query_len, kv_len) in enumerate(
            zip(metadata.query_lens_host, metadata.kv_lens_host, strict=True)
        ):
            end = start + query_len
            keys = self._gather(self.key_cache[layer], row, kv_len).repeat_interleave(groups, 0)
            values = self._gather(self.value_cache[layer], row, kv_len).repeat_interleave(groups, 0)
            scores = query[start:end].transpose(0, 1).float() @ keys.transpose(1, 2) * scale
            # The queries are the last of the sequence: query i sees keys 0 .. kv_len-query_len+i.
            hidden = torch.ones_like(scores[0], dtype=torch.bool).triu_(kv_len - query_len + 1)
            weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
            output[start:end] = (weights @ values).transpose(0, 1).to(query.dtype)
            start = end
        return output

    def _gather(self, cache: Tensor, row: int, kv_len: int) -> Tensor:
        """The keys or values of a sequence, fp32 [kv_heads, kv_len, head_dim]."""
        blocks = -(-kv_len // self.block_size)
        table = self._metadata.block_table[row, :blocks]
        return cache[table].flatten(0, 1)[:kv_len].transpose(0, 1).float()
