"""Counter-based randomness: a token's uniform depends on (seed, position) and nothing else.

No generator has state, so batch order, preemption and restarts cannot change what a seed
yields, and the host can compute a step's randomness before it knows the tokens before it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele et al. 2014; Stafford's variant 13): a 64-bit bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in the open interval (0, 1) for each (seed, position), on a grid of 2**-52.

    Seeds are hashed before positions enter, so that neighbouring seeds are unrelated streams.
    """
    stream = _mix(seeds + _GOLDEN)
    bits = _mix(stream ^ (positions.astype(np.uint64) * _GOLDEN))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
