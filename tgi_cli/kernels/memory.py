"""Memory for weights, in huge pages where the system has them.

A product for one token reads every weight once, and much of the time goes into translating the
addresses of pages. One core of a virtual machine reads 17 GB/s in pages of 4 KiB and 27 in those of
2 MiB.
https://docs.kernel.org/admin-guide/mm/transhuge.html
"""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor

_PAGE = 2 << 20
_CHUNK = 64 << 20
"""Bytes taken from the system at once, for weights that are smaller than a page."""

_lock = threading.Lock()
_open: tuple[weakref.ref[mmap.mmap], int] | None = None
"""The chunk with free memory, and the offset of that. Only tensors in a chunk keep it alive."""


def allocate(nbytes: int) -> Tensor:
    """Memory that is not initialized: uint8 [nbytes], aligned to 64 bytes.

    It is freed when no tensor is left in its chunk of 64 MiB.
    """
    global _open
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(nbytes, dtype=torch.uint8)
    if nbytes > _CHUNK // 4:
        return _view(_map(-(-nbytes // _PAGE) * _PAGE), 0, nbytes)
    with _lock:
        chunk, start = (_open[0](), _open[1]) if _open else (None, 0)
        if chunk is None or start + nbytes > _CHUNK:
            chunk, start = _map(_CHUNK), 0
        _open = weakref.ref(chunk), start + -(-nbytes // 64) * 64
        return _view(chunk, start, nbytes)


def _map(size: int) -> mmap.mmap:
    """A mapping with ``size`` bytes from its first huge page on; pages are taken when written."""
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _view(memory: mmap.mmap, start: int, nbytes: int) -> Tensor:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start += -whole.data_ptr() % _PAGE
    return whole[start : start + nbytes]
