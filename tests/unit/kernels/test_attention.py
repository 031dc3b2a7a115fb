"""Attention in C++, on each of the processor's levels, against attention written out."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tools.paged_run import CPU, make_metadata
from tests.unit.attention.workload import BATCHES, BLOCK, FP8, WIDER, Batch, make, wider
from tgi_cli.attention import KVSpec, PagedAttention, create_attention
from tgi_cli.kernels import library

BF16 = torch.bfloat16
DIM = 64
SINKS = torch.tensor([0.5, -2.0, 3.0, 1.0, 0.0, 6.0])
SCORINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cap": {"softcap": 2.0},
    "sinks": {"sinks": SINKS},
    "both": {"softcap": 2.0, "sinks": SINKS.to(BF16)},
}
scorings = pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
without_and_with = pytest.mark.parametrize(
    "scoring", [SCORINGS["plain"], SCORINGS["both"]], ids=["plain", "both"]
)
BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 511, 512, 513, 527, 528, 529, 1023, 1024, 1025)
"""Lengths at the ends of tiles and chunks."""

pytestmark = pytest.mark.usefixtures("level")


def broken(attention: PagedAttention) -> PagedAttention:
    """A cache full of what neighbours left whose numbers overflowed: it must not be seen."""
    for cache in (*attention.key_cache, *attention.value_cache):
        cache.fill_(float("nan"))
    return attention


def cpp_attention(spec: KVSpec, cache_dtype: torch.dtype | None = None) -> PagedAttention:
    return broken(make("native", [spec], BF16, cache_dtype))


@without_and_with
@pytest.mark.parametrize("name", BATCHES)
def test_equals_attention_written_out(scoring: dict[str, Any], name: str) -> None:
    batch = Batch(BATCHES[name], 6, 2, BF16, dim=DIM, scale=0.125, **scoring)
    batch.check(cpp_attention(KVSpec(2, DIM)), 0, 0.02)


@pytest.mark.parametrize("cache_dtype", [None, FP8[0]])
@pytest.mark.parametrize("name", WIDER)
def test_widths_chunks_biases_and_shared_caches(name: str, cache_dtype: torch.dtype | None) -> None:
    def kept(numbers: Tensor) -> Tensor:
        return numbers if cache_dtype is None else numbers.to(cache_dtype).to(numbers.dtype)

    long = [(1, 900), (1, 130), (20, 600)]
    for lens in (BATCHES["everything"], long):
        spec, batch = wider(name, lens, BF16)
        batch.check(cpp_attention(spec, cache_dtype), 0, 0.03, kept)


@pytest.mark.parametrize("cache_dtype", [None, *FP8])
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(16, 576, 512), (5, 48, 32), (40, 32, 32)])
def test_latent_rows_are_keys_and_values(
    heads: int, dim: int, value_dim: int, cache_dtype: torch.dtype | None
) -> None:
    def kept(numbers: Tensor) -> Tensor:
        return numbers if cache_dtype is None else numbers.to(cache_dtype).to(numbers.dtype)

    spec = KVSpec(1, dim, value_dim=value_dim, values_in_keys=True)
    attention = cpp_attention(spec, cache_dtype)
    assert attention.block_bytes == attention.key_cache[0][0].nbytes
    for lens in ([(1, 5), (1, 600), (20, 40)], [(3, 3), (30, 530)], [(1, 1100)]):
        batch = Batch(lens, heads, 1, BF16, dim=dim, scale=dim**-0.5)
        batch.values = [keys[..., :value_dim] for keys in batch.keys]
        together = batch.attend(broken(attention), 0)
        batch.check(broken(attention), 0, 0.03, kept)
        for row, output in enumerate(together):
            alone = Batch(lens[row : row + 1], heads, 1, BF16, dim=dim, scale=dim**-0.5)
            alone.queries, alone.keys = [batch.queries[row]], [batch.keys[row]]
            alone.values = [batch.values[row]]
            assert torch.equal(alone.attend(broken(attention), 0)[0], output)


@pytest.mark.parametrize("window", [None, 1, 50, 512, 700])
@pytest.mark.parametrize("queries", [1, 20])
def test_lengths_at_borders_and_windows(queries: int, window: int | None) -> None:
    for some in (BORDERS[:8], BORDERS[8:13], BORDERS[13:15], BORDERS[15:]):
        batch = Batch([(min(queries, n), n) for n in some], 3, 1, BF16, dim=DIM, scale=0.125)
        batch.check(cpp_attention(KVSpec(1, DIM, window)), 0, 0.02)


@scorings
@pytest.mark.parametrize("window", [7, 300])
def test_windows_with_caps_and_sinks(scoring: dict[str, Any], window: int) -> None:
    lens = [(1, 300), (1, 20), (1, 900), (33, 60), (100, 400)]
    batch = Batch(lens, 6, 2, BF16, dim=DIM, scale=0.125, **scoring)
    batch.check(cpp_attention(KVSpec(2, DIM, window)), 0, 0.02)


@pytest.mark.parametrize("dim", [16, 32, 48, 80, 96, 112, 128, 192, 240, 256])
def test_head_dims_are_multiples_of_16(dim: int) -> None:
    batch = Batch([(1, 70), (1, 5), (20, 90), (30, 30)], 6, 2, BF16, dim=dim, scale=dim**-0.5)
    batch.check(cpp_attention(KVSpec(2, dim)), 0, 0.02)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (4, 4), (5, 1), (7, 1), (16, 2), (14, 2), (13, 1), (100, 1)]
)
def test_heads_share_keys_in_groups_of_any_size(heads: int, kv_heads: int) -> None:
    sinks = torch.linspace(-3, 3, heads)
    batch = Batch([(1, 70), (1, 5), (9, 90)], heads, kv_heads, BF16, dim=32, sinks=sinks)
    batch.check(cpp_attention(KVSpec(kv_heads, 32)), 0, 0.02)


def test_caps_hold_for_small_and_large_scores() -> None:
    for softcap in (0.5, 50.0, 400.0):
        for scale in (1e-3, 1.0):
            batch = Batch([(1, 100), (20, 120)], 6, 2, BF16, scale=scale, softcap=softcap, dim=16)
            batch.check(cpp_attention(KVSpec(2, 16)), 0, 0.02)


def test_sinks_take_everything_or_nothing() -> None:
    lens = [(1, 100), (40, 620)]
    all_of_it = Batch(lens, 6, 2, BF16, dim=32, sinks=torch.full((6,), 1e4))
    spec = KVSpec(2, 32)
    assert all(out.abs().max() == 0 for out in all_of_it.attend(cpp_attention(spec), 0))
    without = Batch(lens, 6, 2, BF16, dim=32).attend(cpp_attention(spec), 0)
    for sink in (-1e4, -torch.inf):
        nothing = Batch(lens, 6, 2, BF16, dim=32, sinks=torch.full((6,), sink))
        assert all(map(torch.equal, nothing.attend(cpp_attention(spec), 0), without))


def test_weights_of_very_different_size() -> None:
    """A key that takes everything may stand in any chunk, and others' weights vanish beside it."""
    for place in (3, 600, 1099):
        batch = Batch([(1, 1100), (5, 1100)], 2, 1, BF16, dim=16, scale=1.0)
        for keys, queries in zip(batch.keys, batch.queries, strict=True):
            queries.fill_(10)
            keys[place] = 10
        batch.check(cpp_attention(KVSpec(1, 16)), 0, 0.02)


