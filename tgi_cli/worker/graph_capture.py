"""CUDA graphs: capturing work on a device, and leaving the device usable if that fails.

https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tgi_cli.device import available_memory
from tgi_cli.worker.sizing.memory import release_unused_memory


class Graph(Protocol):
    """Work on a device, recorded once and repeated on the same memory."""

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        """Record what ``work`` launches and return its tensor, which every replay overwrites.

        Raises:
            Exception: what ``work`` raises, or an operation that cannot be captured. The device
                can be used as before.
        """
        ...

    def replay(self) -> None:
        """Launch the recorded work on the current stream; does not wait."""
        ...


class CudaGraph:
    """Implements :class:`Graph`; those that share a ``pool`` must not run at the same time.

    Args:
        pool: pool of memory.
        stream: to capture on, the same for all graphs of a pool.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool = pool
        self._stream = stream
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        # Not torch.cuda.graph: if a capture fails, that leaves its stream current and the
        # allocator in the graph's pool (https://github.com/pytorch/pytorch/issues/180395).
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            try:
                # Other threads (NCCL's watchdog, the reader of adapters) may call CUDA meanwhile.
                self._graph.capture_begin(self._pool, capture_error_mode="thread_local")
                output = work()
                self._graph.capture_end()
            except BaseException:
                self._abandon()
                raise
        return output

    def replay(self) -> None:
        self._graph.replay()

    def _abandon(self) -> None:
        """End a capture that has failed: each of the steps may have been taken already."""
        with suppress(RuntimeError):
            self._graph.capture_end()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)


def cuda_graphs() -> Callable[[], Graph]:
    """Create a factory of graphs on the current device that share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()
    stream = _capture_stream(torch.cuda.current_device(), threading.get_ident())
    return lambda: CudaGraph(pool, stream)


@cache
def _capture_stream(device: int, thread: int) -> torch.cuda.Stream:
    """One for all captures of a thread: torch keeps a workspace of cuBLAS for each stream.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#cublas-workspaces
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Raise RuntimeError where the host waits for ``device``, if it is a CUDA device.

    What waits cannot be captured, and finding out by a capture costs more than an error.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


Key = TypeVar("Key")


class GraphSet(ABC, Generic[Key]):
    """Graphs of one kind of step, one per key: :meth:`measure`, then :meth:`capture`.

    Args:
        device: device of the graphs.
        make: makes graphs that share their memory; called again whenever all are captured again.

    Attributes:
        captured: graph and output of each key.
    """

    def __init__(
        self, device: torch.device, make: Callable[[], Callable[[], Graph]] = cuda_graphs
    ) -> None:
        self._device = device
        self._make = make
        self.captured: dict[Key, tuple[Graph, Tensor]] = {}

    @abstractmethod
    def keys(self) -> Sequence[Key]:
        """What there are graphs for, the largest first, so that others reuse its memory."""

    @abstractmethod
    def prepare(self) -> None:
        """Make the tensors that graphs read; called before each capture of all graphs."""

    @abstractmethod
    def plan(self, key: Key) -> None:
        """Do what precedes a step and is no part of its graph, for a step of padding."""

    @abstractmethod
    def compute(self, key: Key) -> Tensor:
        """The work of a graph; returns the tensor that a replay overwrites."""

    @torch.inference_mode()
    def measure(self) -> int:
        """Bytes that all graphs will take, estimated from two of them, which are dropped.

        To be called with the cache that is there for warm-up. Raises what a capture raises.
        """
        free = []
        keys = self.keys()
        self._run_all(keys[:2])
        release_unused_memory(self._device)
        free.append(available_memory(self._device))
        make = self._make()
        for key in keys[:2]:
            self._record(key, make)
            free.append(available_memory(self._device))
        self.drop()
        later = max(0, free[1] - free[2]) if len(free) > 2 else 0
        return max(0, free[0] - free[1]) + later * (len(keys) - 1)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record all graphs, over the cache as it is now allocated.

        Raises:
            Exception: an operation of the model, its kernels or the device cannot be captured.
        """
        keys = self.keys()
        self._run_all(keys)
        if self._device.type == "cuda":  # a graph's pool takes none of what torch holds
            release_unused_memory(self._device)
        make = self._make()
        for key in keys:
            self._record(key, make)

    def drop(self) -> None:
        """Free the memory of all graphs."""
        self.captured.clear()
        release_unused_memory(self._device)

    def run_once(self, key: Key) -> None:
        """Run a step as it will be captured: what is done at first use cannot be."""
        self.compute(key)

    def record(self, key: Key, make: Callable[[], Graph]) -> None:
        """Capture the step of a key, which :meth:`plan` has prepared."""
        graph = make()
        self.captured[key] = graph, graph.capture(lambda: self.compute(key))

    def _run_all(self, keys: Sequence[Key]) -> None:
        """Run each step once, and the first one again, to find out whether it waits."""
        self.prepare()
        for key in keys:
            self.plan(key)
            self.run_once(key)
        for key in keys[:1]:
            self.plan(key)
            with no_waiting(self._device):
                self.run_once(key)

    def _record(self, key: Key, make: Callable[[], Graph]) -> None:
        self.plan(key)
        self.record(key, make)
