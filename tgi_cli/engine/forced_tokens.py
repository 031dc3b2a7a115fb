"""Tokens that are appended without sampling: those that a grammar forces, the closing marker when a
thinking budget is spent, and the first and last tokens of an encoder-decoder model's answers.

They are appended to their sequence as known tokens, which the scheduler's rule turns into a prefill
chunk of the next step. No step samples them.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from tgi_cli.engine.messages import FinishReason, StepOutputs
from tgi_cli.engine.sequence import Sequence


def follow(
    sequence: Sequence, token_id: int, outputs: StepOutputs, eos_token_ids: Many[int]
) -> tuple[FinishReason | None, str]:
    """Advance grammar and budget by the token just appended, and append the tokens they force.

    Args:
        sequence: has a grammar, a budget, or a decoder's forced tokens.
        outputs: their last token is the one just appended.
        eos_token_ids: end tokens that a complete grammar allows, the usual one first.

    Returns:
        Why the sequence ends, or None if it continues, and the error if that is the reason.
    """
    if sequence.num_unreported:
        begin = sequence.prompt_tokens
        begun = sequence.token_ids[begin : begin + sequence.num_unreported]
        _report(outputs, len(outputs.token_ids) - 1, sequence, begun)
        sequence.num_unreported = 0
    if token_id in sequence.stop_ids:
        return FinishReason.EOS_TOKEN, ""
    forced, reason, error = _forced_after(sequence, token_id, eos_token_ids)
    if forced:
        sequence.jump(forced)
        _report(outputs, len(outputs.token_ids), sequence, forced)
    return reason, error


def failure(sequence: Sequence, cause: str = "") -> tuple[FinishReason, str]:
    """The finish reason and the cause for a sequence that cannot continue."""
    error = "" if sequence.matcher is None else sequence.matcher.error
    if error:
        lines = f"the grammar cannot be completed: {error}".splitlines()
        return FinishReason.GRAMMAR, lines[0]
    return FinishReason.ERROR, cause or "the grammar does not allow the token that was chosen"


def _forced_after(
    sequence: Sequence, token_id: int, eos_token_ids: Many[int]
) -> tuple[list[int], FinishReason | None, str]:
    """The forced tokens after ``token_id``, within the sequence's length, and its end."""
    matcher, thinking, request = sequence.matcher, sequence.thinking, sequence.request
    remaining = sequence.max_tokens - len(sequence.token_ids)
    min_tokens = sequence.prompt_tokens + request.sampling.min_new_tokens
    forced: list[int] = []
    queue: list[int] = []
    while True:
        if thinking is not None:
            thinking.accept(token_id)
        if matcher is not None:
            if not matcher.accept(token_id):
                return forced, *failure(sequence)
            if matcher.stopped:
                eos = _eos_after(sequence, token_id, eos_token_ids)
                return forced + eos[:remaining], FinishReason.EOS_TOKEN, ""
        if not remaining:
            return forced, FinishReason.LENGTH, ""
        if remaining == 1 and not queue and matcher is None and sequence.last_id is not None:
            queue = [sequence.last_id]
        queue = queue or _next_forced(sequence)
        if not queue:
            return forced, None, ""
        token_id = queue.pop(0)
        early = len(sequence.token_ids) + len(forced) < min_tokens
        if early and token_id in request.stop_token_ids:
            return forced, None, ""  # left to the sampler, which has no other choice
        forced.append(token_id)
        remaining -= 1
        if token_id in sequence.stop_ids:
            return forced, FinishReason.EOS_TOKEN, ""


def _next_forced(sequence: Sequence) -> list[int]:
    """The tokens that are forced after those that grammar and budget have accepted."""
    matcher, thinking = sequence.matcher, sequence.thinking
    due = thinking.due() if thinking is not None else ()
    # Within a character, or within a tool call, a grammar allows the marker only later.
    if due and (matcher is None or matcher.allows(due)):
        assert thinking is not None
        thinking.enforce()
        return list(due)
    return matcher.forced() if matcher is not None and sequence.skip_forced else []


def _eos_after(sequence: Sequence, token_id: int, eos_token_ids: Many[int]) -> list[int]:
    """The stop id that a complete grammar forces, if any."""
    if token_id in eos_token_ids or not sequence.skip_forced:
        return []
    return [i for i in eos_token_ids if i in sequence.stop_ids][:1]


def _report(outputs: StepOutputs, at: int, sequence: Sequence, token_ids: list[int]) -> None:
    """Insert forced tokens into the outputs; their log-probabilities are 0."""
    top = sequence.request.sampling.top_logprobs > 0
    count = len(token_ids)
    outputs.request_ids[at:at] = [sequence.request.request_id] * count
    outputs.token_ids[at:at] = token_ids
    outputs.logprobs[at:at] = [0.0] * count
    outputs.top_ids[at:at] = [[i] if top else [] for i in token_ids]
    outputs.top_logprobs[at:at] = [[0.0] if top else [] for _ in token_ids]
