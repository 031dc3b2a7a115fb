"""Random sequences for paged attention, and attention written out over them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tests.tools.paged_run import CPU, NOWHERE, make_metadata
from tgi_cli.attention import KVSpec, PagedAttention, create_attention

BLOCK = 16
DIM = 24
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def plain(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    spec: KVSpec,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    until: list[int] | None = None,
) -> Tensor:
    """float64 [n, heads, D] of [n, heads, D] queries, the last of [m, kv_heads, D] keys."""
    first, share = len(keys) - len(query), query.shape[1] // keys.shape[1]
    seen = torch.zeros(len(query), len(keys), dtype=torch.bool)
    for token, row in enumerate(seen):
        visible = slice(spec.first_visible(first + token), first + token + 1)
        if until is not None and until[token] >= 0 and spec.spans != "none":
            visible = slice(0 if spec.spans == "whole" else visible.start, until[token] + 1)
        row[visible] = True
    # What no query sees may be anything, NaN included.
    values = values.double().masked_fill(~seen.any(0)[:, None, None], 0.0)
    keys, values = (each.double().repeat_interleave(share, 1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        distances = torch.arange(first, len(keys))[:, None] - torch.arange(len(keys))
        scores += torch.stack([bias_at(head, distances) for head in bias]).double()
    scores.masked_fill_(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values)


def bias_at(bias: Tensor, distances: Tensor) -> Tensor:
    """A head's bias at distances: a line goes on behind the table."""
    beyond = (distances - len(bias) + 1).clamp(min=0)
    return bias[distances.clamp(0, len(bias) - 1)] + beyond * (bias[-1] - bias[-2])


