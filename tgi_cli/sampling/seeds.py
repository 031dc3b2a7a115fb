"""Seeds of the samples of one prompt: the same over HTTP and in Python."""

from __future__ import annotations

_UINT64 = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio (Knuth, TAOCP 6.4), which keeps all of them apart and far from
the small numbers that people choose."""


def sample_seed(seed: int, sample: int) -> int:
    """The seed of sample 0, 1, ... of a prompt, whatever their number; the first has its own.

    Asked for alone, with this seed, a sample is the same text.
    """
    return (seed + sample * _STEP) & _UINT64
