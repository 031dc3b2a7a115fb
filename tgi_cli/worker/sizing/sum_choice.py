"""Chooses how small sums over shards are computed in CUDA graphs: by NCCL, or in one kernel.

At warm-up both are timed for each size, in a graph as they are served, and their results compared.
Shard 0 decides. NCCL remains where a device or a build of torch has nothing else, where results
differ, and for larger sums.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from tgi_cli.device.distributed import Shard
from tgi_cli.device.one_shot_sums import DTYPES, OneShotSums
from tgi_cli.worker.sizing.graph_timing import graph_seconds

log = logging.getLogger(__name__)

SIZES = range(11, 23)
"""Classes of sizes to compare: from 2 KiB, a token of a small model, to 4 MiB, where NCCL's
exchange of parts moves fewer bytes."""

SUMS_PER_GRAPH = 20

Allocate = Callable[[Shard, torch.dtype], OneShotSums]
Seconds = Callable[[Shard, Callable[[], Tensor]], float]
"""Returns the time of a sum, which all shards compute."""
T = TypeVar("T")


def allocate(shard: Shard, dtype: torch.dtype) -> OneShotSums:
    """Symmetric memory for the largest size.

    Raises:
        Exception: as of :meth:`OneShotSums.allocate`.
        RuntimeError: shards cannot read each other's memory, or may not wait for each other.
    """
    index = torch.tensor([[shard.device.index]], device=shard.device)
    devices = shard.all_gather(index).tolist()[0]
    number = torch.tensor([secrets.randbits(62)], device=shard.device)
    name = f"tgi-{int(shard.broadcast(number)):x}"
    if not shard.own_process:
        raise RuntimeError("a shard that is lost would block the process")
    if shard.local_size % shard.size:
        raise RuntimeError("the shards are on several nodes")
    for device in devices:
        if device != shard.device.index and not torch.cuda.can_device_access_peer(
            shard.device.index, device
        ):
            raise RuntimeError(f"device {shard.device.index} cannot read device {device}'s memory")
    return OneShotSums.allocate(shard.named_group(name), 1 << SIZES[-1], dtype, shard.device)


def seconds_of_sums(shard: Shard, work: Callable[[], Tensor]) -> float:
    """The least seconds of a sum in a CUDA graph of several."""
    return graph_seconds([work] * SUMS_PER_GRAPH)


@torch.inference_mode()
def choose_sums(
    shard: Shard,
    dtype: torch.dtype,
    make: Allocate = allocate,
    seconds: Seconds = seconds_of_sums,
) -> None:
    """Set ``shard.one_shot``, or leave all sums to NCCL. All shards of a stage call it.

    Args:
        shard: of several.
        dtype: dtype of the summands.
        make: returns sums that are not connected yet, in the dtype.
        seconds: measures.
    """
    problem = ""
    if dtype not in DTYPES:
        problem = f"there is no kernel for {str(dtype).removeprefix('torch.')}"
    else:
        # Each part is done on all shards before any goes on to the next one, which would wait.
        sums, problem = _together(shard, lambda: make(shard, dtype))
        if sums is not None:
            _, problem = _together(shard, sums.connect)
        if sums is not None and not problem:
            _, problem = _together(shard, lambda: _compare(shard, sums, dtype))
        if sums is not None and not problem:
            sizes, problem = _together(shard, lambda: _faster(shard, sums, dtype, seconds))
            if sizes:
                sums.sizes = sizes
                shard.one_shot = sums
    if problem and shard.leads:
        log.info("sums over shards are NCCL's: %s", problem)


def _together(shard: Shard, work: Callable[[], T]) -> tuple[T | None, str]:
    """What ``work`` returns and nothing, or None and why, if it raises on any shard."""
    problem, result = "", None
    try:
        result = work()
    except Exception as error:  # of an optional feature, whatever it is
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
    done = torch.tensor([int(not problem)], device=shard.device)
    if int(shard.all_reduce(done)) == shard.size:
        return result, ""
    return None, problem or "another shard cannot do them in one kernel"


def _compare(shard: Shard, sums: OneShotSums, dtype: torch.dtype) -> None:
    """Compare sums of each size with NCCL's.

    Of integers so small that their sums are exact in any order, and several without a pause, as
    the summands of the next sum overwrite those of the last one. All sizes in any case, since the
    other shards compute them, too.

    Raises:
        RuntimeError: they differ.
    """
    wrong: list[str] = []
    for size in SIZES:
        count = (1 << size) // dtype.itemsize
        numbers = torch.arange(count, device=shard.device) * (shard.rank + 1)
        given = [((numbers + step) % 7 - 3).to(dtype) for step in range(3)]
        ours = [sums(x) for x in given]
        nccls = [shard.all_reduce(x) for x in given]
        if not all(map(torch.equal, ours, nccls)):
            wrong.append(str(1 << size))
    if wrong:
        raise RuntimeError(f"sums of {', '.join(wrong)} bytes are wrong in one kernel")


def _faster(
    shard: Shard, sums: OneShotSums, dtype: torch.dtype, seconds: Seconds
) -> frozenset[int]:
    """The sizes of which sums take less time in one kernel, as shard 0 has measured."""
    faster, shown = [], []
    for size in SIZES:
        x = torch.zeros((1 << size) // dtype.itemsize, dtype=dtype, device=shard.device)
        ours = seconds(shard, lambda: sums(x))  # noqa: B023 (called at once)
        nccl = seconds(shard, lambda: shard.all_reduce(x))  # noqa: B023
        faster.append(ours < nccl)
        shown.append(f"{(1 << size) >> 10} KiB {1e6 * ours:.1f} and {1e6 * nccl:.1f}")
    agreed = shard.broadcast(torch.tensor(faster, dtype=torch.int64, device=shard.device)).tolist()
    if shard.leads:
        log.info(
            "microseconds of sums over shards, in one kernel and by NCCL: %s", "; ".join(shown)
        )
    return frozenset(size for size, chosen in zip(SIZES, agreed, strict=True) if chosen)
