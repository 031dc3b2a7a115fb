"""Has modules that others import executed only once something of them is used.

``import torch`` executes a good part of it that a server on a CPU has no use for: kernels in Python
for tensors without data, exports of graphs, optimizers, distributions. That takes 27 of the 147 MB
that the process then has for itself, and a quarter of the time.

The standard library's :class:`importlib.util.LazyLoader` executes a module whenever another one
imports it a second time (Python 3.11), which happens to all of these.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TORCH_PARTS = (
    "torch.distributions",
    "torch.masked",
    "torch.optim",
    "torch.profiler",
    "torch.signal.windows",
    "torch.ao",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.quantization",
    "torch.quasirandom",
    "torch.mps",
    "torch.mtia",
    "torch.xpu",
    "torch.export",
    "torch._meta_registrations",
    "torch._native",
)
"""Modules that ``import torch`` imports without using them."""

TORCH_USERS = ("transformers", "torch._dynamo")
"""Modules that rely on what these register when they are imported."""

_SET_BY_IMPORT = frozenset(
    ("__cached__", "__file__", "__loader__", "__package__", "__path__", "__wrapped__")
)
"""Attributes that a module may lack, and that the import system and ``inspect`` ask for."""

_lock = threading.RLock()
_loaders: dict[str, Loader] = {}
"""Of the modules that have been imported and not executed, in the order of their imports."""


class _DeferredModule(ModuleType):
    """Is executed, and a plain one, once an attribute is read that it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        if name in _SET_BY_IMPORT:
            raise AttributeError(name)
        _execute(self)
        if type(self) is _DeferredModule:  # this thread is executing it
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} yet")
        return getattr(self, name)


def _execute(module: ModuleType) -> None:
    with _lock:
        loader = _loaders.pop(module.__name__, None)
        if loader is None:
            return
        try:
            loader.exec_module(module)
        except BaseException:
            sys.modules.pop(module.__name__, None)
            raise
        finally:
            module.__class__ = ModuleType


class _DeferringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        _loaders[module.__name__] = self._loader


class _Finder(MetaPathFinder):
    def __init__(self, names: Iterable[str], users: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._users = frozenset(users)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in self._users:
            execute_deferred()
        parent = sys.modules.get(name.rpartition(".")[0])
        if type(parent) is _DeferredModule:
            _execute(parent)
        if name not in self._names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(spec.loader)
        return spec


def defer(names: Iterable[str], users: Iterable[str] = ()) -> None:
    """Defer modules that have not been imported yet, until something of them is used.

    Args:
        names: of the modules. Importing a submodule of one executes it first, as always.
        users: modules before whose import all deferred ones are executed, since they rely on what
            those do when they are executed.
    """
    sys.meta_path.insert(0, _Finder(names, users))


def execute_deferred() -> None:
    """Execute all modules that have been imported and deferred, in the order of their imports."""
    with _lock:
        for name in list(_loaders):
            module = sys.modules.get(name)
            if module is not None:
                _execute(module)
