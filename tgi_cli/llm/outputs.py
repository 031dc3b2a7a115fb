"""Results and errors of the Python API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tgi_cli.errors import TgiError


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The output of one step in a stream; see :class:`Completion`.

    Attributes:
        text: Text that became final; empty while a character or a possible stop string is
            incomplete.
        token_ids: Tokens of the step.
        logprobs: Their log-probabilities.
        top_logprobs: Their likeliest alternatives.
        finish_reason: Why the stream ended, in its last piece; else None.
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
        request_id: Id of the engine's request, unique within an LLM.
        prompt_index: Index of the prompt in the call.
        index: 0 to n-1 among the continuations of the prompt.
        prompt: Text of the prompt, or None if it came as token ids.
        prompt_ids: [P].
        text: Generated text up to the stop string, without special tokens.
        token_ids: [T], including the stop id or the tokens of the stop string.
        logprobs: [T].
        top_logprobs: [T] maps from token id to log-probability, likeliest first; empty unless
            ``SamplingParams.top_logprobs`` is set.
        finish_reason: ``eos_token`` (a stop id), ``length``, ``stop_sequence``, ``timeout``,
            ``cancelled`` or ``error``.
        stop: The stop string that ended it, or None.
        error: The cause if the reason is ``error`` or ``timeout``.
        cached_tokens: Leading prompt tokens whose KV was cached.
        prompt_logprobs: [P-1], of prompt_ids[1:]; None unless requested.
        prompt_top_logprobs: [P-1], as ``top_logprobs``; empty unless requested.
        context_logits: float32 [P, V], of every prompt position; None unless requested.
        generation_logits: float32 [T, V], raw logits from which token t was sampled; None unless
            requested.
        queue_seconds: Time from submission to the first step.
        first_token_seconds: Time from submission to the first token, or None without tokens.
        total_seconds: Time from submission to the end.
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
        """``cumulative_logprob`` per token, by which ``best_of`` ranks; -inf without tokens."""
        return self.cumulative_logprob / len(self.logprobs) if self.logprobs else float("-inf")


class EngineDeadError(TgiError):
    """The engine's loop has ended: it failed, or the LLM was closed. Create a new LLM."""


class GenerationError(TgiError):
    """Some requests failed; all others of the call are finished.

    Attributes:
        completions: The completions of the call. Those that failed have the finish reason
            ``error``, the cause in ``error`` and the text so far.
    """

    def __init__(self, cause: str, completions: Sequence[Completion], remedy: str = "") -> None:
        super().__init__(cause, remedy)
        self.completions = list(completions)

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> GenerationError:
        """The error for completions of which at least one failed."""
        failed = [c for c in completions if c.finish_reason == "error"]
        cause = failed[0].error
        if len(completions) > 1:
            cause = f"{len(failed)} of {len(completions)} requests failed; the first: {cause}"
        return cls(cause, completions)
