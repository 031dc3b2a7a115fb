"""Kernels in C++ for the CPU, used where they were compiled; torch's operations elsewhere."""

from tgi_cli.kernels.library import cpp_library, set_threads, threads, custom_kernels_enabled, without_cpp_kernels

__all__ = ["native", "set_threads", "threads", "wanted", "without_native"]