@pytest.mark.parametrize("what", ["key", "value"])
def test_a_broken_number_breaks_its_own_sequence_alone(what: str) -> None:
    attention = cpp_attention(KVSpec(2, DIM))
    numbers, spoilt = torch.ones(2, 2, DIM, dtype=BF16), torch.ones(2, 2, DIM, dtype=BF16)
    spoilt[0] = torch.nan
    key, value = (spoilt, numbers) if what == "key" else (numbers, spoilt)
    query = torch.ones(2, 6, DIM, dtype=BF16)
    for scoring in SCORINGS.values():
        attention.plan(make_metadata([[5], [6]], [1, 1], [1, 1], BLOCK))
        output = attention(0, query, key, value, 1.0, **scoring)
        assert output[0].isnan().all()
        assert output[1].isfinite().all()
    attention.plan(make_metadata([[5], [6]], [1, 1], [2, 2], BLOCK))
    output = attention(0, query, numbers, numbers, 1.0)
    assert output[0].isnan().all()
    assert torch.equal(output[1], query[1])


def test_padding_reads_nothing_and_gives_zeros() -> None:
    attention = cpp_attention(KVSpec(1, DIM))
    metadata = make_metadata([[5], [6]], [1, 1], [3, 3], BLOCK)
    metadata.kv_lens[1] = 0
    metadata.block_table[1] = 2**31 - 1
    ones = torch.ones(2, 1, DIM, dtype=BF16)
    attention.write(0, ones, ones, torch.tensor([80, 81]))
    attention.plan(metadata)
    output = attention(0, ones, ones, ones, 0.125)
    assert torch.equal(output[0], ones[0])
    assert not output[1].any()


