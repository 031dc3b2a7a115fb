"""A process's share of a model, and the operations between the processes.

After "Megatron-LM" (https://arxiv.org/abs/1909.08053): the shards of a stage hold a share of each
weight matrix and all of them compute every step; they communicate by collective operations. A stage
has some of the layers; each of its shards sends what they compute to its counterpart in the next.
https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, _register_process_group

from tgi_cli.device.one_shot_sums import OneShotSums
from tgi_cli.errors import UnsupportedModelError

LOOPBACK = "127.0.0.1"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CPU = torch.device("cpu")


class Group(Protocol):
    """The used part of torch's process groups (``ProcessGroupGloo``, ``ProcessGroupNCCL``)."""

    def allreduce(self, tensors: list[Tensor], op: Any = ..., /) -> dist.Work: ...

    def broadcast(self, tensor: Tensor, root: int, /) -> dist.Work: ...

    def _allgather_base(self, output: Tensor, tensor: Tensor, /) -> dist.Work: ...

    def send(self, tensors: list[Tensor], destination: int, tag: int, /) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> dist.Work: ...

    def _set_default_timeout(self, timeout: timedelta, /) -> None: ...

    def abort(self) -> None: ...


@dataclass(slots=True, eq=False)
class Shard:
    """Process ``rank`` of ``size`` in a stage of ``stages``. Alone, every operation is free.

    :meth:`all_reduce`, :meth:`all_gather`, :meth:`broadcast` and :meth:`share` are among the shards
    of the stage; :meth:`smallest`, :meth:`total` and :meth:`any` among all processes of the model.

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
    stage: int = 0
    stages: int = 1
    chain: Group | None = None
    """The processes of this rank in all stages."""
    everyone: Group | None = None
    """All processes, if there are several stages."""
    nodes: int = 1
    """That the processes are divided among, in the order of their numbers."""
    sharers: int = 0
    """Processes of the model on this machine, whose memory they share: it may be several nodes.
    Known after :meth:`connect`."""
    own_process: bool = True
    """Whether the process may be ended if another one is gone."""
    one_shot: OneShotSums | None = None
    """What sums up small summands in CUDA graphs, once the warm-up has chosen it."""
    _store: Store | None = None
    """Must outlive the groups."""
    _sent: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    """What the next stage may not have received yet."""
    _stage_limit: timedelta = timedelta(0)

    @classmethod
    def of_process(
        cls, number: int, size: int, stages: int, device: torch.device, nodes: int = 1
    ) -> Shard:
        """The share of process ``number`` of ``size * stages``.

        Process 0 is the first shard of the last stage, where tokens are chosen.
        """
        stage = stages - 1 - number // size
        return cls(number % size, size, device, stage=stage, stages=stages, nodes=nodes)

    @property
    def processes(self) -> int:
        """Processes of the model, in all stages."""
        return self.size * self.stages

    @property
    def process(self) -> int:
        """Its number, as in :meth:`of_process`."""
        return (self.stages - 1 - self.stage) * self.size + self.rank

    @property
    def local_size(self) -> int:
        """Processes of the model on each node."""
        return self.processes // self.nodes

    @property
    def is_first(self) -> bool:
        """Whether its stage is given tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether its stage computes logits."""
        return self.stage == self.stages - 1

    @property
    def leads(self) -> bool:
        """Whether it is the process that chooses tokens and reports on the model."""
        return self.rank == 0 and self.is_last

    def connect(self, store: Store, timeout: float, host: str = LOOPBACK) -> None:
        """Connect to the other processes, over NCCL on CUDA devices and gloo on a CPU.

        Blocks until all of them have called it. What is sent later is neither encrypted nor
        authenticated.

        Args:
            store: in which the processes find each other's addresses; whoever can change it can
                take part.
            timeout: seconds that an operation may take.
            host: the address by which processes on other nodes reach this one. Those on the same
                node connect on the loopback interface.
        """
        limit = timedelta(seconds=timeout)
        self._store = store

        def join(name: str, rank: int, processes: Sequence[int], device: torch.device) -> Group:
            own = PrefixStore(name, store)
            if device.type == "cuda":
                group = _nccl(own, rank, len(processes), limit)
            else:
                several = len({process // self.local_size for process in processes}) > 1
                address = host if several else LOOPBACK
                group = _gloo(own, rank, len(processes), limit, address)
            # NCCL connects at the first operation.
            group.allreduce([torch.zeros(1, device=device)]).wait()
            return group

        last = self.stages - 1
        if self.size > 1:
            first = (last - self.stage) * self.size
            peers = range(first, first + self.size)
            self.group = join(f"stage-{self.stage}", self.rank, peers, self.device)
        if self.stages > 1:
            chain = [(last - stage) * self.size + self.rank for stage in range(self.stages)]
            self.chain = join(f"rank-{self.rank}", self.stage, chain, self.device)
            self._stage_limit = limit
            everyone = range(self.processes)
            self.everyone = join("everyone", self.process, everyone, _CPU)
        machines, own = PrefixStore("machine", store), _machine()
        machines.set(str(self.process), own)
        found = [machines.get(str(number)) for number in range(self.processes)]
        self.sharers = found.count(own.encode())

    def set_timeout(self, seconds: float, stage_seconds: float | None = None) -> None:
        """Set the timeout of this process's operations.

        Args:
            seconds: limit of those that all processes begin at about the same time.
            stage_seconds: for what the stage before sends once it has computed its part of a step.
                Default: the same.
        """
        limit = timedelta(seconds=seconds)
        for group in (self.group, self.everyone):
            if group is not None:
                group._set_default_timeout(limit)
        longer = seconds if stage_seconds is None else stage_seconds
        self._stage_limit = timedelta(seconds=longer)
        if self.chain is not None:
            self.chain._set_default_timeout(self._stage_limit)

    def abort(self) -> None:
        """Fail operations that wait on a CUDA device, now and later; from any thread.

        Those on a CPU fail by themselves when a process of the group has ended.
        """
        if self.device.type == "cuda":
            for group in (self.group, self.chain):
                if group is not None:
                    group.abort()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all processes' ``x``, which it may overwrite."""
        if self.size > 1 and self.device.type == "cuda":
            one_shot = self.one_shot
            if (
                one_shot is not None
                and one_shot.chosen(x)
                and torch.cuda.is_current_stream_capturing()
            ):
                return one_shot(x)
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

    def named_group(self, name: str) -> dist.ProcessGroup:
        """The shards of the stage, as torch's operators find them by a name.

        For as long as the result lives. The name is the same on all shards, and new.
        """
        assert self._store is not None
        store = PrefixStore(f"{name}-{self.stage}", self._store)
        group = dist.ProcessGroup(store, self.rank, self.size)
        kind = dist.ProcessGroup.BackendType
        backend: Any = self._group
        group._register_backend(
            self.device, kind.NCCL if self.device.type == "cuda" else kind.GLOO, backend
        )
        known: Any = name
        group._set_group_name(known)
        _register_process_group(known, group)
        return group

    def receive(self, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
        """[tokens, width] that the stage before sends; waits for it."""
        assert self.chain is not None
        x = torch.empty(tokens, width, dtype=dtype, device=self.device)
        self._await(self.chain.recv([x], self.stage - 1, 0))
        return x

    def send(self, x: Tensor) -> None:
        """Send ``x`` to the next stage, without waiting for it. ``x`` must not change afterwards.

        At most as many sends are under way as there are stages. There are never more steps in
        flight, so the oldest one is over by then.
        """
        assert self.chain is not None
        if len(self._sent) >= self.stages:
            self._await(self._sent.popleft()[0])
        self._sent.append((self.chain.send([x], self.stage + 1, 0), x))

    def _await(self, work: dist.Work) -> None:
        """Wait for the other end on a CPU; on a CUDA device, have its stream wait."""
        if self.device.type == "cuda":
            work.wait()
        else:  # gloo's default timeout is for collective operations
            work.wait(self._stage_limit)

    def smallest(self, value: int) -> int:
        """The minimum of all processes' values."""
        return self._reduce(value, dist.ReduceOp.MIN)

    def any(self, value: bool) -> bool:
        """Whether it is true in any of the processes."""
        return bool(-self.smallest(-int(value)))

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
        if self.processes == 1:
            return value
        group, device = self.everyone, _CPU
        if group is None:
            group, device = self._group, self.device
        box = torch.tensor([value], dtype=torch.int64, device=device)
        group.allreduce([box], operation).wait()
        return int(box)

    @property
    def _group(self) -> Group:
        if self.group is None:
            raise RuntimeError("the shards are not connected yet")
        return self.group


ALONE = Shard()
"""A single process with the whole model."""


def _gloo(store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Group:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    group: Group = gloo(store, rank, size, options)
    return group


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Group:
    nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined, unused-ignore]
    # Its thread would ask the store, which is in Python, at the interpreter's end too. What it
    # watches for ends the model by the time limit of a step.
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = nccl.Options()
    options._timeout = timeout
    group: Group = nccl(store, rank, size, options)
    return group


def _machine() -> str:
    """What identifies this machine, or the container that this process is in."""
    boot_id = ""
    with suppress(OSError):
        boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot_id}"


def device_of(kind: str, rank: int) -> torch.device:
    """The device of a process: the CPU, or a CUDA device of its own, made this thread's current."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device(kind, rank)
    torch.cuda.set_device(device)
    return device