class Batch:
    """Sequences of random keys and values, of which the last ``query_lens`` are this step's."""

    def __init__(
        self,
        lens: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        dtype: torch.dtype,
        *,
        dim: int = DIM,
        value_dim: int | None = None,
        scale: float = 0.3,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
        written_before: bool = False,
        spans: Sequence[Sequence[tuple[int, int]]] = (),
    ) -> None:
        """``written_before``: another layer's call, in the same step, has written the cache.
        ``spans``: by sequence, first position and length of those whose tokens attend to each
        other.
        """
        self.scale, self.softcap, self.sinks, self.bias = scale, softcap, sinks, bias
        self.written_before = written_before
        self.dim = dim
        self.query_lens = [query_len for query_len, _ in lens]
        self.kv_lens = [kv_len for _, kv_len in lens]
        self.until = [
            [last_of(position, some) for position in range(kv_len - query_len, kv_len)]
            for (query_len, kv_len), some in zip(lens, spans, strict=bool(spans))
        ]
        self.dtype = dtype
        generator = torch.Generator().manual_seed(len(lens))

        def draw(count: int, per_token: int, dim: int = dim) -> Tensor:
            return torch.randn(count, per_token, dim, generator=generator).to(dtype)

        self.queries = [draw(query_len, heads) for query_len in self.query_lens]
        self.keys = [draw(kv_len, kv_heads) for kv_len in self.kv_lens]
        self.values = [draw(kv_len, kv_heads, value_dim or dim) for kv_len in self.kv_lens]
        free = random.Random(1).sample(range(200), 200)
        self.tables = [[free.pop() for _ in range(-(-kv_len // BLOCK))] for kv_len in self.kv_lens]

    def attend(self, attention: PagedAttention, layer: int) -> list[Tensor]:
        """One step per sequence for what came before, then the step."""
        earlier = [k - q for q, k in zip(self.query_lens, self.kv_lens, strict=True)]
        for table, count, keys, values in zip(
            self.tables, earlier, self.keys, self.values, strict=True
        ):
            if count:
                attention.plan(make_metadata([table], [count], [count], BLOCK))
                queries = torch.zeros(count, self.queries[0].shape[1], self.dim, dtype=self.dtype)
                attention(layer, queries, keys[:count], values[:count], self.scale)
        tables = [list(table) for table in self.tables]
        for table, count in zip(tables, earlier, strict=True):
            self.free_unseen(attention, table, attention.first_block(layer, count))
        metadata = make_metadata(tables, self.query_lens, self.kv_lens, BLOCK)
        if self.until:
            metadata.visible_until = torch.tensor(list(chain(*self.until)), dtype=torch.int32)
        attention.plan(metadata)

        def step(tensors: list[Tensor]) -> Tensor:
            return torch.cat([t[n:] for t, n in zip(tensors, earlier, strict=True)])

        keys: Tensor | None = step(self.keys)
        values: Tensor | None = step(self.values)
        queries = torch.cat(self.queries)
        with torch.inference_mode():
            if self.written_before:
                attention(layer, queries * 2, keys, values, self.scale)
                keys = values = None
            elif attention.specs[layer].values_in_keys:
                values = None
            output = attention(
                layer,
                queries,
                keys,
                values,
                self.scale,
                self.softcap,
                self.sinks,
                self.bias,
            )
        assert output.dtype == self.dtype
        return list(torch.split(output, self.query_lens))

    def free_unseen(self, attention: PagedAttention, table: list[int], count: int) -> None:
        """The first blocks get new owners with broken numbers, or are not even there."""
        for index in range(count):
            for cache in (*attention.key_cache, *attention.value_cache):
                cache[table[index]].fill_(float("nan"))
            if index % 2:
                table[index] = NOWHERE

    def check(
        self,
        attention: PagedAttention,
        layer: int,
        tolerance: float,
        kept: Callable[[Tensor], Tensor] = lambda numbers: numbers,
    ) -> None:
        """``kept``: what the cache makes of keys and values."""
        spec = attention.specs[layer]
        for row, output in enumerate(self.attend(attention, layer)):
            keys, values = kept(self.keys[row]), kept(self.values[row])
            wanted = plain(
                self.queries[row],
                keys,
                values,
                self.scale,
                spec,
                self.softcap,
                self.sinks,
                self.bias,
                self.until[row] if self.until else None,
            )
            torch.testing.assert_close(output.double(), wanted, atol=tolerance, rtol=0)


def last_of(position: int, spans: Sequence[tuple[int, int]]) -> int:
    """The last position of the span that one is in, or -1."""
    return next((a + n - 1 for a, n in spans if a <= position < a + n), -1)


WIDER: dict[str, tuple[KVSpec, dict[str, Any]]] = {
    "narrow values": (KVSpec(2, 64, value_dim=32), {}),
    "wide values": (KVSpec(2, 32, value_dim=64), {}),
    "heads of 512 dimensions": (KVSpec(1, 512), {}),
    "narrow values in windows": (KVSpec(2, 64, 50, value_dim=32), {}),
    "chunks shorter than a block": (KVSpec(2, 64, chunk=7), {}),
    "chunks beside blocks": (KVSpec(2, 64, chunk=50), {}),
    "chunks": (KVSpec(2, 64, chunk=128), {}),
    "slopes": (
        KVSpec(2, 64),
        {"bias": torch.tensor([[0.0, -(2.0 ** -(i + 1))] for i in range(6)])},
    ),
    "slopes and sinks in windows": (
        KVSpec(2, 64, 50),
        {
            "bias": torch.tensor([[0.1 * i, -0.3] for i in range(6)]),
            "sinks": torch.tensor([0.5, -2.0, 3.0, 1.0, 0.0, 6.0]),
        },
    ),
    "slopes under a cap": (
        KVSpec(2, 64),
        {"bias": torch.tensor([[0.0, -0.25]] * 6), "softcap": 2.0},
    ),
    "learned bias": (
        KVSpec(2, 64),
        {"bias": torch.randn(6, 37, generator=torch.Generator().manual_seed(3))},
    ),
    "a cache that another layer has written": (KVSpec(2, 64, 50), {"written_before": True}),
}
"""Caches and calls: of what the plain ones do not have."""


def wider(name: str, lens: list[tuple[int, int]], dtype: torch.dtype) -> tuple[KVSpec, Batch]:
    """The cache of :data:`WIDER` of that name, and a batch for it."""
    spec, options = WIDER[name]
    return spec, Batch(
        lens,
        6,
        spec.num_kv_heads,
        dtype,
        dim=spec.head_dim,
        value_dim=spec.value_dim,
        scale=0.125,
        **options,
    )


BATCHES = {
    "one decode": [(1, 1)],
    "a decode at a block's end": [(1, 16)],
    "decodes of one length": [(1, 40)] * 3,
    "decodes of similar length": [(1, 33), (1, 48), (1, 40)],
    "decodes of very different length": [(1, 3), (1, 700), (1, 20), (1, 690), (1, 1), (1, 350)],
    "one prompt": [(37, 37)],
    "a prompt longer than a tile": [(150, 150)],
    "prompts of one length": [(21, 21)] * 3,
    "a chunk behind a prefix": [(70, 203)],
    "equal chunks behind prefixes": [(20, 90)] * 2,
    "a chunk of one token, not counted as decode": [(2, 9), (1, 77)],
    "everything": [(1, 5), (1, 300), (1, 301), (64, 64), (64, 64), (65, 90), (3, 3), (129, 400)],
}


def make(
    backend: str,
    specs: list[KVSpec],
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
) -> PagedAttention:
    attention = create_attention(backend, specs, BLOCK, dtype, CPU, cache_dtype)
    attention.allocate(200)
    return attention
