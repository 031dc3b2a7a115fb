"""Total, available and peak memory of a device, in bytes.

On a CPU a control group may allow less than the machine has (:mod:`tgi_cli.process.system_memory`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tgi_cli.process import system_memory
from tgi_cli.process.system_memory import (
    available_system_memory,
    control_groups,
    kernel_field,
)

_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
"""Parameters of mallopt."""


def total_memory(device: torch.device) -> int:
    """Memory of the device; on a CPU at most what the control groups allow."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(group.limit for group in control_groups())])


def available_memory(device: torch.device) -> int:
    """Memory that can still be taken without swapping or being killed.

    Without ``/proc/meminfo``, the memory that this process has not taken.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = available_system_memory()
    if free is None:
        free = max(0, total_memory(device) - peak_memory(device))
    return free


def peak_memory(device: torch.device) -> int:
    """The peak of this process's memory on the device (on a CPU: resident)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = kernel_field(system_memory.ROOT / "proc/self/status", "VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release_pages(tensor: torch.Tensor) -> None:
    """Drop the pages of a tensor in a mapped file from this process; reading brings them back.

    https://man7.org/linux/man-pages/man2/madvise.2.html; does nothing on other systems than Linux.
    """
    if not sys.platform.startswith("linux") or not tensor.is_contiguous():
        return
    page = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if begin < end:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Have glibc map blocks of 4 MiB and more one by one, so that freed ones go back at once.

    By itself it raises that threshold to 32 MiB as blocks are freed, and keeps the heap of those
    below: weights that are loaded one after the other left holes of up to a third of the model.
    https://man7.org/linux/man-pages/man3/mallopt.3.html; with other C libraries nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 4 << 20)
    try:
        yield
    finally:
        if mallopt is not None:
            # Where these end up by themselves: what a step frees, the next one takes again. Were it
            # given back in between, a step's logits alone would be 50 to 1500 page faults.
            mallopt(_M_MMAP_THRESHOLD, 32 << 20)
            mallopt(_M_TRIM_THRESHOLD, 64 << 20)
