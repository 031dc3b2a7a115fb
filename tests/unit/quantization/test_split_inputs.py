"""How many programs share a product's tile, and the counters of those that have come."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tgi_cli.quantization import split_inputs
from tgi_cli.quantization.split_inputs import MAX_TILES, counters, num_splits

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("tiles", "blocks", "splits"),
    [
        (1, 3, 1),  # a program has four blocks at least
        (1, 8, 2),
        (1, 1000, 16),
        (64, 1000, 4),  # as many programs as processors take: not more
        (132, 1000, 2),
        (133, 1000, 1),
        (MAX_TILES + 1, 1000, 1),
    ],
)
def test_programs_of_a_tile(tiles: int, blocks: int, splits: int) -> None:
    assert num_splits(tiles, blocks) == splits


def test_tiles_that_are_shared_have_counters() -> None:
    assert all(num_splits(tiles, 1 << 20) == 1 for tiles in (MAX_TILES + 1, 1 << 20))
    shared = max(tiles for tiles in range(1, 1000) if num_splits(tiles, 1 << 20) > 1)
    assert shared <= len(counters(CPU))


def test_a_device_has_one_tensor_of_zeros() -> None:
    assert counters(CPU) is counters(torch.device("cpu"))
    assert counters(CPU).dtype == torch.int32
    assert counters(CPU).count_nonzero() == 0


def test_a_gpu_has_one_tensor_with_and_without_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the second name would allocate where a graph is captured."""
    allocated: list[torch.device] = []

    def zeros(*shape: int, device: torch.device, **options: Any) -> torch.Tensor:
        allocated.append(device)
        return torch.empty(shape, device="meta", **options)

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    split_inputs._counters.cache_clear()
    try:
        first = counters(torch.device("cuda"))
        assert counters(torch.device("cuda:1")) is first
        assert counters(torch.device("cuda:0")) is not first
    finally:
        split_inputs._counters.cache_clear()
    assert allocated == [torch.device("cuda:1"), torch.device("cuda:0")]
