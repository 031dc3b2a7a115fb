"""Imports of many modules, in processes that keep them until they end."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

_META_KERNELS = "torch._meta_registrations"
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
"""Those of NVIDIA's and AMD's drivers."""


@contextmanager
def importing() -> Iterator[None]:
    """Collect garbage once after the block, and never walk what it leaves again.

    While modules are imported, Python walks all objects several times as their number grows. Those
    of torch take 0.1 s, and so does each later collection unless they are frozen.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
    gc.collect()
    gc.freeze()


@contextmanager
def without_meta_kernels() -> Iterator[None]:
    """Import torch in the block without the operators that it has for the meta device in Python.

    They and the decompositions that they import take 13 MB, and a fifth of the time of importing
    torch. torch.compile and transformers' modules on the meta device need them;
    :mod:`tgi_cli.models.hf` imports them then. Without them, empty tensors and views work there,
    and so do operators that have their shapes in C++.

    Does nothing if torch has been imported, or beside a GPU, where host memory is not scarce.
    """
    if "torch" in sys.modules or any(Path(device).exists() for device in _GPU_DEVICES):
        yield
        return
    empty = sys.modules.setdefault(_META_KERNELS, ModuleType(_META_KERNELS))
    try:
        yield
        # torch.Generator can be called only once this has been imported.
        if "torch" in sys.modules:
            import_module("torch._prims.rng_prims")
    finally:
        # A later import is to find the module itself.
        if sys.modules.get(_META_KERNELS) is empty:
            del sys.modules[_META_KERNELS]
            if (torch := sys.modules.get("torch")) is not None:
                vars(torch).pop("_meta_registrations", None)
