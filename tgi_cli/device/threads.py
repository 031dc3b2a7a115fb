"""The number of threads on a CPU.

One per physical core that the process may use: hyper-threads share the units that matrix
products need, and more threads than a control group's quota stall at every barrier.
"""

from __future__ import annotations

import os

import torch

from tgi_cli.process.cores import usable_cores

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
    return max(1, len(usable_cores()) // processes)


def set_threads(count: int | None = None) -> int:
    """Set the number of torch's threads; returns it. Default: :func:`default_threads`."""
    count = default_threads() if count is None else count
    torch.set_num_threads(count)
    return count
