"""The number of threads on a CPU.

One per physical core that the process may use: hyper-threads share the units that matrix
products need, and more threads than a control group's quota stall at every barrier.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

_ROOT = Path("/")
"""Root of the file systems read here; tests replace it."""


SMALL_MODEL = 32 << 20
"""Bytes of weights below which a second thread gains nothing on a quiet machine, and on a busy
one loses much: a step is hundreds of products of some 10 us, and each ends at a barrier that
waits for the slower thread to get its time slice."""


def default_threads(weight_bytes: int = SMALL_MODEL, processes: int = 1) -> int:
    """OMP_NUM_THREADS if it is set, else the physical cores within affinity and quota.

    A model with weights smaller than :data:`SMALL_MODEL` gets one; each of several processes that
    compute at once gets a fair part.
    """
    requested = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if requested.isdigit() and int(requested) > 0:
        return int(requested)
    if weight_bytes < SMALL_MODEL:
        return 1
    cores = _physical_cores(_affinity())
    quota = _quota()
    return max(1, (cores if quota is None else min(cores, math.ceil(quota))) // processes)


def set_threads(count: int | None = None) -> int:
    """Set the number of torch's threads; returns it. Default: :func:`default_threads`."""
    count = default_threads() if count is None else count
    torch.set_num_threads(count)
    return count


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _physical_cores(cpus: set[int]) -> int:
    """Distinct cores among logical CPUs; all of them if the topology is unknown."""
    cores = set()
    for cpu in cpus:
        topology = _ROOT / f"sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            siblings = (topology / "thread_siblings_list").read_text(encoding="ascii").strip()
        except OSError:
            return len(cpus)
        cores.add(siblings)
    return len(cores)


def _quota() -> float | None:
    """CPUs that the control group grants (version 2, then 1); None if it sets no limit."""
    folder = _ROOT / "sys/fs/cgroup"
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu/cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu/cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit():
        return None
    return int(quota) / int(period)
