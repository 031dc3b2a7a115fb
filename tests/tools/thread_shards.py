"""Several shards of a model in the threads of one process, for tests of what is shared out.

The threads meet as processes over gloo would, at the same operations in the same order, so that
a layer that forgets one stops the test (after a while) or changes its result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tests.tools.paged_run import PagedRun
from tgi_cli.device.distributed import Shard
from tgi_cli.models import load_model, read_config

T = TypeVar("T")

SECONDS = 240.0


class _Done:
    def wait(self) -> bool:
        return True


class ThreadGroup:
    """One thread's end of a group; implements what Shard asks of torch's process groups."""

    def __init__(self, rank: int, barrier: threading.Barrier, box: list[Any]) -> None:
        self._rank = rank
        self._barrier = barrier
        self._box = box

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        self._box[self._rank] = mine.clone()
        self._barrier.wait(SECONDS)
        everybodys = list(self._box)
        self._barrier.wait(SECONDS)
        assert len({(part.shape, part.dtype) for part in everybodys}) == 1
        return everybodys

    def allreduce(self, tensors: list[Tensor], op: Any = dist.ReduceOp.SUM) -> Any:
        stacked = torch.stack(self._exchange(tensors[0]))
        tensors[0].copy_(stacked.amin(0) if op == dist.ReduceOp.MIN else stacked.sum(0))
        return _Done()

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        tensor.copy_(self._exchange(tensor)[root])
        return _Done()

    def _allgather_base(self, output: Tensor, tensor: Tensor) -> Any:
        output.copy_(torch.cat(self._exchange(tensor)))
        return _Done()

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Any:
        raise AssertionError("there is one stage")

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        raise AssertionError("there is one stage")

    def _set_default_timeout(self, timeout: timedelta) -> None:
        pass

    def abort(self) -> None:
        self._barrier.abort()


def on_shards(size: int, work: Callable[[Shard], T]) -> list[T]:
    """What ``work`` returns on each of ``size`` shards; the first exception, if there is one."""
    barrier, box = threading.Barrier(size), [None] * size

    def run(rank: int) -> T:
        try:
            return work(Shard(rank, size, group=ThreadGroup(rank, barrier, box)))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
        failed = [error for error in (future.exception() for future in futures) if error]
        broken = threading.BrokenBarrierError
        for error in sorted(failed, key=lambda error: isinstance(error, broken)):
            raise error
        return [future.result() for future in futures]


def sharded_logits(path: Path, size: int, pieces: list[list[int]]) -> list[Tensor]:
    """Logits [n, vocab] of a text given in pieces, of each shard."""

    def work(shard: Shard) -> Tensor:
        dtype = torch.float32
        model = load_model(read_config(path), dtype, torch.device("cpu"), shard=shard)
        run = PagedRun(model, dtype, "torch")
        return torch.cat([run.step({"a": piece})["a"] for piece in pieces])

    return on_shards(size, work)
