"""The oracle: one sequence at a time, in fp32, on any device. Simple before fast."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tgi_cli.attention.base import AttentionMetadata, PagedAttention, bias_at
from tgi_cli.attention.spec import KVScales


class ReferenceAttention(PagedAttention):
    """softmax(q k^T * scale) v over the gathered blocks of each sequence."""

    def use_scales(self, scales: Mapping[int, KVScales]) -> bool:
        self.scales = dict(scales)
        return True

    def plan(self, metadata: AttentionMetadata) -> None:
        self.planned = metadata

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
        metadata, spec = self.planned, self.specs[layer]
        assert metadata is not None
        if key is not None:
            self.store(layer, key, value)
        output = query.new_empty(*query.shape[:2], spec.value_width)
        groups = query.shape[1] // spec.num_kv_heads
        scales = self.scales.get(layer, KVScales())
        start = 0
        for row, (query_len, kv_len) in enumerate(
            zip(metadata.query_lens_host, metadata.kv_lens_host, strict=True)
        ):
            end = start + query_len
            first = self.first_block(layer, kv_len - query_len)
            keys = self.gather(self.key_cache[layer], row, first)
            values = self.gather(self.value_cache[layer], row, first)
            keys = keys.repeat_interleave(groups, 0) * scales.key
            values = values.repeat_interleave(groups, 0) * scales.value
            scores = query[start:end].transpose(0, 1).float() @ keys.transpose(1, 2) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            # The queries are the last of the sequence.
            positions = range(kv_len - query_len, kv_len)
            until = [-1] * query_len
            if metadata.visible_until is not None:
                until = metadata.visible_until[start:end].tolist()
            seen = list(map(spec.visible, positions, until))
            places = torch.arange(first * self.block_size, kv_len, device=query.device)
            own = torch.tensor(positions, device=query.device)[:, None]
            begins = torch.tensor([each.start for each in seen], device=query.device)
            ends = torch.tensor([each.stop for each in seen], device=query.device)
            if bias is not None:
                scores = scores + bias_at(bias.float(), own - places)
            hidden = (places >= ends[:, None]) | (places < begins[:, None])
            scores = scores.masked_fill_(hidden, float("-inf"))
            if sinks is None:
                weights = scores.softmax(-1)
            else:
                sink = sinks.float()[:, None, None].expand(-1, query_len, 1)
                weights = torch.cat((scores, sink), -1).softmax(-1)[:, :, :-1]
            output[start:end] = (weights @ values).transpose(0, 1).to(query.dtype)
            start = end
        return output
