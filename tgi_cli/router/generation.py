"""The one way from a request to text: tokenize, submit, detokenize, stop, account.

Every route describes what it wants as a :class:`GenerationSpec`, opens a :class:`Generation` and
iterates over its :class:`Delta` objects; what it writes to its client is its own affair.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from tgi_cli.engine.messages import FinishReason, GenerationRequest
from tgi_cli.errors import ShardError
from tgi_cli.router import errors
from tgi_cli.router.admission import Admission
from tgi_cli.router.delta import Delta, Finish, Token
from tgi_cli.router.metrics import Metrics
from tgi_cli.router.spec import GenerationSpec
from tgi_cli.router.validation import fit_length
from tgi_cli.rpc.interface import EngineClient, TokenBatch
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.detokenizer import Detokenizer
from tgi_cli.text.offload import TextWorkers
from tgi_cli.text.stop import StopBuffer

logger = logging.getLogger(__name__)

_ENDS = (FinishReason.LENGTH, FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE)


class Generator:
    """Opens generations: the face of the engine inside the router."""

    def __init__(
        self,
        client: EngineClient,
        text: TextBundle,
        workers: TextWorkers,
        metrics: Metrics,
        admission: Admission,
    ) -> None:
        self.client = client
        self.text = text
        self.metrics = metrics
        self.admission = admission
        self._workers = workers
        self.info = client.info
        self.stop_ids = frozenset(self.info.eos_token_ids)
        self.hidden_ids = text.tokenizer.special_ids | self.stop_ids
        """Ids that add nothing to the text."""
        self.live: set[Generation] = set()

    def abort(self, cause: str) -> None:
        """End all generations now; their clients are told the cause."""
        for generation in list(self.live):
            generation.abort(errors.generation_failed(cause))

    async def open(self, specs: Sequence[GenerationSpec], arrived: float) -> list[Generation]:
        """Admit, tokenize and submit prompts together: all of them, or none.

        Raises:
            ApiError: 429, 503, 422 or 424, counted already.
        """
        self.metrics.requests.add(len(specs))
        try:
            self.admission.enter(len(specs))
        except errors.ApiError as error:
            self.metrics.failures.add(len(specs), error.failure_label)
            raise
        opened: list[Generation] = []
        try:
            prepared = [await self._prepare(spec) for spec in specs]
            for index, (spec, ids, new_tokens) in enumerate(prepared):
                opened.append(Generation(self, index, spec, ids, new_tokens, arrived))
        except BaseException as error:
            for generation in opened:
                generation.close()
            for _ in range(len(specs) - len(opened)):
                self.admission.leave()
            label = error.failure_label if isinstance(error, errors.ApiError) else "dropped"
            self.metrics.failures.add(len(specs) - len(opened), label)
            raise
        return opened

    def refuse(self, error: errors.ApiError) -> errors.ApiError:
        """Count a request that was refused before it could be opened."""
        self.metrics.requests.add()
        self.metrics.failures.add(1, error.failure_label)
        return error

    async def _prepare(self, spec: GenerationSpec) -> tuple[GenerationSpec, list[int], int]:
        """The spec with its seed drawn, the prompt's ids, and how many may follow."""
        if isinstance(spec.prompt, str):
            ids = await self._workers.encode(spec.prompt, spec.add_special_tokens)
        else:
            ids = list(spec.prompt)
        if spec.truncate is not None:
            ids = ids[-spec.truncate :]
        new_tokens = fit_length(len(ids), spec.max_new_tokens, self.info)
        if spec.seed is None and not spec.sampling.greedy:
            spec = replace(spec, seed=secrets.randbits(64))
        self.metrics.input_length.observe(len(ids))
        self.metrics.max_new_tokens.observe(new_tokens)
        return spec, ids, new_tokens


