"""What a failed capture leaves behind: nothing. With a stand-in for torch's part in it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tgi_cli.worker import graph_capture
from tgi_cli.worker.graph_capture import cuda_graphs, no_waiting

POOL = (0, 7)


class Device:
    """torch 2.11's part in a capture: an error at its end leaves the allocator in the pool."""

    def __init__(self) -> None:
        self.index = 0
        self.stream: Any = "main"
        self.captured_on: list[Any] = []
        self.capturing = False
        self.invalid = False
        self.to_pool: list[Any] = []
        self.replays = 0

    def wait(self) -> None:
        """What a model may do, and a capture forbids."""
        if self.capturing:
            self.invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def end_allocation(self, index: int, pool: Any) -> None:
        if pool not in self.to_pool:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.to_pool.remove(pool)


class Graph:
    def __init__(self, device: Device) -> None:
        self.device = device

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert self.device.stream != "main"
        assert capture_error_mode == "thread_local"
        self.device.captured_on.append(self.device.stream)
        self.device.to_pool.append(pool)
        self.device.capturing, self.device.invalid = True, False

    def capture_end(self) -> None:
        if not self.device.capturing:
            raise RuntimeError("the stream is not capturing")
        self.device.capturing = False
        if self.device.invalid:
            raise RuntimeError("CUDA error: capture was invalidated")
        self.device.end_allocation(0, POOL)

    def replay(self) -> None:
        self.device.replays += 1


class Stream:
    def __init__(self, device: int) -> None:
        self.device_index = device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()

    class Use:
        """torch's own restores the stream whatever happens inside."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before, made.stream = made.stream, self.stream

        def __exit__(self, *_: Any) -> None:
            made.stream = self.before

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(made))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", Use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: made.wait())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.index)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end_allocation, raising=False)
    graph_capture._capture_stream.cache_clear()
    yield made
    graph_capture._capture_stream.cache_clear()


def test_a_capture_that_succeeds_is_replayed(device: Device) -> None:
    graph = cuda_graphs()()
    output = torch.zeros(1)
    assert graph.capture(lambda: output) is output
    graph.replay()
    assert device.replays == 1
    assert (device.stream, device.capturing, device.to_pool) == ("main", False, [])


def test_a_model_that_waits_leaves_the_device_as_it_was(device: Device) -> None:
    graph = cuda_graphs()()

    def work() -> torch.Tensor:
        device.wait()
        raise AssertionError

    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        graph.capture(work)
    assert (device.stream, device.capturing, device.to_pool) == ("main", False, [])
    assert cuda_graphs()().capture(lambda: torch.ones(1)) == 1, "others can be captured"


def test_so_does_one_whose_error_is_found_at_the_end(device: Device) -> None:
    def work() -> torch.Tensor:
        device.invalid = True  # an operation that was caught
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="capture was invalidated"):
        cuda_graphs()().capture(work)
    assert (device.stream, device.capturing, device.to_pool) == ("main", False, [])


def test_an_error_of_the_models_own_code_ends_the_capture(device: Device) -> None:
    def work() -> torch.Tensor:
        raise KeyError("cache")

    with pytest.raises(KeyError, match="cache"):
        cuda_graphs()().capture(work)
    assert (device.stream, device.capturing, device.to_pool) == ("main", False, [])


def test_captures_share_a_stream(device: Device) -> None:
    """Of a device and a thread: torch keeps a workspace of cuBLAS for each stream."""

    def capture() -> None:
        cuda_graphs()().capture(lambda: torch.ones(1))

    for index in (0, 0, 1, 0):
        device.index = index
        capture()
    with ThreadPoolExecutor(1) as other:
        other.submit(capture).result()
    first, second, elsewhere, third, in_thread = device.captured_on
    assert first is second is third
    assert (first.device_index, elsewhere.device_index, in_thread.device_index) == (0, 1, 0)
    assert in_thread is not first


def test_waiting_is_an_error_inside_and_as_before_outside(monkeypatch: Any) -> None:
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def fail() -> None:
        with no_waiting(torch.device("cuda")):
            assert modes == [0, "error"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert modes == [0, "error", 0]
    with no_waiting(torch.device("cpu")):
        assert modes == [0, "error", 0]
