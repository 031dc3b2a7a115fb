from __future__ import annotations

import ctypes
import sys

import pytest

from tests.unit.worker.fakes import CPU
from tgi_cli.process import resident_memory
from tgi_cli.worker.sizing import memory


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc_trim and /proc")
def test_freed_memory_is_returned_to_the_system():
    """Small pieces with one kept at the end: free() alone cannot shrink the heap."""
    malloc = ctypes.CDLL(None).malloc
    malloc.restype, free = ctypes.c_void_p, ctypes.CDLL(None).free
    pieces = [malloc(ctypes.c_size_t(64 << 10)) for _ in range(1024)]
    for piece in pieces:
        ctypes.memset(piece, 1, 64 << 10)
    for piece in pieces[:-1]:
        free(ctypes.c_void_p(piece))
    held = memory.held_memory(CPU)
    memory.release_unused_memory(CPU)
    assert memory.held_memory(CPU) < held - (48 << 20)
    free(ctypes.c_void_p(pieces[-1]))


def test_another_c_library_is_no_error(monkeypatch):
    monkeypatch.setattr(resident_memory.ctypes, "CDLL", lambda name: object())
    memory.release_unused_memory(CPU)
