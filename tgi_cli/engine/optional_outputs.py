"""What few requests ask for: prompt log-probabilities, raw logits, logits processors."""

from __future__ import annotations

from tgi_cli.engine.messages import GenerationRequest, Logits, PromptLogprobs, StepOutputs
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.step import NO_EXTRAS, OptionalOutputs, StepResult


def wants_context(request: GenerationRequest) -> bool:
    """Whether every prompt position must be computed, cached or not."""
    return request.prompt_logprobs is not None or request.return_context_logits


def extras_of(request: GenerationRequest) -> OptionalOutputs:
    """What the worker must know beyond the sampling parameters."""
    minimum = request.sampling.min_new_tokens > 0
    if not (
        minimum
        or request.logits_processors
        or request.return_generation_logits
        or wants_context(request)
    ):
        return NO_EXTRAS
    return OptionalOutputs(
        stop_token_ids=request.stop_token_ids if minimum else frozenset(),
        prompt_logprobs=request.prompt_logprobs,
        logits_processors=request.logits_processors,
        client_id=request.client_id,
        return_context_logits=request.return_context_logits,
        return_generation_logits=request.return_generation_logits,
    )


def report_context(
    sequence: Sequence, place: int, first: int, result: StepResult, outputs: StepOutputs
) -> None:
    """Hand on what a step says of a prompt, once, though preemption may compute it again.

    ``first`` is the first position that the step computed, at ``place`` of its entries.
    """
    request_id = sequence.request.request_id
    scores = result.prompt_logprobs.get(place)
    if scores is not None:
        known = max(0, sequence.scored - scores.start)
        if known < len(scores.logprobs):
            outputs.prompt_logprobs.append(
                PromptLogprobs(
                    request_id,
                    scores.start + known,
                    scores.logprobs[known:],
                    scores.top_ids[known:],
                    scores.top_logprobs[known:],
                )
            )
            sequence.scored = scores.start + len(scores.logprobs)
    values = result.context_logits.get(place)
    if values is not None:
        known = max(0, sequence.context_reported - first)
        if known < len(values):
            outputs.logits.append(Logits(request_id, first + known, values[known:]))
            sequence.context_reported = first + len(values)
