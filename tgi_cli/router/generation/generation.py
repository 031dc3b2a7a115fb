"""One sequence from its submission to its end: batches of tokens in, deltas of text out.

Routes describe a prompt as a :class:`GenerationSpec`, let the generator open a
:class:`Generation` for each sequence and iterate over its :class:`Delta` objects.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace

from tgi_cli.engine.messages import FinishReason, GenerationRequest
from tgi_cli.errors import ShardError
from tgi_cli.router.generation import structured_output
from tgi_cli.router.generation.deltas import Delta, Finish, Token
from tgi_cli.router.generation.draft_counts import DraftCounts
from tgi_cli.router.generation.prompt_logprobs import shortest
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.generation.timings import Timings
from tgi_cli.router.http import errors
from tgi_cli.router.http.admission import ConcurrencyLimiter
from tgi_cli.router.observability import access_log
from tgi_cli.router.observability.metrics import Metrics
from tgi_cli.rpc.interface import EngineClient, TokenBatch
from tgi_cli.text.grammar.grammar import GrammarError
from tgi_cli.text.reasoning import ReasoningCounter
from tgi_cli.text.sequence_text import CutAt, PromptLogprobTable, SequenceText
from tgi_cli.text.tokenizer import Tokenizer

_ENDS = (FinishReason.LENGTH, FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE)


@dataclass(slots=True)
class GenerationContext:
    """What the generations of a router share.

    Attributes:
        hidden_ids: Tokens that add nothing to the text: special tokens and the model's stop ids.
        live: Generations that are open.
    """

    client: EngineClient
    tokenizer: Tokenizer
    metrics: Metrics
    admission: ConcurrencyLimiter
    hidden_ids: frozenset[int] = frozenset()
    live: set[Generation] = field(default_factory=set)


class Generation:
    """One sequence in the engine: an asynchronous iterator over its deltas.

    The caller that opened it must close it; closing early cancels it in the engine at once.

    Attributes:
        index: Number among the sequences of its HTTP request.
        lead: The first sample of the same prompt, or the generation itself.
        prompt_ids: Token ids of the prompt.
        cached_tokens: Prompt tokens found in the prefix cache; known from the first delta on.
        prompt_scores: Log-probabilities of the prompt, if requested; complete in the lead before
            its first delta.
        seed: Seed of the random numbers, or None if greedy.
        logprob_sum: Sum of the log-probabilities of the tokens so far.
        drafts: Its draft tokens so far (speculative decoding).

    Raises:
        ApiError: The time is up, or the engine is unavailable.
    """

    def __init__(
        self,
        context: GenerationContext,
        index: int,
        spec: GenerationSpec,
        request: GenerationRequest,
        lead: Generation | None,
        arrived: float,
        timeout_seconds: float | None,
    ) -> None:
        self._context = context
        self.index = index
        self.spec = spec
        self.lead = lead or self
        self.prompt_ids = request.prompt_ids
        self.cached_tokens = 0
        self.prompt_scores: PromptLogprobTable = (
            PromptLogprobTable() if lead is None else lead.prompt_scores
        )
        self.seed = None if spec.sampling.greedy else request.sampling.seed
        self.logprob_sum = 0.0
        self.drafts = DraftCounts()
        self.timings = Timings(arrived, time.perf_counter())
        self._timeout_seconds = timeout_seconds
        self._with_tops = spec.sampling.top_logprobs > 0
        self._hidden_ids = context.hidden_ids
        if spec.stop_token_ids:
            self._hidden_ids |= spec.stop_token_ids
        self._text = SequenceText(
            context.tokenizer,
            context.client.info.decoder_start_ids or request.prompt_ids,
            spec.stops,
            hidden_ids=self._hidden_ids,
            shown_ids=spec.shown_ids,
            cut_at=CutAt.AFTER_STOP if spec.keep_stop else CutAt.BEFORE_STOP,
            min_tokens=spec.sampling.min_new_tokens,
            length_first=request.max_new_tokens if spec.length_first else None,
        )
        self._reasoning = (
            None if spec.reasoning is None else ReasoningCounter(spec.reasoning, spec.is_reasoning)
        )
        self._finish: Finish | None = None
        self._open = True
        self._aborted: errors.ApiError | None = None
        if timeout_seconds is not None:
            left = timeout_seconds - self.timings.validation
            if left <= 0:
                raise self._timed_out()
            request = replace(request, timeout_seconds=left)
        self.request_id = request.request_id
        try:
            self._stream = context.client.submit(request, spec.adapter, spec.session)
        except ShardError as error:
            raise errors.engine_gone(error.cause) from error
        self._batches = aiter(self._stream)
        self._parts: deque[TokenBatch] = deque()
        """The rest of a batch that is read token by token."""
        context.live.add(self)
        self._record = access_log.record()
        self._trace_id = ""
        """Id of the sampled trace that its observations link to as exemplars, or empty."""
        if self._record is not None:
            self._trace_id = self._record.sampled_trace
            self._record.generations.append(self)
            self._record.running += 1

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        """The next delta; the last one carries ``finish``. Raises ApiError if it fails."""
        if self._finish is not None:
            raise StopAsyncIteration
        try:
            while True:
                if self._parts:
                    batch = self._parts.popleft()
                else:
                    batch = self._receive(await anext(self._batches))
                delta = self._advance(batch)
                if delta is not None:
                    return delta
        except StopAsyncIteration:
            raise self._fail(self._aborted or errors.incomplete()) from None
        except ShardError as error:
            raise self._fail(errors.generation_failed(error.cause)) from error

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_ids)

    @property
    def generated_tokens(self) -> int:
        """Number of generated tokens so far."""
        return self._text.num_tokens

    @property
    def reasoning_tokens(self) -> int:
        """Number of those that are reasoning, without its markers."""
        return 0 if self._reasoning is None else self._reasoning.tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, or None if it has not, or failed."""
        return None if self._finish is None else self._finish.reason

    @property
    def started(self) -> bool:
        """Whether it has left the engine's queue."""
        return self.timings.queue > 0

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per token, by which the best of several samples is chosen."""
        return self.logprob_sum / max(self.generated_tokens, 1)

    def close(self) -> None:
        """Release everything; a sequence that still runs is cancelled."""
        if self._open:
            self._stream.cancel()
            self._context.metrics.failures.add(1, "dropped")
            if self._record is not None:
                self._record.dropped = True
            self._leave(None)

    def abort(self, error: errors.ApiError) -> None:
        """Cancel the sequence; iterating raises ``error`` once all deltas are read."""
        self._aborted = error
        self._stream.cancel()

    def _receive(self, batch: TokenBatch) -> TokenBatch:
        """Record what a batch from the engine reports; returns what to read of it now.

        If a step has given several tokens because drafts were accepted, each is read by itself, so
        that streams have as many events as without drafts. Others have accumulated while the
        reader was busy, and are read together.
        """
        if batch.started is not None:
            self._start(batch.started.queue_ns, batch.started.cached_tokens)
        for run in batch.prompt_logprobs:
            self.prompt_scores.take(run)
        count = len(batch.token_ids)
        if count:
            self._count_tokens(count)
        if not batch.drafts:
            return batch
        self.drafts.take(batch.drafts)
        if len(batch.drafts) > 1 or not 1 < count <= batch.drafts[0].accepted + 1:
            return batch
        self._parts.extend(
            TokenBatch(
                [batch.token_ids[index]],
                [batch.logprobs[index]],
                batch.top_ids[index : index + 1],
                batch.top_logprobs[index : index + 1],
            )
            for index in range(count)
        )
        self._parts[-1].finished = batch.finished
        return self._parts.popleft()

    def _advance(self, batch: TokenBatch) -> Delta | None:
        """The delta of a batch, or None if there is nothing to show."""
        text = self._text
        delta = Delta(self.index, [], [], "", None)
        if batch.token_ids and not self.spec.prompt_only:
            self._push_tokens(batch, delta)
        if text.finish_reason is not None:
            if batch.finished is None:
                self._stream.cancel()
            if self._parts or batch.drafts:
                self.drafts.drop(len(batch.token_ids) - len(delta.tokens) + len(self._parts))
            delta.finish = self._succeed(text.finish_reason)
        elif batch.finished is not None:
            reason = batch.finished.reason
            if reason not in _ENDS or not self.timings.first_token:
                raise self._fail(self._failure(reason, batch.finished.error))
            text.finish(reason)
            delta.text += text.take()
            delta.finish = self._succeed(FinishReason.LENGTH if self.spec.prompt_only else reason)
        elif not batch.token_ids:
            return None
        return delta

    def _failure(self, reason: FinishReason, cause: str) -> errors.ApiError:
        """The error for a sequence that the engine ended early."""
        if reason is FinishReason.OVERLOADED:
            return self._context.admission.overloaded()
        if reason is FinishReason.TIMEOUT:
            return self._timed_out()
        if reason is FinishReason.GRAMMAR and self.spec.grammar is not None:
            return structured_output.invalid_grammar(GrammarError(cause), self.spec.grammar.param)
        if reason in (FinishReason.ERROR, FinishReason.GRAMMAR):
            return errors.generation_failed(cause or "the model server failed")
        return errors.incomplete()

    def _timed_out(self) -> errors.ApiError:
        """Names the client's own timeout; the engine had what validation left of it."""
        return errors.timed_out(f"not done within {self._timeout_seconds or 0:g} s")

    def _push_tokens(self, batch: TokenBatch, delta: Delta) -> None:
        """Append the batch's tokens to the delta, up to the one that completes a stop string."""
        text, hidden, tokens = self._text, self._hidden_ids, delta.tokens
        reasoning = self._reasoning
        with_tops = batch.top_ids and self._with_tops
        for index, token_id in enumerate(batch.token_ids):
            logprob = batch.logprobs[index]
            self.logprob_sum += logprob
            own_text = text.push(token_id)
            tokens.append(Token(token_id, own_text, shortest(logprob), token_id in hidden))
            if reasoning is not None:
                reasoning.push(own_text)
            if with_tops:
                surface = self._context.tokenizer.surface
                delta.top_tokens.append(
                    [
                        Token(top_id, surface(top_id), shortest(value), top_id in hidden)
                        for top_id, value in zip(
                            batch.top_ids[index], batch.top_logprobs[index], strict=True
                        )
                    ]
                )
            if text.finish_reason is not None:
                break
        if self.spec.line_seconds is not None and text.finish_reason is None:
            since = time.perf_counter() - self.timings.first_token
            if since > self.spec.line_seconds and "\n" in text.text:
                text.finish(FinishReason.LENGTH)
        delta.text = text.take()

    def _start(self, queue_ns: int, cached_tokens: int) -> None:
        self.timings.queue = queue_ns / 1e9
        self.cached_tokens = cached_tokens
        self._context.metrics.queue_duration.observe(self.timings.queue, 1, self._trace_id)
        if self.lead is self:
            self._context.metrics.cached_tokens.add(cached_tokens)

    def _count_tokens(self, count: int) -> None:
        now = time.perf_counter()
        timings = self.timings
        if not timings.first_token:
            timings.first_token = now
            self._context.metrics.first_token.observe(now - timings.arrived, 1, self._trace_id)
            count -= 1
            if count:
                self._context.metrics.inter_token.observe(0.0, count)
        else:
            gap = (now - timings.last_token) / count
            self._context.metrics.inter_token.observe(gap, count, self._trace_id)
        timings.last_token = now

    def _succeed(self, reason: FinishReason) -> Finish:
        self._finish = Finish(reason, self._text.text, self.generated_tokens, self._text.stop)
        timings = self.timings
        timings.finished = time.perf_counter()
        metrics = self._context.metrics
        metrics.successes.add()
        for metric, value in (
            (metrics.duration, timings.total),
            (metrics.validation_duration, timings.validation),
            (metrics.inference_duration, timings.inference),
            (metrics.mean_token_duration, timings.inference / max(self.generated_tokens, 1)),
            (metrics.generated_tokens, self.generated_tokens),
        ):
            metric.observe(value, 1, self._trace_id)
        self._leave(timings.total)
        return self._finish

    def _fail(self, error: errors.ApiError) -> errors.ApiError:
        if self._open:
            self._stream.cancel()
            self._context.metrics.failures.add(1, error.failure_label)
            if self._record is not None and self._record.error is None:
                self._record.error = error
            self._leave(None)
        return error

    def _leave(self, seconds: float | None) -> None:
        self._open = False
        self._context.live.discard(self)
        self._context.admission.leave(seconds)
        record = self._record
        if record is not None:
            record.running -= 1
            if not record.running and record.span is not None:
                record.span.sequences_ended()
