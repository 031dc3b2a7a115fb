"""Imports: the garbage collector meanwhile, and torch without operators for the meta device."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from tgi_cli.process import imports
from tgi_cli.process.imports import importing, without_meta_kernels


class Node:
    """Part of a cycle, which only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_garbage_is_collected_once_and_the_rest_is_frozen() -> None:
    with importing():
        assert not gc.isenabled()
        kept, dropped = Node(), weakref.ref(Node())
    assert dropped() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    assert not any(each is kept for each in gc.get_objects())


def test_an_error_leaves_the_collector_enabled() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


WITHOUT_META_KERNELS = """
import sys
from tgi_cli.process import imports
from tgi_cli.process.imports import without_meta_kernels

with without_meta_kernels():
    import torch
assert "torch._decomp.decompositions" not in sys.modules
assert torch.Generator().manual_seed(1).initial_seed() == 1
scores = torch.empty(2, 3, device="meta")
assert (scores + 1).sum(-1).view(1, 2).shape == (1, 2)
order = torch.empty(5, dtype=torch.int64, device="meta")
try:
    scores.index_select(1, order)
except NotImplementedError:
    pass
else:
    raise AssertionError("an operator without a shape in C++ works: nothing was left out")

import tgi_cli.models.hf

assert scores.index_select(1, order).shape == (2, 5)
assert sys.modules["torch._meta_registrations"] is torch._meta_registrations
"""


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="torch is imported whole beside GPUs")
def test_torch_gets_its_operators_for_the_meta_device_with_the_models_that_need_them() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_META_KERNELS], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_an_imported_torch_keeps_its_operators_for_the_meta_device() -> None:
    import torch

    with without_meta_kernels():
        assert sys.modules["torch._meta_registrations"] is torch._meta_registrations


def test_beside_a_gpu_torch_is_imported_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "_GPU_DEVICES", ("/dev/null",))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "torch._meta_registrations", raising=False)
    with without_meta_kernels():
        assert "torch._meta_registrations" not in sys.modules
