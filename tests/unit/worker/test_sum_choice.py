"""How shards agree on who sums up: NCCL, or one kernel, here stand-ins for both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.thread_shards import on_shards
from tgi_cli.device.distributed import Shard
from tgi_cli.device.one_shot_sums import OneShotSums, size_class
from tgi_cli.worker import step_graphs
from tgi_cli.worker.sizing import sum_choice
from tgi_cli.worker.sizing.sum_choice import choose_sums

SIZES = range(11, 16)

Spoil = Callable[[int, Tensor], None]
"""Changes what a shard of this rank has summed up."""


class Operators:
    """torch's operator for CPUs: the shards, which are threads, add up over their group.

    Attributes:
        spoil: what makes sums wrong.
        counts: summands' numbers of elements, on shard 0.
    """

    def __init__(self) -> None:
        self.shards: dict[str, Shard] = {}
        self.spoil: Spoil = lambda rank, total: None
        self.counts: list[int] = []

    def __call__(self, buffer: Tensor, x: Tensor, operation: str, name: str) -> Tensor:
        assert (buffer.shape, buffer.dtype, operation) == (x.shape, x.dtype, "sum")
        shard = self.shards[name]
        if shard.rank == 0:
            self.counts.append(x.numel())
        group: Any = shard.group
        total = x.clone()
        group.allreduce([total])
        self.spoil(shard.rank, total)
        return total

    def make(self, shard: Shard, dtype: torch.dtype) -> OneShotSums:
        """In place of what takes symmetric memory."""
        name = f"rank-{shard.rank}"
        self.shards[name] = shard
        group: Any = SimpleNamespace(group_name=name)
        sums = OneShotSums(group, torch.empty((1 << SIZES[-1]) // dtype.itemsize, dtype=dtype))
        sums.connect = lambda: None  # type: ignore[method-assign]
        return sums


@pytest.fixture
def operators() -> Iterator[Operators]:
    made = Operators()
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("one_shot_all_reduce_copy", made, "CPU")
    yield made
    library._destroy()  # type: ignore[no-untyped-call, unused-ignore]


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sum_choice, "SIZES", SIZES)
    caplog.set_level(logging.INFO)


def timed(limits: dict[int, int]) -> sum_choice.Seconds:
    """Sums in one kernel, which are timed first, are faster up to a size of each rank's own."""
    calls = {rank: count() for rank in limits}

    def seconds(shard: Shard, work: Callable[[], Tensor]) -> float:
        total = work()
        if next(calls[shard.rank]) % 2:  # NCCL's
            return 1e-5
        return 5e-6 if size_class(total.nbytes) <= limits[shard.rank] else 2e-5

    return seconds


def choose(
    size: int,
    make: sum_choice.Allocate,
    seconds: sum_choice.Seconds,
    dtype: torch.dtype = torch.bfloat16,
) -> list[frozenset[int] | None]:
    """The sizes that each of ``size`` shards sums up in one kernel."""

    def work(shard: Shard) -> frozenset[int] | None:
        choose_sums(shard, dtype, make, seconds)
        return None if shard.one_shot is None else shard.one_shot.sizes

    return on_shards(size, work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 5])
def test_all_shards_take_what_the_first_one_has_measured(
    size: int, dtype: torch.dtype, operators: Operators, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {rank: 13 if rank == 0 else 15 for rank in range(size)}
    assert choose(size, operators.make, timed(limits), dtype) == [frozenset({11, 12, 13})] * size
    largest = (1 << SIZES[-1]) // dtype.itemsize
    assert set(operators.counts) == {largest >> shift for shift in range(len(SIZES))}
    assert "2 KiB 5.0 and 10.0; " in caplog.text
    assert "32 KiB 20.0 and 10.0" in caplog.text


def test_nccl_sums_up_if_it_is_faster(operators: Operators) -> None:
    assert choose(2, operators.make, timed({0: 0, 1: 15})) == [None, None]


def late(rank: int, total: Tensor) -> None:
    """A summand that another shard has not written yet."""
    if rank == 1 and total.numel() == 4096:
        total[-1] += 1


@pytest.mark.parametrize(
    "spoil", [late, lambda rank, total: total.mul_(2) if rank == 0 else None], ids=["one", "all"]
)
def test_one_kernel_that_sums_up_wrongly_is_not_used(
    spoil: Spoil, operators: Operators, caplog: pytest.LogCaptureFixture
) -> None:
    """On any shard, and though it would be faster."""
    operators.spoil = spoil
    assert choose(2, operators.make, timed({0: 15, 1: 15})) == [None, None]
    assert "sums over shards are NCCL's: " in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["allocate", "connect", "call"])
def test_nccl_sums_up_where_any_shard_cannot(
    when: str, rank: int, operators: Operators, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: Any) -> Any:
        raise RuntimeError("no such memory\nin two lines")

    def make(shard: Shard, dtype: torch.dtype) -> OneShotSums:
        if when == "allocate" and shard.rank == rank:
            fail()
        sums = operators.make(shard, dtype)
        if when == "connect" and shard.rank == rank:
            sums.connect = fail  # type: ignore[method-assign]
        return sums

    if when == "call":  # as a build without the operator, which is all shards'
        operators.spoil = fail
    assert choose(2, make, timed({0: 15, 1: 15})) == [None, None]
    why = "RuntimeError: no such memory"
    if rank == 1 and when != "call":
        why = "another shard cannot do them in one kernel"
    assert f"sums over shards are NCCL's: {why}" in caplog.text
    assert "in two lines" not in caplog.text


def test_nothing_is_allocated_for_a_dtype_without_a_kernel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make(shard: Shard, dtype: torch.dtype) -> OneShotSums:
        raise AssertionError

    assert choose(2, make, timed({0: 15, 1: 15}), torch.float16) == [None, None]
    assert "sums over shards are NCCL's: there is no kernel for float16" in caplog.text


class Placed(Shard):
    """A shard on a machine with two devices."""

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.tensor([[0, 1]])

    def broadcast(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"own_process": False}, "a shard that is lost would block the process"),
        ({"nodes": 2}, "the shards are on several nodes"),
        ({}, "device 0 cannot read device 1's memory"),
    ],
)
def test_memory_is_not_shared_where_it_cannot_be_read_or_a_wait_not_ended(
    change: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: False)
    shard = Placed(0, 2, torch.device("cpu", 0), **change)
    with pytest.raises(RuntimeError, match=why):
        sum_choice.allocate(shard, torch.bfloat16)


def test_sums_are_chosen_once_before_graphs_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(step_graphs, "choose_sums", lambda *given: calls.append(given))

    class Graphs:
        def measure(self) -> int:
            calls.append("measured")
            return 7

    class Pair(Shard):
        def smallest(self, value: int) -> int:
            return value

    shard = Pair(0, 2)
    given: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    graphs: Any = Graphs()
    runner: Any = None
    measured = step_graphs.StepGraphs(runner, shard, given, graphs)
    assert measured.measure() == measured.measure() == 7
    assert calls == [(shard, torch.bfloat16), "measured", "measured"]
    calls.clear()
    assert step_graphs.StepGraphs(runner, Shard(), given, graphs).measure() == 7
    assert calls == ["measured"]
