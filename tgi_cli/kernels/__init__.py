"""Kernels in C++ for the CPU, used where they were compiled; torch's operations elsewhere."""

from tgi_cli.kernels.library import native, set_threads, threads, wanted, without_native

__all__ = ["native", "set_threads", "threads", "wanted", "without_native"]
