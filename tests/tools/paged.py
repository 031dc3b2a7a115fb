"""Drives a model over a paged cache as a worker would, for tests of what lies below it."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from tgi_cli.attention import AttentionMetadata, create_attention
from tgi_cli.models import CausalLM

CPU = torch.device("cpu")


def make_metadata(
    tables: list[list[int]], query_lens: list[int], kv_lens: list[int], block_size: int
) -> AttentionMetadata:
    """Metadata of a step; unused places of the block table hold an id that is out of range."""
    width = max(map(len, tables)) + 1
    padded = [table + [2**31 - 1] * (width - len(table)) for table in tables]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, query_len, kv_len in zip(tables, query_lens, kv_lens, strict=True)
        for position in range(kv_len - query_len, kv_len)
    ]
    decodes = 0
    while decodes < len(query_lens) and query_lens[decodes] == 1:
        decodes += 1
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        block_table=torch.tensor(padded, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        query_lens_host=query_lens,
        kv_lens_host=kv_lens,
        num_decodes=decodes,
    )


class PagedRun:
    """Token sequences over one model; blocks are handed out in random order."""

    def __init__(
        self, model: CausalLM, dtype: torch.dtype, backend: str | None, block_size: int = 16
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.attention = create_attention(backend, model.kv_specs, block_size, dtype, CPU)
        self.attention.allocate(512)
        for cache in (*self.attention.key_cache, *self.attention.value_cache):
            cache.fill_(float("nan"))  # nothing that was not written may be read
        self._free = random.Random(0).sample(range(512), 512)
        self._tables: dict[str, list[int]] = {}
        self._lens: dict[str, int] = {}

    def step(self, tokens: dict[str, list[int]]) -> dict[str, Tensor]:
        """Append tokens to sequences in one forward pass; float32 logits [n, vocab] of each."""
        order = sorted(tokens, key=lambda name: len(tokens[name]) != 1)
        for name in order:
            table = self._tables.setdefault(name, [])
            self._lens[name] = self._lens.get(name, 0) + len(tokens[name])
            while len(table) * self.block_size < self._lens[name]:
                table.append(self._free.pop())
        query_lens = [len(tokens[name]) for name in order]
        kv_lens = [self._lens[name] for name in order]
        ids = torch.tensor([token for name in order for token in tokens[name]])
        positions = torch.tensor(
            [p for q, k in zip(query_lens, kv_lens, strict=True) for p in range(k - q, k)]
        )
        metadata = make_metadata(
            [self._tables[name] for name in order], query_lens, kv_lens, self.block_size
        )
        with torch.inference_mode():
            self.attention.plan(metadata)
            logits = self.model.logits(self.model(ids, positions, self.attention))
        return dict(zip(order, torch.split(logits, query_lens), strict=True))
