"""Both backends against attention written out over contiguous keys and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tools.paged_run import CPU, make_metadata
from tests.unit.attention.workload import BATCHES, BLOCK, DIM, FP8, WIDER, Batch, make, wider
from tgi_cli.attention import KVSpec, create_attention
from tgi_cli.attention.fp8 import FromFP8, to_fp8


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_plain_attention(backend: str, name: str) -> None:
    attention = make(backend, [KVSpec(2, DIM)] * 2)
    for cache in (*attention.key_cache, *attention.value_cache):
        cache.fill_(float("nan"))  # of a neighbour whose values overflowed: must not be seen
    Batch(BATCHES[name], heads=6, kv_heads=2, dtype=torch.float32).check(attention, 1, 1e-5)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("window", [1, 16, 50, 260])
def test_windows_hide_what_is_behind_them(backend: str, window: int) -> None:
    attention = make(backend, [KVSpec(2, DIM, window)])
    for cache in (*attention.key_cache, *attention.value_cache):
        cache.fill_(float("nan"))
    Batch(BATCHES["everything"], 4, 2, torch.float32).check(attention, 0, 1e-5)
    Batch([(1, 900), (1, 600), (100, 1000), (70, 500)], 4, 2, torch.float32).check(
        attention, 0, 1e-5
    )


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", WIDER)
def test_widths_chunks_biases_and_shared_caches(backend: str, name: str) -> None:
    long = [(1, 900), (1, 130), (20, 600)]
    for lens in (BATCHES["everything"], long):
        spec, batch = wider(name, lens, torch.float32)
        attention = make(backend, [KVSpec(1, 16), spec])
        for cache in (*attention.key_cache, *attention.value_cache):
            cache.fill_(float("nan"))
        batch.check(attention, 1, 1e-5)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("cache_dtype", [None, *FP8])
def test_values_that_are_part_of_keys_are_stored_once(
    backend: str, cache_dtype: torch.dtype | None
) -> None:
    def kept(numbers: Tensor) -> Tensor:
        return numbers if cache_dtype is None else numbers.to(cache_dtype).to(numbers.dtype)

    spec = KVSpec(1, 48, value_dim=32, values_in_keys=True)
    attention = make(backend, [spec], torch.float32, cache_dtype)
    assert attention.block_bytes == attention.key_cache[0][0].nbytes
    batch = Batch(BATCHES["everything"], 6, 1, torch.float32, dim=48)
    batch.values = [keys[..., :32] for keys in batch.keys]
    batch.check(attention, 0, 1e-5, kept)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_each_layer_has_its_own_window(backend: str) -> None:
    attention = make(backend, [KVSpec(2, DIM, window) for window in (20, None, 130, 20)])
    for layer in range(4):
        Batch([(1, 200), (1, 18), (40, 150)], 4, 2, torch.float32).check(attention, layer, 1e-5)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("window", [None, 50])
def test_an_8_bit_cache_loses_no_more_than_its_rounding(
    backend: str, cache_dtype: torch.dtype, window: int | None
) -> None:
    def kept(numbers: Tensor) -> Tensor:
        return numbers.to(cache_dtype).to(numbers.dtype)

    attention = make(backend, [KVSpec(2, DIM, window)], torch.float32, cache_dtype)
    assert {cache.dtype for cache in (*attention.key_cache, *attention.value_cache)} == {
        cache_dtype
    }
    for cache in (*attention.key_cache, *attention.value_cache):
        cache.fill_(float("nan"))
    Batch(BATCHES["everything"], 6, 2, torch.float32).check(attention, 0, 1e-5, kept)
    attention = make(backend, [KVSpec(2, DIM, window)], torch.bfloat16, cache_dtype)
    Batch(BATCHES["everything"], 6, 2, torch.bfloat16).check(attention, 0, 0.02, kept)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("cache_dtype", FP8)
def test_an_8_bit_cache_saturates(backend: str, cache_dtype: torch.dtype) -> None:
    attention = make(backend, [KVSpec(1, DIM)], torch.bfloat16, cache_dtype)
    attention.plan(make_metadata([[5]], [3], [3], BLOCK))
    largest = torch.finfo(cache_dtype).max
    value = torch.tensor([1e30, -1e6, float("inf")]).bfloat16()[:, None, None].expand(3, 1, DIM)
    key = torch.zeros(3, 1, DIM).bfloat16()
    output = attention(0, key, key, value, 1.0)
    stored = attention.value_cache[0][5, :3, 0].float()
    assert torch.equal(stored[:, 0], torch.tensor([largest, -largest, largest]))
    assert output.isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("cache_dtype", FP8)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_broken_number_in_an_8_bit_cache_breaks_its_own_sequence_alone(
    backend: str, cache_dtype: torch.dtype, sign: int
) -> None:
    attention = make(backend, [KVSpec(1, DIM)], torch.float32, cache_dtype)
    numbers = torch.ones(2, 1, DIM)
    broken = numbers.clone()
    broken[0] = torch.tensor(float("nan")).copysign(torch.tensor(float(sign)))
    attention.plan(make_metadata([[5], [6]], [1, 1], [1, 1], BLOCK))
    attention(0, numbers, numbers, broken, 1.0)
    attention.plan(make_metadata([[5], [6]], [1, 1], [2, 2], BLOCK))
    output = attention(0, numbers, numbers, numbers, 1.0)
    assert output[0].isnan().all()
    assert torch.equal(output[1], numbers[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", FP8)
def test_every_8_bit_number_is_read_as_torch_reads_it(
    cache_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    codes = torch.arange(256).to(torch.uint8)
    wanted = codes.view(cache_dtype).to(dtype)
    read = FromFP8(cache_dtype, dtype)
    assert torch.equal(read(codes[wanted.isfinite()]), wanted[wanted.isfinite()])
    torch.testing.assert_close(read(codes), wanted, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(to_fp8(wanted[wanted.isfinite()], cache_dtype), codes[wanted.isfinite()])


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
@pytest.mark.parametrize("cache_dtype", [None, *FP8])
def test_copied_blocks_hold_what_their_sources_held(
    backend: str, cache_dtype: torch.dtype | None
) -> None:
    attention = make(backend, [KVSpec(2, DIM), KVSpec(1, 8)], cache_dtype=cache_dtype)
    caches = [*attention.key_cache, *attention.value_cache]
    for cache in caches:
        cache.copy_(torch.randn(cache.shape))
    caches = [attention.raw(cache) for cache in caches]
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


@pytest.mark.parametrize("cache_dtype", FP8)
def test_an_8_bit_cache_takes_one_byte_per_element(cache_dtype: torch.dtype) -> None:
    wide = make("cpu", [KVSpec(3, 64)], torch.bfloat16)
    narrow = make("cpu", [KVSpec(3, 64)], torch.bfloat16, cache_dtype)
    assert narrow.block_bytes * 2 == wide.block_bytes
    assert narrow.block_bytes == 2 * narrow.key_cache[0][0].nbytes


def test_the_cache_takes_no_memory_before_it_is_written() -> None:
    from tgi_cli.device import peak_memory

    before = peak_memory(CPU)
    attention = create_attention("cpu", [KVSpec(8, 128)] * 4, BLOCK, torch.float32, CPU)
    attention.allocate(4096)
    assert attention.block_bytes * 4096 == 2 << 30
    assert peak_memory(CPU) - before < 64 << 20


@pytest.mark.tgi_pain(9)
def test_the_default_backend_is_the_device_s() -> None:
    specs = [KVSpec(1, 8)]
    assert type(create_attention(None, specs, BLOCK, torch.float32, CPU)) is type(
        create_attention("cpu", specs, BLOCK, torch.float32, CPU)
    )
    with pytest.raises(
        ValueError, match="no attention backend 'fast'; one of: cpu, flashinfer, native"
    ):
        create_attention("fast", specs, BLOCK, torch.float32, CPU)
    with pytest.raises(ValueError, match=r"not kept in torch\.int8"):
        create_attention("cpu", specs, BLOCK, torch.float32, CPU, torch.int8)
