"""Programmatic dependent launch: a kernel that begins while the one before it still runs.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization

GPUs from compute capability 9.0 on start a kernel that is launched with ``launch_pdl=True`` once
every program of the kernel before it, on the same stream, has signalled or ended. What that kernel
writes may not be visible by then. It is after ``gdc_wait``, which returns when that kernel has
ended and its writes are visible.

Memory is read and written in the order of launches, as without it, because of two rules for every
kernel that is launched so:

1. Every program of it waits, on every path. So it ends after the kernel before it has ended. By
   induction, when its wait returns, all earlier kernels of the stream have ended, not just the
   last one, even if some of them signalled before they waited. A kernel that is launched as usual
   starts when the one before it has ended, and so after all earlier ones, too.
2. Before its wait it neither reads nor writes memory. It may calculate, and fetch lines into the
   second-level cache, through which all reads and writes of a GPU go: a line that is written
   afterwards is not stale there. So it reads what earlier kernels have written, and writes nothing
   that an earlier kernel has still to read or to write. That holds for memory that torch gives to
   one tensor after another, too.

A signal orders nothing, and has no effect unless the next kernel is launched so. A kernel may
signal at its beginning, before it has written its results. Kernels of libraries that are launched
so have to wait by themselves in any case, since the end of a program counts as its signal.

Programs of the next kernel may already have what is left of a multiprocessor when a kernel that has
signalled asks for more of it: on GPUs of compute capability 10, programs take tensor memory for
products as they run, and keep it while they wait. So a kernel that multiplies matrices does not
signal.

CUDA graphs keep such launches as edges of their own kind when they are captured. None of this has
run on a GPU.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents
from triton.language.target_info import cuda_capability_geq

_CAPABILITY = (9, 0)


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a CUDA device starts kernels so."""
    return torch.cuda.get_device_capability(device) >= _CAPABILITY


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def signal_dependents() -> None:
    """Let the next kernel begin, if it is launched so, once all programs have come here."""
    if cuda_capability_geq(9, 0):
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def fetch_lines(addresses: tl.tensor) -> None:
    """Have the lines at a tensor of pointers fetched into the second-level cache.

    Does not wait for them. Not for the interpreter.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
