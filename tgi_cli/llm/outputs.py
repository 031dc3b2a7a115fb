"""What a call of the Python API returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one step added to a stream.

    Attributes:
        text: that can be shown now; empty while a character's bytes, or what may become a stop
            string, are incomplete.
        token_ids, logprobs, top_logprobs: of the step's tokens, as in :class:`Completion`.
        finish_reason: on the last piece, as in :class:`Completion`; before it None.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One continuation of one prompt: P prompt tokens, T generated ones, V of vocabulary.

    Log-probabilities are natural logarithms of the model's own distribution, before biases,
    penalties, temperature and filters.

    Attributes:
        request_id: of the engine's request, unique within an LLM.
        prompt_index: place of the prompt in the call.
        index: 0 to n-1 among the continuations of that prompt.
        prompt: its text, None where token ids were given.
        prompt_ids: [P].
        text: generated, up to the stop string; special tokens add nothing to it.
        token_ids: [T], the stop id or the tokens of the stop string included.
        logprobs: [T].
        top_logprobs: [T] maps from token id to log-probability, likeliest first; empty unless
            ``SamplingParams.top_logprobs`` asks for them.
        finish_reason: ``eos_token`` (a stop id), ``length``, ``stop_sequence``, ``timeout``,
            ``cancelled`` or ``error``.
        stop: the stop string that ended it.
        error: the cause where the reason is ``error`` or ``timeout``.
        cached_tokens: leading prompt tokens whose KV was there already.
        prompt_logprobs: [P-1], of prompt_ids[1:]; None unless asked for.
        prompt_top_logprobs: [P-1], as ``top_logprobs``; empty unless asked for.
        context_logits: float32 [P, V], of every prompt position; None unless asked for.
        generation_logits: float32 [T, V], row t is what token t was chosen from, before
            anything changed it; None unless asked for.
        queue_seconds: from submission to the first step.
        first_token_seconds: from submission to the first token; None when there is none.
        total_seconds: from submission to the end.
    """

    request_id: int
    prompt_index: int
    index: int
    prompt: str | None
    prompt_ids: list[int]
    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    finish_reason: str
    stop: str | None
    error: str
    cached_tokens: int
    prompt_logprobs: list[float] | None
    prompt_top_logprobs: list[dict[int, float]]
    context_logits: NDArray[np.float32] | None
    generation_logits: NDArray[np.float32] | None
    queue_seconds: float
    first_token_seconds: float | None
    total_seconds: float

    @property
    def cumulative_logprob(self) -> float:
        """Log-probability of the continuation: the sum of ``logprobs``."""
        return sum(self.logprobs)

    @property
    def mean_logprob(self) -> float:
        """``cumulative_logprob`` per token, what ``best_of`` ranks by; -inf without tokens."""
        return self.cumulative_logprob / len(self.logprobs) if self.logprobs else float("-inf")
