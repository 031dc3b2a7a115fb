"""The requests of a caller's batches, and the results of their steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tgi_cli.engine.messages import (
    Advanced,
    Finished,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
)

if TYPE_CHECKING:
    from tgi_cli.tgi_grpc.model_text import ModelText


class BatchRequest:
    """One request, from its prefill to its end.

    Attributes:
        request_id: The caller's id.
        engine_id: The engine's id.
        request: As the engine gets it.
        pending: Prompt tokens still to be computed.
        ended: Whether it has its last token.
        max_tokens: Tokens that its blocks hold.
    """

    def __init__(
        self,
        request_id: int,
        request: GenerationRequest,
        model_text: ModelText,
        stop_sequences: Iterable[str],
        block_size: int,
    ) -> None:
        self.request_id = request_id
        self.engine_id = request.request_id
        self.pending = 0
        self.ended = False
        self.request = request
        self._surface = model_text.surface
        self._special_ids = model_text.special_ids
        self._text = model_text.output(
            request.prompt_ids, list(stop_sequences), request.max_new_tokens
        )
        self._prompt_logprobs: list[float] = []
        most = len(request.prompt_ids) + request.max_new_tokens - 1
        self.max_tokens = -(-most // block_size) * block_size

    def score(self, run: PromptLogprobs) -> None:
        """Add log-probabilities of its prompt."""
        self._prompt_logprobs.extend(run.logprobs)

    def push(
        self,
        generation: Any,
        token_id: int,
        logprob: float,
        top_ids: list[int],
        top_logprobs: list[float],
    ) -> FinishReason | None:
        """Write one more token into its Generation; return why it is the last, or None.

        The engine's own reason is not considered.
        """
        if self.request.prompt_logprobs is not None and not self._text.num_tokens:
            self._write_prompt(generation.prefill_tokens)
        text = self._text.push(token_id)
        self._write(generation.tokens, [token_id], [logprob], [text])
        if top_ids:
            texts = [self._surface(top) for top in top_ids]
            self._write(generation.top_tokens.add(), top_ids, top_logprobs, texts)
        if self._text.num_tokens >= self.request.max_new_tokens:
            return FinishReason.LENGTH
        return self._text.finish_reason

    def finish(self, generation: Any, reason: FinishReason) -> None:
        """Write its end."""
        self.ended = True
        end = generation.generated_text
        self._text.finish(reason)
        end.text = self._text.text
        end.generated_tokens = self._text.num_tokens
        end.finish_reason = reason.value
        if not self.request.sampling.greedy:
            end.seed = self.request.sampling.seed

    def _write_prompt(self, tokens: Any) -> None:
        ids = self.request.prompt_ids
        # The first token has none: TGI sends a NaN.
        logprobs = [math.nan, *self._prompt_logprobs]
        self._write(tokens, ids, logprobs, [self._surface(i) for i in ids])

    def _write(
        self, tokens: Any, ids: Iterable[int], logprobs: Iterable[float], texts: Iterable[str]
    ) -> None:
        tokens.ids.extend(ids)
        tokens.logprobs.extend(logprobs)
        tokens.texts.extend(texts)
        tokens.is_special.extend(i in self._special_ids for i in ids)


class StepFailure(Exception):
    """A request failed in a step. Its batch is lost: the wire has no error for a single request."""

    def __init__(self, member: BatchRequest, cause: str) -> None:
        super().__init__(cause)
        self.member = member


def write_step(response: Any, batch: Iterable[BatchRequest], step: Advanced) -> list[int]:
    """Write the Generations of a step; return the engine's ids of requests to drop.

    Raises:
        StepFailure: A request failed.
    """
    by_id = {member.engine_id: member for member in batch}
    ends: dict[int, Finished] = {}
    generations: dict[int, Any] = {}
    reasons: dict[int, FinishReason] = {}
    for outputs in step.outputs:
        ends |= {finished.request_id: finished for finished in outputs.finished}
        for run in outputs.prompt_logprobs:
            by_id[run.request_id].score(run)
    for finished in ends.values():
        if finished.reason in (FinishReason.ERROR, FinishReason.GRAMMAR):
            raise StepFailure(by_id[finished.request_id], finished.error)
    for outputs in step.outputs:
        last = {engine_id: index for index, engine_id in enumerate(outputs.request_ids)}
        chosen = zip(
            outputs.request_ids,
            outputs.token_ids,
            outputs.logprobs,
            outputs.top_ids,
            outputs.top_logprobs,
            strict=True,
        )
        for index, (engine_id, token_id, logprob, top_ids, top_logprobs) in enumerate(chosen):
            if engine_id in reasons:
                continue  # it has ended within the step, which goes on with accepted drafts
            generation = generations.get(engine_id)
            if generation is None:
                generation = response.generations.add(request_id=by_id[engine_id].request_id)
                generations[engine_id] = generation
            reason = by_id[engine_id].push(generation, token_id, logprob, top_ids, top_logprobs)
            end = ends.get(engine_id) if index == last[engine_id] else None
            # The length counts first, then the end tokens, then stop sequences.
            if end is not None and reason is not FinishReason.LENGTH:
                reason = end.reason
            if reason is not None:
                reasons[engine_id] = reason
    for engine_id, member in by_id.items():
        member.pending = step.pending.get(engine_id, 0)
        if engine_id in reasons:
            member.finish(generations[engine_id], reasons[engine_id])
    return [engine_id for engine_id in reasons if engine_id not in ends]


def write_batch(cached: Any, batch_id: int, batch: list[BatchRequest], chunk: int) -> None:
    """Describe the unfinished requests of a batch; see :func:`chunk_of` for ``chunk``."""
    cached.id = batch_id
    cached.request_ids.extend(member.request_id for member in batch)
    cached.size = len(batch)
    cached.max_tokens = sum(member.max_tokens for member in batch)
    if "current_tokens" in cached.DESCRIPTOR.fields_by_name:
        prompts = [member.pending for member in batch if member.pending]
        cached.current_tokens = len(batch) - len(prompts) + min(sum(prompts), chunk)


def chunk_of(batch: Iterable[BatchRequest], max_prefill_tokens: int) -> int:
    """Return the most tokens of unfinished prompts that the next step of a batch computes."""
    return max(1, max_prefill_tokens - sum(not member.pending for member in batch))
