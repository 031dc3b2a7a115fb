from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from tgi_cli.kernels import memory


def test_pieces_are_aligned_and_apart() -> None:
    sizes = [1, 64, 65, 700_000, 3 << 20, 17 << 20, 40 << 20, 0]
    pieces = [memory.allocate(size) for size in sizes]
    for i, piece in enumerate(pieces):
        assert (piece.dtype, piece.shape) == (torch.uint8, (sizes[i],))
        assert piece.data_ptr() % 64 == 0
        piece[:1] = piece[-1:] = i + 1
    for i, piece in enumerate(pieces[:-1]):
        assert piece[0] == piece[-1] == i + 1


def test_a_chunk_lasts_as_long_as_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_open", None)
    first, second = memory.allocate(100), memory.allocate(100)
    assert memory._open is not None
    chunk = memory._open[0]
    assert isinstance(chunk, weakref.ref)
    assert second.data_ptr() - first.data_ptr() == 128
    del first
    gc.collect()
    assert chunk() is not None
    del second
    gc.collect()
    assert chunk() is None
    assert memory.allocate(100).numel() == 100


def test_many_pieces_take_several_chunks() -> None:
    pieces = [memory.allocate(10 << 20).fill_(i) for i in range(8)]
    assert all((piece == i).all() for i, piece in enumerate(pieces))


def test_pages_are_huge_where_the_system_has_them() -> None:
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    wanted = switch.exists() and "[never]" not in switch.read_text()
    piece = memory.allocate(32 << 20)
    mapping, advised = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (first := line.split(" ", 1)[0]):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            mapping = line if begin <= piece.data_ptr() < end else ""
        elif mapping and line.startswith("VmFlags:"):
            advised = "hg" in line.split()
    assert advised or not wanted