class Generation:
    """One sequence on its way: an asynchronous iterator over what becomes known of it.

    Whoever opened it must close it; closing early cancels it in the engine at once.

    Attributes:
        index: place among the prompts of its request.
        prompt_tokens, cached_tokens: of the prompt; the latter known from the first delta on.
        seed: what the randomness follows from; None when greedy.
    """

    def __init__(
        self,
        generator: Generator,
        index: int,
        spec: GenerationSpec,
        prompt_ids: list[int],
        max_new_tokens: int,
        arrived: float,
    ) -> None:
        self._generator = generator
        self.index = index
        self.spec = spec
        self.prompt_ids = prompt_ids
        self.prompt_tokens = len(prompt_ids)
        self.cached_tokens = 0
        self.seed = None if spec.sampling.greedy else spec.seed
        self.generated_tokens = 0
        self.timings = Timings(arrived, time.perf_counter())
        self._max_new_tokens = max_new_tokens
        self._detokenizer = Detokenizer(generator.text.tokenizer, prompt_ids)
        self._stops = StopBuffer(spec.stops)
        self._texts: list[str] = []
        self._finish: Finish | None = None
        self._open = True
        self._aborted: errors.ApiError | None = None
        request = GenerationRequest(
            request_id=generator.client.next_request_id(),
            prompt_ids=tuple(prompt_ids),
            sampling=replace(spec.sampling, seed=self.seed or 0),
            max_new_tokens=max_new_tokens,
            stop_token_ids=generator.stop_ids,
            ignore_eos=spec.ignore_eos,
        )
        try:
            self._stream = generator.client.submit(request)
        except ShardError as error:
            raise errors.generation_failed(error.cause) from error
        self._batches = aiter(self._stream)
        generator.live.add(self)

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

    def close(self) -> None:
        """Give everything back; a sequence that still runs is cancelled."""
        if self._open:
            self._stream.cancel()
            self._leave(None)
            self._generator.metrics.failures.add(1, "dropped")
            logger.info("client gone", extra=self._log_fields())

    def abort(self, error: errors.ApiError) -> None:
        """Make whoever iterates fail with ``error``, as soon as nothing more comes."""
        self._aborted = error
        self._stream.cancel()

    def _advance(self, batch: TokenBatch) -> Delta | None:
        """Turn what the engine reports into what a client sees; None when that is nothing."""
        if batch.started is not None:
            self._start(batch.started.queue_ns, batch.started.cached_tokens)
        delta = Delta(self.index, [], [], "", None)
        if batch.token_ids:
            self._count_tokens(len(batch.token_ids))
            self._detokenize(batch, delta)
        if self._stops.hit is not None:
            if batch.finished is None:
                self._stream.cancel()
            # TGI checks the length before the stop strings.
            at_limit = self.spec.keep_stop and self.generated_tokens >= self._max_new_tokens
            reason = FinishReason.LENGTH if at_limit else FinishReason.STOP_SEQUENCE
            delta.finish = self._succeed(reason, self._stops.hit if self.spec.keep_stop else "")
        elif batch.finished is not None:
            reason = batch.finished.reason
            if reason not in _ENDS or not self.generated_tokens:
                raise self._fail(self._failure(reason, batch.finished.error))
            rest = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
            if rest:
                self._texts.append(rest)
                delta.text += rest
            delta.finish = self._succeed(reason, "")
        elif not batch.token_ids:
            return None
        return delta

    def _failure(self, reason: FinishReason, cause: str) -> errors.ApiError:
        """The answer to a generation that did not come to an end of its own."""
        if reason is FinishReason.OVERLOADED:
            return self._generator.admission.overloaded()
        if reason in (FinishReason.ERROR, FinishReason.TIMEOUT):
            return errors.generation_failed(cause or "the model server failed")
        return errors.incomplete()

    def _detokenize(self, batch: TokenBatch, delta: Delta) -> None:
        """Append the batch's tokens to the delta, up to the one that completes a stop string."""
        tokenizer = self._generator.text.tokenizer
        hidden = self._generator.hidden_ids
        stops = self._stops if self.spec.stops else None
        texts: list[str] = []
        for place, token_id in enumerate(batch.token_ids):
            self.generated_tokens += 1
            special = token_id in hidden
            text = "" if special else self._detokenizer.push(token_id)
            delta.tokens.append(
                Token(
                    token_id,
                    tokenizer.surface(token_id) if special else text,
                    _shortest(batch.logprobs[place]),
                    special,
                )
            )
            if batch.top_ids and self.spec.sampling.top_logprobs:
                delta.top_tokens.append(
                    [
                        Token(index, tokenizer.surface(index), _shortest(value), index in hidden)
                        for index, value in zip(
                            batch.top_ids[place], batch.top_logprobs[place], strict=True
                        )
                    ]
                )
            if stops is None:
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

    def _succeed(self, reason: FinishReason, stop: str) -> Finish:
        self._finish = Finish(reason, "".join(self._texts) + stop, self.generated_tokens)
        timings = self.timings
        timings.finished = time.perf_counter()
        metrics = self._generator.metrics
        metrics.successes.add()
        metrics.duration.observe(timings.total)
        metrics.validation_duration.observe(timings.validation)
        metrics.inference_duration.observe(timings.inference)
        metrics.mean_token_duration.observe(timings.inference / self.generated_tokens)
        metrics.generated_tokens.observe(self.generated_tokens)
        self._leave(timings.total)
        fields = self._log_fields()
        logger.info("success", extra=fields | {"finish_reason": reason.name.lower()})
        return self._finish

    def _fail(self, error: errors.ApiError) -> errors.ApiError:
        if self._open:
            self._stream.cancel()
            self._leave(None)
            self._generator.metrics.failures.add(1, error.failure_label)
            logger.error(error.message, extra=self._log_fields())
        return error

    def _leave(self, seconds: float | None) -> None:
        self._open = False
        self._generator.live.discard(self)
        self._generator.admission.leave(seconds)

    def _log_fields(self) -> dict[str, object]:
        """One line per request; never its text."""
        timings = self.timings
        end = timings.finished or time.perf_counter()
        return {
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "total_ms": round((end - timings.arrived) * 1e3, 1),
            "queue_ms": round(timings.queue * 1e3, 1),
            "ttft_ms": round(max(timings.first_token - timings.arrived, 0.0) * 1e3, 1),
        }


class Timings:
    """When things happened to one request: seconds, from ``time.perf_counter()``."""

    __slots__ = ("arrived", "finished", "first_token", "last_token", "queue", "submitted")

    def __init__(self, arrived: float, submitted: float) -> None:
        self.arrived = arrived
        self.submitted = submitted
        self.queue = 0.0
        self.first_token = 0.0
        self.last_token = 0.0
        self.finished = 0.0

    @property
    def total(self) -> float:
        """Arrival to the last token."""
        return self.finished - self.arrived

    @property
    def validation(self) -> float:
        """Arrival to the engine's queue."""
        return self.submitted - self.arrived

    @property
    def inference(self) -> float:
        """First step to the last token."""
        return max(self.total - self.validation - self.queue, 0.0)


def _shortest(value: float) -> float:
    """A 32-bit float without the digits that 64 bits add: -0.1, not -0.10000000149011612."""
    return float(f"{value:.7g}")
