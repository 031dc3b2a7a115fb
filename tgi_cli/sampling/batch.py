"""The sampler's state per row, on the host: what each row wants, and which stages a step needs.

Flags per row are or-ed over a step's rows, so that every fast path (all greedy, no filter, no
penalty) is decided on the host, without asking the device. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_cli.sampling.params import SamplingParams

SAMPLED, REPETITION, COUNTED, TOP_K, TOP_P, MIN_P, TYPICAL, TOP_LOGPROBS = (
    1 << bit for bit in range(8)
)
"""Row flags. COUNTED: a frequency or presence penalty. Greedy rows carry no filter flags."""

PENALIZED = REPETITION | COUNTED
FILTERED = TOP_K | TOP_P | MIN_P | TYPICAL

_RECORD = np.dtype(
    [
        ("seed", np.uint64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("typical_p", np.float64),
        ("prompt_tokens", np.int64),
        ("top_logprobs", np.int64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("flags", np.int32),
    ]
)

_SMALLEST_TEMPERATURE = 1e-30
"""Below it float32 would round to zero, which means greedy."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What the sampled rows of one step want, in the order of their logits.

    Attributes:
        rows: int64 [N], the row of each in the token pool.
        positions: int64 [N], where the chosen token will stand; the tokens before are known.
        records: [N] of the fields of :class:`SamplingParams`, flags and prompt_tokens.
        flags: all rows' flags, or-ed.
    """

    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    records: NDArray[Any]
    flags: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, entries: NDArray[np.int64] | slice) -> SamplingBatch:
        records = self.records[entries]
        flags = int(np.bitwise_or.reduce(records["flags"], initial=0))
        return SamplingBatch(self.rows[entries], self.positions[entries], records, flags)

    def where(self, flag: int) -> NDArray[np.int64]:
        """The entries that carry any bit of ``flag``, ascending."""
        return np.flatnonzero(self.records["flags"] & flag)

    def column(self, name: str) -> NDArray[Any]:
        """One field over all entries, contiguous."""
        return np.ascontiguousarray(self.records[name])


class SamplingTable:
    """Sampling parameters of every row, written once when a sequence takes the row."""

    def __init__(self, max_rows: int) -> None:
        self._records = np.zeros(max_rows, _RECORD)

    def set(self, row: int, params: SamplingParams, prompt_tokens: int) -> None:
        """Give ``row`` to a sequence whose first ``prompt_tokens`` tokens are its prompt."""
        self._records[row] = (
            params.seed,
            params.top_k,
            params.top_p,
            params.typical_p,
            prompt_tokens,
            params.top_logprobs,
            max(params.temperature, _SMALLEST_TEMPERATURE),
            params.min_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            _flags(params),
        )

    def select(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> SamplingBatch:
        """The batch of these rows, whose next tokens stand at ``positions``."""
        records = self._records[rows]
        flags = int(np.bitwise_or.reduce(records["flags"], initial=0))
        return SamplingBatch(rows, positions, records, flags)


def _flags(params: SamplingParams) -> int:
    counted = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    flags = (
        REPETITION * (params.repetition_penalty != 1.0)
        | COUNTED * counted
        | TOP_LOGPROBS * (params.top_logprobs > 0)
    )
    if not params.greedy:
        flags |= (
            SAMPLED
            | TOP_K * (params.top_k > 0)
            | TOP_P * (params.top_p < 1.0)
            | MIN_P * (params.min_p > 0.0)
            | TYPICAL * (params.typical_p < 1.0)
        )
    return flags
