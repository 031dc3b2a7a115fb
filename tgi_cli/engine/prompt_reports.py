"""Outputs of steps about prompts: log-probabilities and raw logits."""

from __future__ import annotations

from tgi_cli.engine.messages import Logits, PromptLogprobs, StepOutputs
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.step import StepResult


def report_prompt(
    sequence: Sequence, index: int, first: int, result: StepResult, outputs: StepOutputs
) -> None:
    """Output what a step computed of a prompt, once, though preemption may compute it again.

    ``first`` is the first position that the step computed, as entry ``index``.
    """
    request_id = sequence.request.request_id
    chunk = result.prompt_logprobs.get(index)
    if chunk is not None:
        known = max(0, sequence.logprobs_reported - chunk.start)
        if known < len(chunk.logprobs):
            outputs.prompt_logprobs.append(
                PromptLogprobs(
                    request_id,
                    chunk.start + known,
                    chunk.logprobs[known:],
                    chunk.top_ids[known:],
                    chunk.top_logprobs[known:],
                )
            )
            sequence.logprobs_reported = chunk.start + len(chunk.logprobs)
    values = result.context_logits.get(index)
    if values is not None:
        known = max(0, sequence.logits_reported - first)
        if known < len(values):
            outputs.logits.append(Logits(request_id, first + known, values[known:]))
            sequence.logits_reported = first + len(values)
