"""Sampling parameters per row, on the host, and the stages that a step needs.

Flags per row are or-ed over a step's rows, so that every fast path (all greedy, no filter, no
penalty) is decided on the host, without asking the device. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_cli.sampling.params import SamplingParams

SAMPLED, REPETITION, COUNTED, TOP_K, TOP_P, MIN_P, TYPICAL, TOP_LOGPROBS = (
    1 << bit for bit in range(8)
)
RELATIVE, BIASED, WATERMARK, BAD_WORDS, MIN_TOKENS, ALLOWED = (1 << bit for bit in range(8, 14))
"""Row flags. COUNTED: a frequency or presence penalty; RELATIVE: TGI's frequency penalty;
MIN_TOKENS: stop ids are masked so far; ALLOWED: only listed tokens are not masked. Greedy rows have
no filter flags."""

PENALIZED = REPETITION | COUNTED | RELATIVE
FORBIDDEN = BAD_WORDS | MIN_TOKENS | ALLOWED
ADJUSTED = PENALIZED | BIASED | WATERMARK | FORBIDDEN
"""Flags of stages that change the scores before temperature."""
FILTERED = TOP_K | TOP_P | MIN_P | TYPICAL

_RECORD = np.dtype(
    [
        ("seed", np.uint64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("typical_p", np.float64),
        ("prompt_tokens", np.int64),
        ("context_start", np.int64),
        ("top_logprobs", np.int64),
        ("min_new_tokens", np.int64),
        ("watermark_gamma", np.float64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("relative_frequency_penalty", np.float32),
        ("watermark_delta", np.float32),
        ("flags", np.int32),
    ],
    align=True,
)

_TEMPERATURES = (1e-30, 1e30)
"""Bounds of a divisor in float32. At the lower one a row takes its likeliest tokens, at the upper
one all are equally likely; zero and infinity would turn masked scores into NaN."""
_REPETITION = (1e-6, 1e6)
_DELTA = 1e6
"""Bound of a watermark's delta: beyond it, tokens of any logits are masked or certain."""


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Token lists of one row, on the host; ids are int64, those of ``prefix`` int32.

    Attributes:
        bias_ids, bias_values: parallel; added to the logits (float32).
        allowed: the only tokens that may be chosen, or empty for all.
        banned: bad words of one token.
        stops: ids that end the request, masked before ``min_new_tokens``.
        lasts: the last token of each longer bad word.
        lengths: number of tokens before it.
        prefix: those tokens, of all words concatenated.
        back: distance of each of them to the next position (1 for the latest token).
    """

    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    allowed: NDArray[np.int64]
    banned: NDArray[np.int64]
    stops: NDArray[np.int64]
    lasts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    prefix: NDArray[np.int32]
    back: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of the sampled rows of one step, in the order of their logits.

    Attributes:
        rows: int64 [N], rows of the token pool.
        positions: int64 [N], position of the token to be chosen; the tokens before it are known.
        records: [N], fields of :class:`SamplingParams`, flags and prompt_tokens.
        flags: flags of all rows, or-ed.
        lists: the token lists of every row of the table.
    """

    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    records: NDArray[Any]
    flags: int
    lists: list[TokenLists | None]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, entries: NDArray[np.int64] | slice) -> SamplingBatch:
        records = self.records[entries]
        flags = int(np.bitwise_or.reduce(records["flags"], initial=0))
        return SamplingBatch(
            self.rows[entries], self.positions[entries], records, flags, self.lists
        )

    def where(self, flag: int) -> NDArray[np.int64]:
        """The entries with any bit of ``flag``, ascending."""
        return np.flatnonzero(self.records["flags"] & flag)

    def column(self, name: str) -> NDArray[Any]:
        """One field over all entries, contiguous."""
        return np.ascontiguousarray(self.records[name])

    def lists_of(self, entry: int) -> TokenLists:
        """The token lists of an entry that has any."""
        lists = self.lists[int(self.rows[entry])]
        assert lists is not None
        return lists


