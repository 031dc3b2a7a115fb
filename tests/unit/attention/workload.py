"""Random sequences for paged attention, and attention written out over them."""

from __future__ import annotations

import random
from collections.abc import Callable

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
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[n, heads, D] queries, the last of [m, kv_heads, D] keys: one head and query at a time."""
    share = query.shape[1] // keys.shape[1]
    output = torch.zeros(query.shape, dtype=torch.float64)
    first = len(keys) - len(query)
    for token in range(len(query)):
        for head in range(query.shape[1]):
            position = first + token
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            scores = keys[seen, head // share].double() @ query[token, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            weights = scores.softmax(0)[: position + 1 - seen.start]
            output[token, head] = weights @ values[seen, head // share].double()
    return output


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
        scale: float = 0.3,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.scale, self.softcap, self.sinks = scale, softcap, sinks
        self.dim = dim
        self.query_lens = [query_len for query_len, _ in lens]
        self.kv_lens = [kv_len for _, kv_len in lens]
        self.dtype = dtype
        generator = torch.Generator().manual_seed(len(lens))

        def draw(count: int, per_token: int) -> Tensor:
            return torch.randn(count, per_token, dim, generator=generator).to(dtype)

        self.queries = [draw(query_len, heads) for query_len in self.query_lens]
        self.keys = [draw(kv_len, kv_heads) for kv_len in self.kv_lens]
        self.values = [draw(kv_len, kv_heads) for kv_len in self.kv_lens]
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
        tables = self.tables
        window = attention.specs[layer].window
        if window is not None:
            tables = [list(table) for table in tables]
            for table, count in zip(tables, earlier, strict=True):
                self.free_out_of_window(attention, table, max(0, count - window + 1) // BLOCK)
        attention.plan(make_metadata(tables, self.query_lens, self.kv_lens, BLOCK))

        def step(tensors: list[Tensor]) -> Tensor:
            return torch.cat([t[n:] for t, n in zip(tensors, earlier, strict=True)])

        with torch.inference_mode():
            output = attention(
                layer,
                torch.cat(self.queries),
                step(self.keys),
                step(self.values),
                self.scale,
                self.softcap,
                self.sinks,
            )
        assert output.dtype == self.dtype
        return list(torch.split(output, self.query_lens))

    def free_out_of_window(self, attention: PagedAttention, table: list[int], count: int) -> None:
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
        window = attention.specs[layer].window
        for row, output in enumerate(self.attend(attention, layer)):
            keys, values = kept(self.keys[row]), kept(self.values[row])
            wanted = plain(
                self.queries[row], keys, values, self.scale, window, self.softcap, self.sinks
            )
            torch.testing.assert_close(output.double(), wanted, atol=tolerance, rtol=0)


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
