"""Total, available and peak memory of a device, in bytes.

On a CPU a control group may allow less than the machine has; both hierarchies are read:
https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_ROOT = Path("/")
"""Root of the file systems read here; tests replace it."""

_UNLIMITED = 1 << 60
"""Version 1 represents "no limit" by the largest page-aligned number; no real limit is as large."""


_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
"""Parameters of mallopt."""


@dataclass(frozen=True, slots=True)
class _Group:
    """One level of a control group hierarchy that limits memory."""

    limit: int
    used: int
    """Without the file cache, which the kernel drops before it refuses memory."""


def total_memory(device: torch.device) -> int:
    """Memory of the device; on a CPU at most what the control groups allow."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(group.limit for group in _control_groups())])


def available_memory(device: torch.device) -> int:
    """Memory that can still be taken without swapping or being killed.

    Without ``/proc/meminfo``, the memory that this process has not taken.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _field(_ROOT / "proc/meminfo", "MemAvailable")
    if free is None:
        free = total_memory(device) - peak_memory(device)
    return max(0, min([free, *(group.limit - group.used for group in _control_groups())]))


def peak_memory(device: torch.device) -> int:
    """The peak of this process's memory on the device (on a CPU: resident)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = _field(_ROOT / "proc/self/status", "VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _field(path: Path, name: str) -> int | None:
    """A ``Name:   123 kB`` line of a file in /proc, in bytes."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return None


def _control_groups() -> Iterator[_Group]:
    """Every limited group that this process is in, from its own up to the root."""
    try:
        lines = (_ROOT / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used, cache = "sys/fs/cgroup", "memory.max", "memory.current", "file"
        elif "memory" in controllers.split(","):
            root, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            used, cache = "memory.usage_in_bytes", "total_cache"
        else:
            continue
        yield from _walk(_ROOT / root, path, limit, used, f"{cache} ")


def _walk(root: Path, path: str, limit: str, used: str, cache: str) -> Iterator[_Group]:
    # A container sees its own group mounted at the root while /proc names the path outside:
    # levels that do not exist here are skipped.
    folder = root / path.lstrip("/")
    while True:
        allowed = _number(folder / limit)
        if allowed is not None and allowed < _UNLIMITED:
            in_use = _number(folder / used) or 0
            yield _Group(allowed, max(0, in_use - _statistic(folder / "memory.stat", cache)))
        if folder in (root, *root.parents):
            return
        folder = folder.parent


def _number(path: Path) -> int | None:
    """The number in a control file; None for ``max``, and if there is no such file."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _statistic(path: Path, prefix: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith(prefix):
            return int(line[len(prefix) :])
    return 0


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
