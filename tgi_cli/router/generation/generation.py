"""The one way from a request to text: submit, detokenize, stop, account.

Every route describes what it wants as a :class:`GenerationSpec`, lets the generator open a
:class:`Generation` for each sequence and iterates over their :class:`Delta` objects; what it
writes to its client is its own affair.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tgi_cli.engine.messages import FinishReason, GenerationRequest
from tgi_cli.errors import ShardError
from tgi_cli.router.generation import structured_output
from tgi_cli.router.generation.deltas import Delta, Finish, Token
from tgi_cli.router.generation.prompt_logprobs import PromptLogprobTable, shortest
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.generation.timings import Timings
from tgi_cli.router.http import errors
from tgi_cli.router.observability import access_log
from tgi_cli.rpc.interface import TokenBatch
from tgi_cli.sampling.seeds import sample_seed
from tgi_cli.text.detokenizer import Detokenizer
from tgi_cli.text.grammar.grammar import GrammarError
from tgi_cli.text.stop import StopBuffer

if TYPE_CHECKING:
    from tgi_cli.router.generation.generator import Generator

_ENDS = (FinishReason.LENGTH, FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine: its ids, how many may follow, the seed (None: greedy), and
    the grammar of what follows (None: it may be anything)."""

    spec: GenerationSpec
    ids: list[int]
    max_new_tokens: int
    seed: int | None
    grammar: str | None = None

    def seed_of(self, sample: int) -> int | None:
        """The seed of one of its samples; the first has the prompt's own."""
        return None if self.seed is None else sample_seed(self.seed, sample)


