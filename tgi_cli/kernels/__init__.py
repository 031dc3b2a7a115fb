"""Kernels in C++ for the CPU, used where they were compiled; torch's operations elsewhere."""

from tgi_cli.kernels.library import (
    cpp_library,
    custom_kernels_enabled,
    describe_kernels,
    set_threads,
    threads,
    without_cpp_kernels,
)

__all__ = [
    "cpp_library",
    "custom_kernels_enabled",
    "describe_kernels",
    "set_threads",
    "threads",
    "without_cpp_kernels",
]
