"""Compiles Triton's kernels instead of launching them, for GPUs that are not present."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class AbsentGPU:
    """A driver that states what to compile for. Launches fail."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(capability: int) -> None:
    """Make a GPU of this compute capability, such as 90, the target of compilations."""
    driver.set_active(AbsentGPU(capability))


def compile_only() -> tuple[list[tuple[str, Any]], Any]:
    """A list that collects names and kernels, and a replacement of ``JITFunction.run``."""
    kernels: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_kernel(self: Any, *args: Any, warmup: bool, **options: Any) -> None:
        kernels.append((self.__name__, run(self, *args, warmup=True, **options)))

    return kernels, compile_kernel