@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize(("dim", "window"), [(64, None), (64, 50), (80, None), (256, 600)])
def test_an_8_bit_cache_loses_no_more_than_its_rounding(
    cache_dtype: torch.dtype, dim: int, window: int | None
) -> None:
    def kept(numbers: Tensor) -> Tensor:
        return numbers.to(cache_dtype).to(numbers.dtype)

    lens = [(1, 5), (1, 300), (1, 1025), (64, 64), (65, 90), (30, 540)]
    batch = Batch(lens, 6, 2, BF16, dim=dim, scale=dim**-0.5)
    batch.check(cpp_attention(KVSpec(2, dim, window), cache_dtype), 0, 0.02, kept)


@pytest.mark.parametrize("cache_dtype", FP8)
def test_8_bit_numbers_are_stored_as_torch_stores_them(cache_dtype: torch.dtype) -> None:
    """With one key its value is the output: every bfloat16 number goes there and comes back."""
    attention = cpp_attention(KVSpec(256, 256), cache_dtype)
    numbers = torch.arange(65536).to(torch.int16).view(BF16).view(1, 256, 256)
    attention.plan(make_metadata([[5]], [1], [1], BLOCK))
    output = attention(0, torch.zeros_like(numbers), torch.zeros_like(numbers), numbers, 1.0)
    largest = torch.finfo(cache_dtype).max
    wanted = numbers.clamp(-largest, largest).to(cache_dtype).to(BF16)
    torch.testing.assert_close(output, wanted, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("cache_dtype", FP8)
def test_a_broken_number_in_an_8_bit_cache_breaks_its_own_sequence_alone(
    cache_dtype: torch.dtype,
) -> None:
    attention = cpp_attention(KVSpec(1, DIM), cache_dtype)
    numbers = torch.ones(2, 1, DIM, dtype=BF16)
    spoilt = numbers.clone()
    spoilt[0] = torch.nan
    attention.plan(make_metadata([[5], [6]], [1, 1], [1, 1], BLOCK))
    attention(0, numbers, numbers, spoilt, 1.0)
    attention.plan(make_metadata([[5], [6]], [1, 1], [2, 2], BLOCK))
    output = attention(0, numbers, numbers, numbers, 1.0)
    assert output[0].isnan().all()
    assert torch.equal(output[1], numbers[1])


@st.composite
def workloads(draw: st.DrawFn) -> tuple[int | None, Batch]:
    """Window and batch."""
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    kv_len = st.one_of(st.integers(1, 90), st.integers(1, 1400))
    decodes = draw(st.lists(kv_len, max_size=5))
    prefills = draw(st.lists(st.tuples(st.integers(1, 150), kv_len), max_size=2))
    lens = [(1, length) for length in decodes] + [(min(q, k), k) for q, k in prefills]
    batch = Batch(
        lens if sum(length for _, length in lens) < 3000 and lens else [(1, 1)],
        heads,
        kv_heads,
        BF16,
        dim=draw(st.sampled_from([16, 64, 80])),
        scale=draw(st.sampled_from([0.02, 0.125, 0.5])),
        softcap=draw(st.sampled_from([None, 1.0, 30.0, 50.0])),
        sinks=draw(st.sampled_from([None, torch.linspace(-3, 5, heads).bfloat16()])),
    )
    return draw(st.sampled_from([None, 1, 2, 17, 64, 128, 300, 600])), batch


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(workloads())
def test_random_workloads_equal_the_reference(workload: tuple[int | None, Batch]) -> None:
    window, batch = workload
    spec = KVSpec(batch.keys[0].shape[1], batch.dim, window)
    oracle, ours = (broken(make(backend, [spec], BF16)) for backend in ("torch", "native"))
    for wanted, output in zip(batch.attend(oracle, 0), batch.attend(ours, 0), strict=True):
        torch.testing.assert_close(output, wanted, atol=0.02, rtol=0.02)


class Lonely:
    """One sequence, computed in one way or another."""

    cache_dtype: torch.dtype | None = None

    def __init__(self, spec: KVSpec, length: int, heads: int, scoring: dict[str, Any]) -> None:
        self.spec, self.length, self.scoring = spec, length, scoring
        generator = torch.Generator().manual_seed(0)
        self.query, self.key, self.value = (
            torch.randn(length, count, dim, generator=generator).to(BF16)
            for count, dim in (
                (heads, spec.head_dim),
                (spec.num_kv_heads, spec.head_dim),
                (spec.num_kv_heads, spec.value_width),
            )
        )

    def attend(self, chunks: list[int], beside: list[int], block_size: int = BLOCK) -> Tensor:
        """In ``chunks``, each together with decodes of sequences ``beside`` so long."""
        attention = create_attention("native", [self.spec], block_size, BF16, CPU, self.cache_dtype)
        needed = [-(-length // block_size) for length in (*beside, self.length)]
        attention.allocate(sum(needed))
        for cache in (*attention.key_cache, *attention.value_cache):
            attention.raw(cache).random_(0, 127)
        free = random.Random(len(chunks)).sample(range(sum(needed)), sum(needed))
        tables = [[free.pop() for _ in range(count)] for count in needed]
        done, outputs = 0, []
        for chunk in chunks:
            query_lens, kv_lens = [1] * len(beside) + [chunk], [*beside, done + chunk]
            attention.plan(make_metadata(tables, query_lens, kv_lens, block_size))
            query, key, value = (
                torch.cat((some[:1].expand(len(beside), -1, -1), some[done : done + chunk]))
                for some in (self.query, self.key, self.value)
            )
            output = attention(0, query, key, value, 0.125, **self.scoring)
            outputs.append(output[len(beside) :])
            done += chunk
        assert done == self.length
        return torch.cat(outputs)


@without_and_with
@pytest.mark.parametrize("window", [None, 40, 600])
def test_a_token_does_not_depend_on_the_other_sequences_of_its_step(
    scoring: dict[str, Any], window: int | None
) -> None:
    lonely = Lonely(KVSpec(2, 80, window), 1100, 6, scoring)
    whole = lonely.attend([1100], [])
    assert whole.isfinite().all()
    for other in (
        # A single query of a long sequence is shared out by chunks, ...
        lonely.attend([100, 300, 7, 1, 192, 420, *[1] * 80], []),
        lonely.attend([33, 500, 64, 1, 1, 1, 480, *[1] * 20], [5, 300, 699]),
        # ... and not where there are many.
        lonely.attend([1, 2, 3, 190, 200, 204, 480, *[1] * 20], [640] * 40),
        lonely.attend([511, 2, 587], [1]),
    ):
        assert torch.equal(other, whole)


@pytest.mark.parametrize("spec", [KVSpec(2, 96, value_dim=48), KVSpec(2, 80, chunk=300)])
def test_a_token_depends_on_itself_alone_in_chunks_and_with_biases(spec: KVSpec) -> None:
    bias = torch.randn(6, 19, generator=torch.Generator().manual_seed(1))
    lonely = Lonely(spec, 700, 6, {"bias": bias})
    whole = lonely.attend([700], [])
    for other in (
        lonely.attend([100, 300, 7, 1, 192, 20, *[1] * 80], []),
        lonely.attend([511, 2, 167, *[1] * 20], [5, 300, 699]),
    ):
        assert torch.equal(other, whole)


@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (3, 64), (7, 128), (16, 128), (4, 256)])
def test_rows_come_out_alike_in_tiles_of_any_size(heads: int, dim: int) -> None:
    lonely = Lonely(KVSpec(1, dim), 150, heads, {})
    whole = lonely.attend([150], [])
    chunks = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 14]
    assert torch.equal(lonely.attend(chunks, []), whole)
    assert torch.equal(lonely.attend([150], [], block_size=48), whole)
    assert torch.equal(lonely.attend([1] * 150, [3, 700], block_size=32), whole)


@pytest.mark.parametrize("cache_dtype", FP8)
def test_tokens_come_out_alike_over_an_8_bit_cache(cache_dtype: torch.dtype) -> None:
    lonely = Lonely(KVSpec(2, 80, 600), 1100, 6, {})
    lonely.cache_dtype = cache_dtype
    whole = lonely.attend([1100], [])
    assert torch.equal(lonely.attend([1, 2, 3, 190, 204, 680, *[1] * 20], [640] * 8), whole)
    assert torch.equal(lonely.attend([1080, *[1] * 20], [], block_size=32), whole)


def test_the_number_of_threads_changes_no_bit() -> None:
    lonely = Lonely(KVSpec(2, 64), 1100, 6, SCORINGS["both"])
    outputs = []
    for threads in (1, 2, 3):
        library.set_threads(threads)
        outputs.append(lonely.attend([1040, *[1] * 60], [20, 900]))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
