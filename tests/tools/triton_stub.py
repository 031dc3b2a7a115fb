"""A GPU that is not there: Triton's kernels are neither compiled nor launched, but counted.

Everything before a launch is as with a GPU: modules choose Triton's kernels, arguments are
specialized, variants are looked up. Tensors are on the CPU, and what kernels would write is left as
it is. So the variants that a workload asks for are known, and what its launches cost the host.
Triton must not interpret (TRITON_INTERPRET), which is settled when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tgi_cli.layers import ops

_devices = count(1000)
"""Kernels are cached by device."""


@dataclass
class StubGPU:
    """What kernels were asked for.

    Attributes:
        variants: names and Triton's keys of what would have been compiled.
        launches: names of kernels and their arguments, if they are recorded.
    """

    variants: list[tuple[str, Any]] = field(default_factory=list)
    launches: list[tuple[str, tuple[Any, ...]]] | None = None


class _Driver:
    def __init__(self) -> None:
        self._device = next(_devices)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


class _Compiled:
    """Instead of a compiled kernel: its launcher does nothing."""

    function = 0
    packed_metadata = ()

    def __init__(self, name: str, launches: list[tuple[str, tuple[Any, ...]]] | None) -> None:
        self.run: Callable[..., None] = _ignore
        if launches is not None:
            self.run = lambda *given: launches.append((name, given))

    def launch_metadata(self, *_: Any) -> None:
        return None


def _ignore(*_: Any) -> None:
    return None


@contextmanager
def stub_gpu(record: bool = False, zeroed: bool = True) -> Iterator[StubGPU]:
    """Run what is inside as if there were a GPU of compute capability 9.0.

    Args:
        record: whether to record launches.
        zeroed: whether new tensors are zeros, where kernels would write valid numbers.
    """
    stub = StubGPU(launches=[] if record else None)

    def compile_nothing(self: Any, key: Any, *given: Any, **named: Any) -> _Compiled:
        stub.variants.append((self.__name__, key))
        made = _Compiled(self.__name__, stub.launches)
        self.device_caches[driver.active.get_current_device()][0][key] = made
        return made

    before = driver._active
    driver.set_active(_Driver())
    ops.triton_kernels.cache_clear()
    try:
        with ExitStack() as stack:
            from tgi_cli.layers import triton_ops

            stack.enter_context(patch.object(JITFunction, "_do_compile", compile_nothing))
            stack.enter_context(patch.object(torch.Tensor, "is_cuda", True, create=True))
            stack.enter_context(patch.object(triton_ops, "probe", _ignore))
            if zeroed:
                stack.enter_context(patch.object(torch, "empty", torch.zeros))
            yield stub
    finally:
        driver._active = before
        ops.triton_kernels.cache_clear()