class SamplingTable:
    """Sampling parameters of every row, written once when a sequence takes the row.

    They are clamped where float32 arithmetic would overflow, which changes no distribution.
    """

    def __init__(self, max_rows: int) -> None:
        self._records = np.zeros(max_rows, _RECORD)
        self._lists: list[TokenLists | None] = [None] * max_rows

    def set(
        self,
        row: int,
        params: SamplingParams,
        prompt_tokens: int,
        stop_token_ids: Iterable[int] = (),
        context_start: int = 0,
    ) -> None:
        """Give ``row`` to a sequence whose first ``prompt_tokens`` tokens are its prompt.

        ``stop_token_ids`` are not chosen before ``params.min_new_tokens`` tokens. Penalties are for
        tokens from position ``context_start`` on: those of an encoder do not count.
        """
        lists = self._lists[row] = _token_lists(params, stop_token_ids)
        self._records[row] = (
            params.seed,
            params.top_k,
            params.top_p,
            params.typical_p,
            prompt_tokens,
            context_start,
            params.top_logprobs,
            params.min_new_tokens,
            params.watermark_gamma,
            _within(params.temperature, *_TEMPERATURES),
            params.min_p,
            _within(params.repetition_penalty, *_REPETITION),
            params.frequency_penalty,
            params.presence_penalty,
            params.relative_frequency_penalty,
            _within(params.watermark_delta, -_DELTA, _DELTA),
            _flags(params, lists),
        )

    def select(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> SamplingBatch:
        """The batch of these rows, whose next tokens go to ``positions``."""
        records = self._records[rows]
        flags = int(np.bitwise_or.reduce(records["flags"], initial=0))
        if flags & MIN_TOKENS:
            enough = positions - records["prompt_tokens"] >= records["min_new_tokens"]
            records["flags"][enough] &= ~MIN_TOKENS
            flags = int(np.bitwise_or.reduce(records["flags"]))
        return SamplingBatch(rows, positions, records, flags, self._lists)


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _flags(params: SamplingParams, lists: TokenLists | None) -> int:
    counted = params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    flags = (
        REPETITION * (params.repetition_penalty != 1.0)
        | COUNTED * counted
        | RELATIVE * (params.relative_frequency_penalty != 0.0)
        | TOP_LOGPROBS * (params.top_logprobs > 0)
        | WATERMARK * params.watermark
    )
    if lists is not None:
        flags |= (
            BIASED * (len(lists.bias_ids) > 0)
            | BAD_WORDS * (len(lists.banned) + len(lists.lasts) > 0)
            | MIN_TOKENS * (len(lists.stops) > 0)
            | ALLOWED * (len(lists.allowed) > 0)
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


def _token_lists(params: SamplingParams, stop_token_ids: Iterable[int]) -> TokenLists | None:
    """The lists of a request, or None if it has none."""
    stops = tuple(stop_token_ids) if params.min_new_tokens else ()
    if not (params.logit_bias or params.bad_words or params.allowed_token_ids or stops):
        return None
    words = [word for word in params.bad_words if len(word) > 1]
    return TokenLists(
        bias_ids=np.array([token for token, _ in params.logit_bias], np.int64),
        bias_values=np.array([bias for _, bias in params.logit_bias], np.float32),
        allowed=np.array(params.allowed_token_ids, np.int64),
        banned=np.array([word[0] for word in params.bad_words if len(word) == 1], np.int64),
        stops=np.array(stops, np.int64),
        lasts=np.array([word[-1] for word in words], np.int64),
        lengths=np.array([len(word) - 1 for word in words], np.int64),
        prefix=np.array([token for word in words for token in word[:-1]], np.int32),
        back=np.array([back for word in words for back in range(len(word) - 1, 0, -1)], np.int64),
    )
