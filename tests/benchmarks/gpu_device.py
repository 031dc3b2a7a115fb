"""Measures a device's limits: copy bandwidth and matrix throughput."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch


@dataclass(frozen=True)
class Device:
    """A device and its measured limits.

    Attributes:
        copy_bytes: bytes per second that large copies read and write.
        matrix_flops: operations per second of large matrix products in the served dtype.
    """

    device: torch.device
    name: str
    copy_bytes: float
    matrix_flops: float


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Return the median seconds of ``work``, synchronizing after each call."""
    work()
    synchronize(device)
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(device: torch.device, dtype: torch.dtype) -> Device:
    """Measure large copies and products: 1 GiB and 8192 x 8192 x 8192 on a GPU, small on a CPU."""
    large = device.type == "cuda"
    source = torch.empty(1 << (30 if large else 24), dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / seconds_of(lambda: target.copy_(source), device)
    source = target = torch.empty(0)
    size = 8192 if large else 256
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty(size, size, device=device, dtype=dtype)
    rate = 2 * size**3 / seconds_of(lambda: torch.mm(left, right, out=product), device)
    name = torch.cuda.get_device_name(device) if large else platform.processor() or "cpu"
    return Device(device, name, copy, rate)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries involved."""
    found = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "vllm", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["driver memory"] = f"{torch.cuda.mem_get_info()[1] / 2**30:.1f} GiB"
    return found
