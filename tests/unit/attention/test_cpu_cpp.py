"""What the backend in C++ adds to its kernels: tests/unit/kernels/test_attention.py has those."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.tools.paged_run import CPU, make_metadata
from tests.unit.attention.workload import BATCHES, BLOCK, FP8, Batch
from tests.unit.kernels.conftest import compiled  # noqa: F401
from tgi_cli.attention import KVSpec, create_attention
from tgi_cli.attention.cpu_cpp import CppAttention
from tgi_cli.attention.cpu_torch import CpuAttention
from tgi_cli.device import peak_memory
from tgi_cli.kernels import library, without_cpp_kernels

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _best(
    compiled: dict[str, ctypes.CDLL],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not compiled:
        pytest.skip("there are no kernels for this processor")
    best = next(iter(compiled.values()))
    monkeypatch.setattr(library, "_load", lambda: best)


def make(
    *specs: KVSpec, cache_dtype: torch.dtype | None = None, block_size: int = BLOCK
) -> CppAttention:
    attention = CppAttention(specs, block_size, BF16, CPU, cache_dtype)
    attention.allocate(200)
    return attention


def test_the_cpp_backend_is_chosen_where_it_supports_the_model() -> None:
    def taken(
        *specs: KVSpec,
        block_size: int = 16,
        dtype: torch.dtype = BF16,
        cache: torch.dtype | None = None,
    ) -> type:
        return type(create_attention(None, specs, block_size, dtype, CPU, cache))

    assert taken(KVSpec(2, 64)) is CppAttention
    assert taken(KVSpec(2, 64), KVSpec(1, 256, 100), block_size=48) is CppAttention
    assert taken(KVSpec(2, 64), cache=torch.float8_e4m3fn) is CppAttention
    assert taken(KVSpec(2, 64), KVSpec(2, 72)) is CpuAttention
    assert taken(KVSpec(2, 576)) is CppAttention
    assert taken(KVSpec(2, 592)) is CpuAttention
    assert taken(KVSpec(2, 64, value_dim=32)) is CppAttention
    assert taken(KVSpec(1, 64, value_dim=32, values_in_keys=True)) is CppAttention
    assert taken(KVSpec(2, 64), block_size=8) is CpuAttention
    assert taken(KVSpec(2, 64), dtype=torch.float32) is CpuAttention
    assert taken(KVSpec(2, 64), dtype=torch.float16, cache=torch.float8_e5m2) is CpuAttention
    with without_cpp_kernels():
        assert taken(KVSpec(2, 64)) is CpuAttention


def test_unsupported_models_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="for bfloat16 on a CPU"):
        create_attention("native", [KVSpec(2, 72)], 16, BF16, CPU)
    with pytest.raises(ValueError, match="for bfloat16 on a CPU"):
        create_attention("native", [KVSpec(2, 64)], 16, torch.float32, CPU)
    with without_cpp_kernels(), pytest.raises(ValueError, match=r"python -m tgi_cli\.kernels"):
        create_attention("native", [KVSpec(2, 64)], 16, BF16, CPU)


@pytest.mark.parametrize("cache_dtype", [None, *FP8])
def test_copied_blocks_hold_what_their_sources_held(cache_dtype: torch.dtype | None) -> None:
    attention = make(KVSpec(2, 32), KVSpec(1, 16), cache_dtype=cache_dtype, block_size=32)
    caches = [attention.raw(c) for c in (*attention.key_cache, *attention.value_cache)]
    for cache in caches:
        cache.random_(0, 100)
    before = [cache.clone() for cache in caches]
    attention.copy_blocks([(3, 7), (7, 9), (0, 1)])
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[7], old[3])
        assert torch.equal(cache[9], old[7])  # as it was before the first copy
        assert torch.equal(cache[1], old[0])
        assert torch.equal(cache[10:], old[10:])


def test_a_copied_block_is_continued() -> None:
    """As a second sample of a prompt does whose last block is not full."""
    attention = make(KVSpec(1, 32))
    query, key, value = (torch.randn(20, 1, 32).to(BF16) for _ in range(3))
    attention.plan(make_metadata([[3, 4]], [20], [20], BLOCK))
    wanted = attention(0, query, key, value, 0.2)
    attention.key_cache[0][7:9] = torch.nan
    attention.value_cache[0][7:9] = torch.nan
    attention.plan(make_metadata([[3, 7]], [18], [18], BLOCK))
    attention(0, query[:18], key[:18], value[:18], 0.2)
    attention.copy_blocks([(7, 8)])
    attention.plan(make_metadata([[3, 8]], [2], [20], BLOCK))
    assert torch.equal(attention(0, query[18:], key[18:], value[18:], 0.2), wanted[18:])


@pytest.mark.parametrize("cache_dtype", [None, *FP8])
def test_block_bytes_are_what_a_block_takes(cache_dtype: torch.dtype | None) -> None:
    attention = make(KVSpec(3, 64), KVSpec(1, 128), cache_dtype=cache_dtype)
    caches = [*attention.key_cache, *attention.value_cache]
    assert attention.block_bytes == sum(cache[0].nbytes for cache in caches)
    assert all(cache.data_ptr() % 64 == 0 and len(cache) == 200 for cache in caches)


def test_the_cache_takes_no_memory_before_it_is_written() -> None:
    before = peak_memory(CPU)
    attention = make(*[KVSpec(8, 128)] * 4)
    attention.allocate(8192)
    assert attention.block_bytes * 8192 == 2 << 30
    assert peak_memory(CPU) - before < 64 << 20


def test_each_layer_has_its_own_window_and_cache() -> None:
    attention = make(*[KVSpec(2, 32, window) for window in (20, None, 130, 20)])
    for layer in range(4):
        struct = attention.caches[layer]
        assert struct.keys == attention.key_cache[layer].data_ptr()
        assert struct.values == attention.value_cache[layer].data_ptr()
        Batch([(1, 200), (1, 18), (40, 150)], 4, 2, BF16, dim=32).check(attention, layer, 0.02)


def test_tensors_may_be_parts_of_others() -> None:
    """As the model's are: of one projection, in whatever order its parts and heads stand."""
    attention = make(KVSpec(2, 32))
    attention.plan(make_metadata([[3, 4], [5]], [20, 3], [20, 3], BLOCK))
    whole = torch.randn(23, 10, 32).to(BF16)
    query, key, value = whole[:, :6], whole[:, 6:8], whole[:, 8:]
    wanted = attention(0, query.contiguous(), key.contiguous(), value.contiguous(), 0.2)
    assert torch.equal(attention(0, query, key, value, 0.2), wanted)
    query, key, value = (
        some.permute(1, 2, 0).contiguous().permute(2, 0, 1) for some in (query, key, value)
    )
    assert torch.equal(attention(0, query, key, value, 0.2), wanted)


