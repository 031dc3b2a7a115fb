"""Logits processors: callables of one request that modify its logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from tgi_cli.worker.input_batch import RowOptions


def run_processors(options: RowOptions, scores: Tensor, token_ids: Sequence[int]) -> str | None:
    """Run a request's processors on its ``scores``, in place and in order.

    Args:
        options: of the request.
        scores: float32 [V], its raw logits.
        token_ids: prompt and generated tokens so far.

    Returns:
        The error in one line, if a processor raised or returned something that no token can be
        sampled from; else None.
    """
    for processor in options.extras.logits_processors:
        name = getattr(processor, "__qualname__", type(processor).__qualname__)
        try:
            returned = processor(options.request_id, scores, token_ids, options.extras.client_id)
        except Exception as error:  # the user's own code may raise anything; only it fails
            message = str(error).strip().partition("\n")[0]
            return f"the logits processor {name} failed: {type(error).__name__}: {message}"
        if not isinstance(returned, Tensor):
            found = type(returned).__name__
        elif returned.shape != scores.shape or not returned.is_floating_point():
            found = f"{returned.dtype} {list(returned.shape)}"
        else:
            if returned is not scores:
                scores.copy_(returned)
            continue
        return (
            f"the logits processor {name} returned {found} "
            f"instead of a float tensor [{len(scores)}]"
        )
    if not bool((scores < math.inf).all()):
        return "the logits processors left NaN or infinite logits"
    return None
