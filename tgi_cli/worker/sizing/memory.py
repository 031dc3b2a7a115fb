"""What a step takes of the device's memory, and what happens when there is not enough."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tgi_cli.device import peak_memory
from tgi_cli.errors import OutOfMemoryError

_CPU_REFUSALS = ("can't allocate memory", "not enough memory")
"""torch's CPU allocator has no exception of its own; these are its words."""


STEP_REMEDY = "lower --max-batch-prefill-tokens, --max-batch-size or --max-batch-total-tokens"
LOAD_REMEDY = "free memory, use --dtype bfloat16, or a smaller model"


@contextmanager
def out_of_memory_as_error(remedy: str = STEP_REMEDY) -> Iterator[None]:
    """Turn any allocator's refusal into OutOfMemoryError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        refused = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not refused and not any(words in str(error) for words in _CPU_REFUSALS):
            raise
        cause = str(error).splitlines()[0] if str(error) else "no memory left"
        raise OutOfMemoryError(f"the device ran out of memory: {cause}", remedy) from error


def release_unused_memory(device: torch.device) -> None:
    """Return memory that is held and not used to the system or the driver.

    glibc keeps what was freed for the next allocation, which after loading and warm-up does not
    come: malloc_trim (https://man7.org/linux/man-pages/man3/malloc_trim.3.html) returns it.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(ctypes.c_size_t(0))


class PeakMeter:
    """Upper bound of the bytes that were taken on top of what was held at its creation.

    On a CUDA device what torch's allocator reserved, fragmentation included. On a CPU the
    process's peak, which is never reset (others want to know it): if loading the weights went
    higher than the steps, the bound is generous.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        self._before = _held(device)

    def read(self) -> int:
        """The bytes so far."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_reserved(self._device)
        else:
            peak = peak_memory(self._device)
        return max(0, peak - self._before)


def _held(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return peak_memory(device)  # no /proc: growth of the peak is all that can be seen
    for line in lines.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return peak_memory(device)
