"""Token lists of one row: what it favours, and what it may not say. On the host; no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgi_cli.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Written once when a sequence takes a row; ids are int64, those of ``prefix`` int32.

    Attributes:
        bias_ids, bias_values: parallel; added to the logits (float32).
        allowed: if there are any, all that may be chosen.
        banned: bad words of one token.
        stops: ids that end the request, barred before its least number of tokens.
        lasts: the last token of each longer bad word, and
        lengths: how many tokens stand before it.
        prefix: those tokens, of all words one after the other, and
        back: how far before the next position each of them stands (1: the last token so far).
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


def lists_of(params: SamplingParams, stop_token_ids: Iterable[int]) -> TokenLists | None:
    """The lists of a request; None where it has none."""
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
