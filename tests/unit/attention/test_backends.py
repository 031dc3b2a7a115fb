"""Both backends against attention written out over contiguous keys and values."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.tools.paged import CPU, make_metadata
from tgi_cli.attention import KVSpec, PagedAttention, create_attention

BLOCK = 16
DIM = 24


def plain(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """[n, heads, D] queries, the last of [m, kv_heads, D] keys: one head and query at a time."""
    share = query.shape[1] // keys.shape[1]
    output = torch.zeros(query.shape, dtype=torch.float64)
    first = len(keys) - len(query)
    for token in range(len(query)):
        for head in range(query.shape[1]):
            seen = slice(0, first + token + 1)
            scores = keys[seen, head // share].double() @ query[token, head].double() * scale
            output[token, head] = scores.softmax(0) @ values[seen, head // share].double()
    return output


class Batch:
    """Sequences of random keys and values, of which the last ``query_lens`` are this step's."""

    def __init__(
        self, lens: list[tuple[int, int]], heads: int, kv_heads: int, dtype: torch.dtype
    ) -> None:
        self.query_lens = [query_len for query_len, _ in lens]
        self.kv_lens = [kv_len for _, kv_len in lens]
        self.dtype = dtype
        generator = torch.Generator().manual_seed(len(lens))

        def draw(count: int, per_token: int) -> Tensor:
            return torch.randn(count, per_token, DIM, generator=generator).to(dtype)

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
                queries = torch.zeros(count, self.queries[0].shape[1], DIM, dtype=self.dtype)
                attention(layer, queries, keys[:count], values[:count], 0.3)
        attention.plan(make_metadata(self.tables, self.query_lens, self.kv_lens, BLOCK))

        def step(tensors: list[Tensor]) -> Tensor:
            return torch.cat([t[n:] for t, n in zip(tensors, earlier, strict=True)])

        with torch.inference_mode():
            output = attention(
                layer, torch.cat(self.queries), step(self.keys), step(self.values), 0.3
            )
        assert output.dtype == self.dtype
        return list(torch.split(output, self.query_lens))

    def check(self, attention: PagedAttention, layer: int, tolerance: float) -> None:
        for row, output in enumerate(self.attend(attention, layer)):
            wanted = plain(self.queries[row], self.keys[row], self.values[row], 0.3)
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


def make(backend: str, specs: list[KVSpec], dtype: torch.dtype = torch.float32) -> PagedAttention:
    attention = create_attention(backend, specs, BLOCK, dtype, CPU)
    attention.allocate(200)
    return attention


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_plain_attention(backend: str, name: str) -> None:
    attention = make(backend, [KVSpec(2, DIM)] * 2)
    for cache in (*attention.key_cache, *attention.value_cache):
        cache.fill_(float("nan"))  # of a neighbour whose values overflowed: must not be seen
    Batch(BATCHES[name], heads=6, kv_heads=2, dtype=torch.float32).check(attention, 1, 1e-5)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 4)])
def test_multi_query_and_multi_head(backend: str, heads: int, kv_heads: int) -> None:
    attention = make(backend, [KVSpec(kv_heads, DIM)])
    Batch(BATCHES["everything"], heads, kv_heads, torch.float32).check(attention, 0, 1e-5)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_bfloat16_loses_no_more_than_its_rounding(backend: str) -> None:
    attention = make(backend, [KVSpec(2, DIM)], torch.bfloat16)
    Batch(BATCHES["everything"], 6, 2, torch.bfloat16).check(attention, 0, 0.02)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_masks_follow_prompts_that_grow_from_step_to_step(backend: str) -> None:
    attention = make(backend, [KVSpec(2, DIM)])
    for length in (30, 1100, 200):
        Batch([(5, length)], 4, 2, torch.float32).check(attention, 0, 1e-5)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_copied_blocks_hold_what_their_sources_held(backend: str) -> None:
    attention = make(backend, [KVSpec(2, DIM), KVSpec(1, 8)])
    caches = [*attention.key_cache, *attention.value_cache]
    for cache in caches:
        cache.copy_(torch.randn(cache.shape))
    before = [cache.clone() for cache in caches]
    attention.copy_blocks([(3, 7), (7, 9), (0, 1)])
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[7], old[3])
        assert torch.equal(cache[9], old[7])  # as it was before the first copy
        assert torch.equal(cache[1], old[0])
        untouched = [block for block in range(200) if block not in (1, 7, 9)]
        assert torch.equal(cache[untouched], old[untouched])
    attention.copy_blocks([])


def test_block_bytes_are_what_a_block_takes() -> None:
    attention = make("cpu", [KVSpec(3, 64), KVSpec(1, 128)], torch.bfloat16)
    caches = [*attention.key_cache, *attention.value_cache]
    assert attention.block_bytes == sum(cache[0].numel() * 2 for cache in caches)


def test_the_cache_takes_no_memory_before_it_is_written() -> None:
    from tgi_cli.device import peak_memory

    before = peak_memory(CPU)
    attention = create_attention("cpu", [KVSpec(8, 128)] * 4, BLOCK, torch.float32, CPU)
    attention.allocate(4096)
    assert attention.block_bytes * 4096 == 2 << 30
    assert peak_memory(CPU) - before < 64 << 20


def test_the_default_backend_is_the_device_s() -> None:
    specs = [KVSpec(1, 8)]
    assert type(create_attention(None, specs, BLOCK, torch.float32, CPU)) is type(
        create_attention("cpu", specs, BLOCK, torch.float32, CPU)
    )
    with pytest.raises(ValueError, match="no attention backend 'fast'; one of: cpu, torch"):
        create_attention("fast", specs, BLOCK, torch.float32, CPU)
