"""Imports torch without modules that serving does not use; they are imported on their first use."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_VERSION = "2.13."
"""Of the torch that can be imported without the modules below."""

_UNUSED = {
    "torch": (
        "_meta_registrations",  # operators for the meta device, in Python
        "distributions",
        "export",
        "masked",
        "optim",
        "profiler",
        "quantization",
    ),
    "torch.nn": ("intrinsic", "qat", "quantizable", "quantized"),
    "torch.utils": ("data",),
    "torchgen": ("model",),
}
"""Modules by their packages, which import them and use nothing of them meanwhile."""

_NEED_ALL = frozenset({"torch._dynamo", "torch.fx.experimental.symbolic_shapes"})
"""What traces models, and expects operators for the meta device without importing them."""

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
"""Those of NVIDIA's and AMD's drivers."""

_left_out: list[str] = []


def import_minimal_torch() -> None:
    """Import torch without modules that a serving process does not use.

    They and what they import take 30 MB, and a third of the time of importing torch. Import
    statements and attributes of their packages import them later. Nothing asks for the operators
    for the meta device by name: torch.compile imports them, and :func:`complete_torch` does.
    Without them, empty tensors and views work there, and so do operators that have their shapes in
    C++.

    Imports all of torch if it is another version than the one that the modules are known for, or
    beside a GPU, where host memory is not scarce. Does nothing if torch has been imported.
    """
    if "torch" in sys.modules:
        return
    from importlib.metadata import version

    beside_gpu = any(Path(device).exists() for device in _GPU_DEVICES)
    if beside_gpu or not version("torch").startswith(_VERSION):
        import_module("torch")
        return
    names = [f"{package}.{name}" for package, unused in _UNUSED.items() for name in unused]
    sys.modules.update({name: ModuleType(name) for name in names})
    try:
        torch = import_module("torch")
    finally:
        for name in names:
            del sys.modules[name]
    for package, unused in _UNUSED.items():
        _import_on_use(sys.modules[package], unused)
    # Operators for the meta device import torch._prims.rng_prims (7 MB), which does this, and does
    # it again when it is imported later. torch.Generator cannot be called before.
    torch._C._set_generator_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)
    _left_out[:] = names
    sys.meta_path.insert(0, _CompleteBefore())


def complete_torch() -> None:
    """Import all that :func:`import_minimal_torch` has left out."""
    for name in _left_out:
        import_module(name)


class _CompleteBefore(MetaPathFinder):
    """Completes torch before what needs all of it is imported."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname in _NEED_ALL:
            complete_torch()


def _import_on_use(package: ModuleType, modules: tuple[str, ...]) -> None:
    """Let attributes of a package import modules of it (PEP 562)."""
    attributes = vars(package)
    own = attributes.get("__getattr__")
    for name in modules:
        attributes.pop(name, None)

    def __getattr__(name: str) -> Any:
        if name in modules:
            return import_module(f"{package.__name__}.{name}")
        if own is not None:
            return own(name)
        raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")

    attributes["__getattr__"] = __getattr__
