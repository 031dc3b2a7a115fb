"""Logits processors: callables of one request that change what it may say next."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from tgi_cli.worker.input_batch import RowOptions


def run_processors(asking: RowOptions, scores: Tensor, token_ids: Sequence[int]) -> str | None:
    """Let a request's processors change its ``scores`` in place, one after the other.

    Args:
        asking: the request's.
        scores: float32 [V], its raw logits.
        token_ids: prompt and generated tokens so far.

    Returns:
        What went wrong, in one line: one raised, or returned something that no token can be
        chosen from. None: nothing did.
    """
    for processor in asking.extras.logits_processors:
        name = getattr(processor, "__qualname__", type(processor).__qualname__)
        try:
            given = processor(asking.request_id, scores, token_ids, asking.extras.client_id)
        except Exception as error:  # the user's own code may raise anything; only it fails
            words = str(error).strip().partition("\n")[0]
            return f"the logits processor {name} failed: {type(error).__name__}: {words}"
        if not isinstance(given, Tensor):
            found = type(given).__name__
        elif given.shape != scores.shape or not given.is_floating_point():
            found = f"{given.dtype} {list(given.shape)}"
        else:
            if given is not scores:
                scores.copy_(given)
            continue
        return (
            f"the logits processor {name} returned {found} "
            f"instead of a float tensor [{len(scores)}]"
        )
    if not bool((scores < math.inf).all()):
        return "the logits processors left NaN or infinite logits"
    return None
