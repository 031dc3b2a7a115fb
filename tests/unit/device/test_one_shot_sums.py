"""Sums over shards in one kernel: when they are used, and what torch is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import _symmetric_memory

from tests.tools.thread_stages import on_stages
from tgi_cli.device.distributed import Shard
from tgi_cli.device.one_shot_sums import OneShotSums, size_class

CUDA = torch.device("cuda", 0)


def sums_of(count: int, dtype: torch.dtype = torch.float32) -> OneShotSums:
    group: Any = SimpleNamespace(group_name="shards")
    return OneShotSums(group, torch.zeros(count, dtype=dtype))


def test_classes_of_sizes_end_at_powers_of_two() -> None:
    assert [size_class(size) for size in (1, 2, 3, 4, 5, 1024, 1025, 2048)] == [
        *(0, 1, 2, 2, 3),
        *(10, 11, 11),
    ]


def test_what_the_kernel_takes() -> None:
    sums = sums_of(64)
    x = torch.zeros(80)
    assert sums.fits(x[:64])
    assert sums.fits(x[4:8])
    assert sums.fits(x[:64].view(4, 16))
    assert not sums.fits(x[:68]), "too many"
    assert not sums.fits(x[:0])
    assert not sums.fits(x[:3]), "no whole loads"
    assert not sums.fits(x[1:5]), "not aligned"
    assert not sums.fits(x[:64].view(8, 8)[:, :4]), "not contiguous"
    assert not sums.fits(x[:64].double())
    assert not sums.chosen(x[:64])
    sums.sizes = frozenset({7})
    assert sums.chosen(x[:32])
    assert sums.chosen(x[:20])
    assert not sums.chosen(x[:16])
    assert not sums.chosen(x[:64])


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("capturing", [True, False])
def test_they_are_used_in_graphs_for_the_sizes_that_were_chosen(
    chosen: bool, capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    calls = []

    class Sums:
        def chosen(self, x: torch.Tensor) -> bool:
            return chosen

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            calls.append("one kernel")
            return x + 1

    class Group:
        def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
            calls.append("NCCL")
            tensors[0] += 1

    group: Any = Group()
    shard = Shard(0, 2, CUDA, group)
    sums: Any = Sums()
    shard.one_shot = sums
    assert shard.all_reduce(torch.tensor([1.5])) == 2.5
    assert calls == ["one kernel" if chosen and capturing else "NCCL"]


def test_torch_finds_the_shards_by_the_name_of_their_group() -> None:
    def work(shard: Shard) -> None:
        name = f"named-{shard.rank}"  # one per thread, as torch's names are a process's
        group = shard.named_group(name)
        found = _resolve_process_group(name)
        assert (found.group_name, found.rank(), found.size()) == (name, shard.rank, 2)
        assert found == group

    on_stages(1, 2, work)


def test_memory_is_taken_and_connected_under_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for torch's module, with the signatures of torch 2.11 to 2.13."""
    connected = []

    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def rendezvous(tensor: torch.Tensor, group: str) -> None:
        connected.append((tensor.shape, group))

    monkeypatch.setattr(_symmetric_memory, "empty", empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    group: Any = SimpleNamespace(group_name="shards")
    sums = OneShotSums.allocate(group, 4096, torch.bfloat16, torch.device("cpu"))
    sums.connect()
    assert connected == [((2048,), "shards")]
    assert sums.fits(torch.zeros(2, 1024, dtype=torch.bfloat16))