class Generation:
    """One sequence on its way: an asynchronous iterator over what becomes known of it.

    Whoever opened it must close it; closing early cancels it in the engine at once.

    Attributes:
        index: place among the sequences of its request.
        lead: the first sample of the same prompt, perhaps itself.
        prompt_ids, prompt_tokens: of the prompt.
        cached_tokens: of these, found in the prefix cache; known from the first delta on.
        prompt_scores: log-probabilities of the prompt, if asked for; complete in the lead before
            its first delta.
        seed: what the randomness follows from; None when greedy.
        generated_tokens, logprob_sum: of the tokens so far.
    """

    def __init__(
        self,
        generator: Generator,
        index: int,
        prompt: Prompt,
        sample: int,
        lead: Generation | None,
        arrived: float,
        timeout_seconds: float | None,
    ) -> None:
        self._generator = generator
        self.index = index
        self.spec = spec = prompt.spec
        self.lead = lead or self
        self.prompt_ids = prompt.ids
        self.prompt_tokens = len(prompt.ids)
        self.cached_tokens = 0
        self.prompt_scores: PromptLogprobTable = (
            PromptLogprobTable() if lead is None else lead.prompt_scores
        )
        self.seed = prompt.seed_of(sample)
        self.generated_tokens = 0
        self.logprob_sum = 0.0
        self.timings = Timings(arrived, time.perf_counter())
        self._max_new_tokens = prompt.max_new_tokens
        self._timeout_seconds = timeout_seconds
        self._hidden = generator.hidden_ids
        if spec.stop_token_ids:
            self._hidden |= spec.stop_token_ids
        self._detokenizer = Detokenizer(generator.text.tokenizer, prompt.ids)
        self._stops = StopBuffer(spec.stops)
        self._texts: list[str] = []
        self._finish: Finish | None = None
        self._open = True
        self._aborted: errors.ApiError | None = None
        left = None
        if timeout_seconds is not None:
            left = timeout_seconds - self.timings.validation
            if left <= 0:
                raise self._timed_out()
        self.request_id = generator.client.next_request_id()
        # A client that ignores the end tokens still wants its own stop ids.
        only_own = spec.ignore_eos and bool(spec.stop_token_ids)
        ends = spec.stop_token_ids if only_own else generator.stop_ids | spec.stop_token_ids
        request = GenerationRequest(
            request_id=self.request_id,
            prompt_ids=tuple(prompt.ids),
            sampling=replace(spec.sampling, seed=self.seed or 0),
            max_new_tokens=prompt.max_new_tokens,
            stop_token_ids=ends,
            ignore_eos=spec.ignore_eos and not only_own,
            priority=spec.priority,
            cache_salt=spec.cache_salt,
            timeout_seconds=left,
            fork_of=None if lead is None else lead.request_id,
            grammar=prompt.grammar,
            # A fork's prompt is not computed, and its scores are those of the lead.
            prompt_logprobs=spec.prompt_logprobs if lead is None else None,
        )
        try:
            self._stream = generator.client.submit(request, spec.adapter)
        except ShardError as error:
            raise errors.engine_gone(error.cause) from error
        self._batches = aiter(self._stream)
        generator.live.add(self)
        self._record = access_log.record()
        if self._record is not None:
            self._record.generations.append(self)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta:
        """The next delta; the last one carries ``finish``. Raises ApiError when it fails."""
        if self._finish is not None:
            raise StopAsyncIteration
        try:
            while True:
                delta = self._advance(await anext(self._batches))
                if delta is not None:
                    return delta
        except StopAsyncIteration:
            raise self._fail(self._aborted or errors.incomplete()) from None
        except ShardError as error:
            raise self._fail(errors.generation_failed(error.cause)) from error

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it ended; None: not yet, or not well."""
        return None if self._finish is None else self._finish.reason

    @property
    def started(self) -> bool:
        """Whether it has left the engine's queue."""
        return self.timings.queue > 0

    @property
    def mean_logprob(self) -> float:
        """What the best of several samples is the best by."""
        return self.logprob_sum / max(self.generated_tokens, 1)

    def close(self) -> None:
        """Give everything back; a sequence that still runs is cancelled."""
        if self._open:
            self._stream.cancel()
            self._leave(None)
            self._generator.metrics.failures.add(1, "dropped")
            if self._record is not None:
                self._record.dropped = True

    def abort(self, error: errors.ApiError) -> None:
        """Make whoever iterates fail with ``error``, as soon as nothing more comes."""
        self._aborted = error
        self._stream.cancel()

    def _advance(self, batch: TokenBatch) -> Delta | None:
        """Turn what the engine reports into what a client sees; None when that is nothing."""
        if batch.started is not None:
            self._start(batch.started.queue_ns, batch.started.cached_tokens)
        for run in batch.prompt_logprobs:
            self.prompt_scores.take(run)
        delta = Delta(self.index, [], [], "", None)
        if batch.token_ids:
            self._count_tokens(len(batch.token_ids))
            if not self.spec.prompt_only:
                self._detokenize(batch, delta)
        if self._stops.hit is not None:
            if batch.finished is None:
                self._stream.cancel()
            at_limit = self.spec.length_first and self.generated_tokens >= self._max_new_tokens
            reason = FinishReason.LENGTH if at_limit else FinishReason.STOP_SEQUENCE
            if self.spec.keep_stop:
                self._texts.append(self._stops.hit)
                delta.text += self._stops.hit
            delta.finish = self._succeed(reason)
        elif batch.finished is not None:
            reason = batch.finished.reason
            if reason not in _ENDS or not self.timings.first_token:
                raise self._fail(self._failure(reason, batch.finished.error))
            rest = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
            if rest:
                self._texts.append(rest)
                delta.text += rest
            delta.finish = self._succeed(FinishReason.LENGTH if self.spec.prompt_only else reason)
        elif not batch.token_ids:
            return None
        return delta

    def _failure(self, reason: FinishReason, cause: str) -> errors.ApiError:
        """The answer to a generation that did not come to an end of its own."""
        if reason is FinishReason.OVERLOADED:
            return self._generator.admission.overloaded()
        if reason is FinishReason.TIMEOUT:
            return self._timed_out()
        if reason is FinishReason.GRAMMAR and self.spec.grammar is not None:
            return structured_output.not_valid(GrammarError(cause), self.spec.grammar.param)
        if reason in (FinishReason.ERROR, FinishReason.GRAMMAR):
            return errors.generation_failed(cause or "the model server failed")
        return errors.incomplete()

    def _timed_out(self) -> errors.ApiError:
        """In the client's own number: the engine had what validation left of it."""
        return errors.timed_out(f"not done within {self._timeout_seconds or 0:g} s")

    def _detokenize(self, batch: TokenBatch, delta: Delta) -> None:
        """Append the batch's tokens to the delta, up to the one that completes a stop string."""
        tokenizer = self._generator.text.tokenizer
        hidden = self._hidden
        stops = self._stops if self.spec.stops else None
        texts: list[str] = []
        for place, token_id in enumerate(batch.token_ids):
            self.generated_tokens += 1
            self.logprob_sum += batch.logprobs[place]
            special = token_id in hidden
            if not special:
                text = self._detokenizer.push(token_id)
            else:
                text = tokenizer.surface(token_id) if token_id in self.spec.shown_ids else ""
            delta.tokens.append(
                Token(
                    token_id,
                    tokenizer.surface(token_id) if special else text,
                    shortest(batch.logprobs[place]),
                    special,
                )
            )
            if batch.top_ids and self.spec.sampling.top_logprobs:
                delta.top_tokens.append(
                    [
                        Token(index, tokenizer.surface(index), shortest(value), index in hidden)
                        for index, value in zip(
                            batch.top_ids[place], batch.top_logprobs[place], strict=True
                        )
                    ]
                )
            if stops is None or self.generated_tokens <= self.spec.sampling.min_new_tokens:
                texts.append(text)
            else:
                texts.append(stops.push(text))
                if stops.hit is not None:
                    break
        delta.text = texts[0] if len(texts) == 1 else "".join(texts)
        if delta.text:
            self._texts.append(delta.text)

    def _start(self, queue_ns: int, cached_tokens: int) -> None:
        self.timings.queue = queue_ns / 1e9
        self.cached_tokens = cached_tokens
        self._generator.metrics.queue_duration.observe(self.timings.queue)
        if self.lead is self:
            self._generator.metrics.cached_tokens.add(cached_tokens)

    def _count_tokens(self, count: int) -> None:
        now = time.perf_counter()
        timings = self.timings
        if not timings.first_token:
            timings.first_token = now
            self._generator.metrics.first_token.observe(now - timings.arrived)
            count -= 1
            if count:
                self._generator.metrics.inter_token.observe(0.0, count)
        else:
            self._generator.metrics.inter_token.observe((now - timings.last_token) / count, count)
        timings.last_token = now

    def _succeed(self, reason: FinishReason) -> Finish:
        self._finish = Finish(reason, "".join(self._texts), self.generated_tokens)
        timings = self.timings
        timings.finished = time.perf_counter()
        metrics = self._generator.metrics
        metrics.successes.add()
        metrics.duration.observe(timings.total)
        metrics.validation_duration.observe(timings.validation)
        metrics.inference_duration.observe(timings.inference)
        metrics.mean_token_duration.observe(timings.inference / max(self.generated_tokens, 1))
        metrics.generated_tokens.observe(self.generated_tokens)
        self._leave(timings.total)
        return self._finish

    def _fail(self, error: errors.ApiError) -> errors.ApiError:
        if self._open:
            self._stream.cancel()
            self._leave(None)
            self._generator.metrics.failures.add(1, error.failure_label)
            if self._record is not None and self._record.error is None:
                self._record.error = error
        return error

    def _leave(self, seconds: float | None) -> None:
        self._open = False
        self._generator.live.discard(self)
        self._generator.admission.leave(seconds)
