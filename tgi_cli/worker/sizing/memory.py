"""Measures the memory that steps take, and translates out-of-memory errors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tgi_cli.device import peak_memory
from tgi_cli.errors import OutOfMemoryError
from tgi_cli.process.resident_memory import trim_heap

_CPU_REFUSALS = ("can't allocate memory", "not enough memory")
"""Messages of torch's CPU allocator, which has no exception of its own."""


STEP_REMEDY = "lower --max-batch-prefill-tokens, --max-batch-size or --max-batch-total-tokens"
LOAD_REMEDY = "free memory, use --dtype bfloat16, or a smaller model"


@contextmanager
def out_of_memory_as_error(remedy: str = STEP_REMEDY) -> Iterator[None]:
    """Raise OutOfMemoryError for the error of any allocator."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        refused = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not refused and not any(words in str(error) for words in _CPU_REFUSALS):
            raise
        cause = str(error).splitlines()[0] if str(error) else "no memory left"
        raise OutOfMemoryError(f"the device ran out of memory: {cause}", remedy) from error


def release_unused_memory(device: torch.device) -> None:
    """Return unused memory to the system or the driver, after loading and warm-up."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim_heap()


class PeakMeter:
    """Measures an upper bound of the bytes taken since its creation.

    On a CUDA device these are torch's reservations, fragmentation included. On a CPU it is the
    process's peak, which is never reset (other code reads it): if loading the weights peaked
    higher than the steps, the bound is generous.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        self._before = held_memory(device)

    def read(self) -> int:
        """The bytes so far."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_reserved(self._device)
        else:
            peak = peak_memory(self._device)
        return max(0, peak - self._before)


def held_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return peak_memory(device)  # no /proc: only growth of the peak is visible
    for line in lines.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return peak_memory(device)
