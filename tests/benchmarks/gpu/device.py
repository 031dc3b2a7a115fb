"""Measures a device's limits: memory bandwidth and matrix throughput."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Device:
    """A device and its measured limits, each the best that was seen.

    Attributes:
        copy_bytes: bytes per second that large copies read and write.
        read_bytes: bytes per second that a large sum reads.
        matrix_flops: operations per second of large matrix products in the served dtype.
    """

    device: torch.device
    name: str
    copy_bytes: float
    read_bytes: float
    matrix_flops: float

    @property
    def bandwidth(self) -> float:
        """The higher rate of both: what a decode is compared with, which mostly reads."""
        return max(self.copy_bytes, self.read_bytes)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def times_of(work: Callable[[], object], device: torch.device, repeats: int = 10) -> list[float]:
    """Seconds of each call of ``work``.

    On CUDA by events, with all calls launched at once: the host's part of a launch, and of waiting
    for it, is no part of them.
    """
    work()
    synchronize(device)
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call, unused-ignore]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        synchronize(device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """The median seconds of ``work``; see :func:`times_of`."""
    return statistics.median(times_of(work, device, repeats))


def measure(device: torch.device, dtype: torch.dtype) -> Device:
    """Measure copies and sums of 2 GiB and products of 8192 x 8192 x 8192 on a GPU, small on a CPU.

    The best of many repetitions counts: a slower limit would flatter what is compared with it.
    """
    large = device.type == "cuda"
    source = torch.ones(1 << (29 if large else 22), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / min(times_of(lambda: target.copy_(source), device, 20))
    read = source.nbytes / min(times_of(source.sum, device, 20))
    source = target = torch.empty(0)
    size = 8192 if large else 256
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty(size, size, device=device, dtype=dtype)
    rate = 2 * size**3 / min(times_of(lambda: torch.mm(left, right, out=product), device, 20))
    name = torch.cuda.get_device_name(device) if large else platform.processor() or "cpu"
    return Device(device, name, copy, read, rate)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries involved."""
    found = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "flashinfer-python", "vllm", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["memory"] = f"{torch.cuda.mem_get_info()[1] / 2**30:.1f} GiB"
    return found
