"""Tensor parallelism: a process's share of a model, and the operations between the shards.

After "Megatron-LM" (https://arxiv.org/abs/1909.08053): every process holds a share of each
weight matrix and all of them compute every step; they communicate only by collective operations.
https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tgi_cli.errors import UnsupportedModelError

_LOOPBACK = "127.0.0.1"
_CPU = torch.device("cpu")


class Group(Protocol):
    """The used part of torch's process groups (``ProcessGroupGloo``, ``ProcessGroupNCCL``)."""

    def allreduce(self, tensors: list[Tensor], op: Any = ..., /) -> dist.Work: ...

    def broadcast(self, tensor: Tensor, root: int, /) -> dist.Work: ...

    def _allgather_base(self, output: Tensor, tensor: Tensor, /) -> dist.Work: ...

    def _set_default_timeout(self, timeout: timedelta, /) -> None: ...

    def abort(self) -> None: ...


@dataclass(slots=True, eq=False)
class Shard:
    """Process ``rank`` of ``size``. With a single process every operation is free.

    The operations between processes need :meth:`connect` first. Every process of the group must
    call them in the same order, with the same shapes. They raise RuntimeError if a process of the
    group is gone, or silent for longer than the group's timeout.

    The group belongs to this object: torch's default group is neither used nor created, so that a
    program may have several models, and a group of its own.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU
    group: Group | None = None

    def connect(self, folder: Path, timeout: float) -> None:
        """Connect to the other processes, over NCCL on CUDA devices and gloo on a CPU.

        Blocks until all of them have called it.

        Args:
            folder: private to this group, and inaccessible to other users: its content names the
                addresses of the processes (on the loopback interface).
            timeout: seconds that an operation may take.
        """
        if self.size == 1:
            return
        store = torch._C._distributed_c10d.FileStore(str(folder / "rendezvous"), self.size)
        make = _nccl if self.device.type == "cuda" else _gloo
        self.group = make(store, self.rank, self.size, timedelta(seconds=timeout))
        # NCCL connects at the first operation.
        self.group.allreduce([torch.zeros(1, device=self.device)]).wait()

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of this process's operations."""
        if self.group is not None:
            self.group._set_default_timeout(timedelta(seconds=seconds))

    def abort(self) -> None:
        """Fail operations that wait on a CUDA device, now and later; from any thread.

        Those on a CPU fail by themselves when a process of the group has ended.
        """
        if self.group is not None and self.device.type == "cuda":
            self.group.abort()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace ``x`` by the sum of all processes' ``x``."""
        if self.size > 1 and self.device.type == "cuda":
            # On the current stream: NCCL's own would cost two events per sum, of which a layer has
            # two (https://github.com/pytorch/pytorch/pull/148590).
            options = dist.AllreduceOptions()
            options.asyncOp = False
            work: dist.Work | None = self._group.allreduce([x], options)
            if work is not None:  # as of backends that have a stream of their own nevertheless
                work.wait()
        elif self.size > 1:
            self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[N, W] of each process to [N, size * W], in order of the ranks."""
        if self.size == 1:
            return x
        rows, width = x.shape
        parts = x.new_empty(self.size * rows, width)
        self._group._allgather_base(parts, x.contiguous()).wait()
        return parts.view(self.size, rows, width).transpose(0, 1).reshape(rows, -1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace ``x`` by rank 0's ``x``."""
        if self.size > 1:
            self._group.broadcast(x, 0).wait()
        return x

    def smallest(self, value: int) -> int:
        """The minimum of all processes' values."""
        return self._reduce(value, dist.ReduceOp.MIN)

    def total(self, value: int) -> int:
        """The sum of all processes' values."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def share(self, count: int, units: int | None = None) -> slice:
        """This process's part of ``count`` outputs that consist of ``units``, by default count.

        Units (attention heads) are not split. If there are fewer than processes, several
        processes hold the same one.

        Raises:
            UnsupportedModelError: they cannot be split evenly.
        """
        units = count if units is None else units
        width = count // units
        if units % self.size == 0:
            each = units // self.size
            return slice(self.rank * each * width, (self.rank + 1) * each * width)
        if units < self.size and self.size % units == 0:
            own = self.rank // (self.size // units)
            return slice(own * width, (own + 1) * width)
        raise UnsupportedModelError(
            f"{units} heads or columns cannot be shared out evenly to {self.size} shards",
            "choose --num-shard so that it divides them",
        )

    def _reduce(self, value: int, operation: Any) -> int:
        if self.size == 1:
            return value
        box = torch.tensor([value], dtype=torch.int64, device=self.device)
        self._group.allreduce([box], operation).wait()
        return int(box)

    @property
    def _group(self) -> Group:
        if self.group is None:
            raise RuntimeError("the shards are not connected yet")
        return self.group


ALONE = Shard()
"""A single process with the whole model."""


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Group:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]
    options._timeout = timeout
    group: Group = gloo(store, rank, size, options)
    return group


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Group:
    nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined, unused-ignore]
    options = nccl.Options()
    options._timeout = timeout
    group: Group = nccl(store, rank, size, options)
    return group


def device_of(kind: str, rank: int) -> torch.device:
    """The device of a process: the CPU, or a CUDA device of its own, made this thread's current."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device(kind, rank)
    torch.cuda.set_device(device)
    return device
