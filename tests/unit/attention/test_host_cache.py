"""Copies of KV blocks in the host's memory, with a CPU in the device's place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tgi_cli.attention import PagedAttention, create_attention, host_cache
from tgi_cli.attention.host_cache import HostCache
from tgi_cli.attention.spec import KVSpec

BLOCKS, SLOTS = 12, 9


SPECS = [KVSpec(2, 8), KVSpec(1, 16), KVSpec(1, 12, value_dim=4, values_in_keys=True)]


def filled(
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    specs: Sequence[KVSpec] = SPECS,
    block_size: int = 4,
) -> PagedAttention:
    """A cache whose layers differ in width, with random bytes."""
    cpu = torch.device("cpu")
    attention = create_attention("torch", specs, block_size, dtype, cpu, cache_dtype=cache_dtype)
    attention.allocate(BLOCKS)
    generator = torch.Generator().manual_seed(1)
    for cache in attention.stored:
        view = cache.view(torch.uint8)
        view.copy_(torch.randint(0, 120, view.shape, generator=generator, dtype=torch.uint8))
    return attention


def content(attention: PagedAttention, block: int) -> bytes:
    return attention.export_block(block)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float8_e4m3fn)],
)
@pytest.mark.parametrize("staged", [1, 2, 100])
def test_blocks_come_back_elsewhere(
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    staged: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = filled(dtype, cache_dtype)
    monkeypatch.setattr(host_cache, "_STAGING_BYTES", staged * attention.block_bytes)
    cache = HostCache(attention, SLOTS)
    before = [content(attention, block) for block in range(BLOCKS)]
    assert len({*before}) == BLOCKS
    cache.offload([(0, 8), (5, 0), (11, 3)])
    for each in attention.stored:
        each.view(torch.uint8)[:] = 7
    cache.restore([(3, 0), (8, 1), (0, 7)])
    found = {block: content(attention, block) for block in (0, 1, 7)}
    assert found == {0: before[11], 1: before[0], 7: before[5]}
    assert set(content(attention, 2)) == {7}


@pytest.mark.parametrize(
    ("width", "block_size", "number"),
    [(16, 4, torch.int64), (12, 1, torch.int32), (6, 1, torch.int16), (7, 1, torch.uint8)],
)
def test_bytes_are_copied_as_the_widest_numbers_that_fit(
    width: int, block_size: int, number: torch.dtype
) -> None:
    attention = filled(
        torch.bfloat16, torch.float8_e4m3fn, [KVSpec(1, 16), KVSpec(1, width)], block_size
    )
    cache = HostCache(attention, SLOTS)
    assert {layer.dtype for layer in cache._layers} == {number}
    before = content(attention, 3)
    cache.offload([(3, 1)])
    cache.restore([(1, 6)])
    assert content(attention, 6) == before


def test_the_last_copy_to_a_slot_and_to_a_block_counts() -> None:
    attention = filled(torch.float32)
    cache = HostCache(attention, SLOTS)
    before = [content(attention, block) for block in range(BLOCKS)]
    cache.offload([(1, 4), (2, 4), (3, 5)])
    cache.restore([(5, 9), (4, 9)])
    assert content(attention, 9) == before[2]
    cache.offload([])
    cache.restore([])
    assert content(attention, 1) == before[1]


def test_a_slot_is_kept_when_its_block_is_overwritten() -> None:
    attention = filled(torch.float32)
    cache = HostCache(attention, SLOTS)
    before = content(attention, 6)
    cache.offload([(6, 2)])
    cache.restore([(2, 10)])
    cache.offload([(0, 3)])
    cache.restore([(3, 6), (2, 0)])
    assert content(attention, 10) == content(attention, 0) == before


class Allocations(TorchDispatchMode):
    """Collects the sizes of tensors that operations make beside those of ``known`` ones."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.known = {each.untyped_storage().data_ptr() for each in known}
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (list, tuple)) else [result]:
            if made.untyped_storage().data_ptr() not in self.known:
                self.sizes.append(made.nbytes)
        return result


def test_copies_take_no_memory_for_blocks() -> None:
    """The device may have none left after a step, and the scheduler counts on its copies."""
    attention = filled(torch.float32)
    cache = HostCache(attention, SLOTS)
    pairs = [(block, block) for block in range(SLOTS)]
    known = [*attention.stored, *(each for each in vars(cache).values() if torch.is_tensor(each))]
    with Allocations(known) as found:
        cache.offload(pairs)
        cache.restore(pairs)
    assert max(found.sizes, default=0) <= 8 * SLOTS, "no more than their numbers"