def test_metadata_may_be_parts_of_others() -> None:
    attention = make(KVSpec(2, 32))
    query, key, value = (torch.randn(23, heads, 32).to(BF16) for heads in (6, 2, 2))
    metadata = make_metadata([[3, 4], [5]], [20, 3], [20, 3], BLOCK)
    attention.plan(metadata)
    wanted = attention(0, query, key, value, 0.2)
    for name in ("query_start_loc", "kv_lens", "slot_mapping"):
        tensor = getattr(metadata, name)
        setattr(metadata, name, torch.stack((tensor, tensor + 1), 1)[:, 0])
    metadata.block_table = torch.cat((metadata.block_table, metadata.block_table), 1)[:, :3]
    attention.plan(metadata)
    assert torch.equal(attention(0, query, key, value, 0.2), wanted)
    metadata.block_table = metadata.block_table.t().contiguous().t()
    attention.plan(metadata)
    assert torch.equal(attention(0, query, key, value, 0.2), wanted)


def test_follows_the_backend_out_of_torch_s_operations() -> None:
    for window in (None, 100):
        spec = KVSpec(3, 64, window)
        batch = Batch(BATCHES["everything"], 9, 3, BF16, dim=64, scale=0.125)
        theirs = create_attention("cpu", [spec], BLOCK, BF16, CPU)
        theirs.allocate(200)
        for ours, wanted in zip(batch.attend(make(spec), 0), batch.attend(theirs, 0), strict=True):
            torch.testing.assert_close(ours, wanted, atol=0.02, rtol=0.02)
