"""The requests that a caller drives, in his batches, and what he is told of them."""

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
        request_id: the caller's.
        engine_id: the engine's.
        pending: prompt tokens that are still to be computed.
        ended: it has its last token.
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
        self._request = request
        self._surface = model_text.surface
        self._special_ids = model_text.special_ids
        self._text = model_text.output(
            request.prompt_ids, list(stop_sequences), request.max_new_tokens
        )
        self._prompt_logprobs: list[float] = []
        most = len(request.prompt_ids) + request.max_new_tokens - 1
        self.max_tokens = -(-most // block_size) * block_size
        """That its blocks hold."""

    def score(self, run: PromptLogprobs) -> None:
        """Take in some of its prompt's log-probabilities."""
        self._prompt_logprobs.extend(run.logprobs)

    def push(
        self,
        generation: Any,
        token_id: int,
        logprob: float,
        top_ids: list[int],
        top_logprobs: list[float],
    ) -> FinishReason | None:
        """Write one more token into its Generation; the reason if it is the last, in TGI's order.

        Whether the engine ended it is for the caller to add.
        """
        if self._request.prompt_logprobs is not None and not self._text.num_tokens:
            self._write_prompt(generation.prefill_tokens)
        text = self._text.push(token_id)
        self._write(generation.tokens, [token_id], [logprob], [text])
        if top_ids:
            texts = [self._surface(top) for top in top_ids]
            self._write(generation.top_tokens.add(), top_ids, top_logprobs, texts)
        if self._text.num_tokens >= self._request.max_new_tokens:
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
        if not self._request.sampling.greedy:
            end.seed = self._request.sampling.seed

    def _write_prompt(self, tokens: Any) -> None:
        ids = self._request.prompt_ids
        # Nothing precedes the first: TGI says so with a NaN.
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
    """One request of a batch failed in its step: the batch is lost, as the wire cannot say less."""

    def __init__(self, driven: BatchRequest, cause: str) -> None:
        super().__init__(cause)
        self.driven = driven


def write_step(response: Any, batch: Iterable[BatchRequest], step: Advanced) -> list[int]:
    """Write the Generations of a step; returns the engine's ids of what it need not go on with.

    Raises:
        StepFailure: a request failed.
    """
    by_id = {driven.engine_id: driven for driven in batch}
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
        for engine_id, token_id, logprob, top_ids, top_logprobs in zip(
            outputs.request_ids,
            outputs.token_ids,
            outputs.logprobs,
            outputs.top_ids,
            outputs.top_logprobs,
            strict=True,
        ):
            generation = response.generations.add(request_id=by_id[engine_id].request_id)
            generations[engine_id] = generation
            reason = by_id[engine_id].push(generation, token_id, logprob, top_ids, top_logprobs)
            end = ends.get(engine_id)
            # The length counts first, then the end tokens, then stop sequences.
            if end is not None and reason is not FinishReason.LENGTH:
                reason = end.reason
            if reason is not None:
                reasons[engine_id] = reason
    for engine_id, driven in by_id.items():
        driven.pending = step.pending.get(engine_id, 0)
        if engine_id in reasons:
            driven.finish(generations[engine_id], reasons[engine_id])
    return [engine_id for engine_id in reasons if engine_id not in ends]


def write_batch(cached: Any, batch_id: int, batch: list[BatchRequest], chunk: int) -> None:
    """Describe what is left of a batch; ``chunk``: see :func:`chunk_of`."""
    cached.id = batch_id
    cached.request_ids.extend(driven.request_id for driven in batch)
    cached.size = len(batch)
    cached.max_tokens = sum(driven.max_tokens for driven in batch)
    if "current_tokens" in cached.DESCRIPTOR.fields_by_name:
        prompts = [driven.pending for driven in batch if driven.pending]
        cached.current_tokens = len(batch) - len(prompts) + min(sum(prompts), chunk)


def chunk_of(batch: Iterable[BatchRequest], max_prefill_tokens: int) -> int:
    """How many tokens of unfinished prompts the next step of a batch computes at most."""
    return max(1, max_prefill_tokens - sum(not driven.pending for driven in batch))
