"""From the prompts of an HTTP request to running generations."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from tgi_cli.engine.messages import EngineInfo, GenerationRequest, ImageInput
from tgi_cli.errors import ModelError
from tgi_cli.process.worker_pool import WorkerError, WorkersBusy
from tgi_cli.router.engine_sleep import EngineSleep
from tgi_cli.router.generation import structured_output
from tgi_cli.router.generation.generation import Generation, GenerationContext
from tgi_cli.router.generation.prompt_images import PromptImageLoader
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.generation.validation import fit_length
from tgi_cli.router.http import errors
from tgi_cli.router.http.admission import ConcurrencyLimiter
from tgi_cli.router.observability import access_log
from tgi_cli.router.observability.metrics import Metrics
from tgi_cli.rpc.interface import GONE, EngineClient
from tgi_cli.telemetry.context import TraceContext
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.fill_in_middle import PromptParts
from tgi_cli.text.grammar.checker import GrammarChecker
from tgi_cli.text.grammar.grammar import Grammar, GrammarError
from tgi_cli.text.languages import LanguageError, Languages, Translation
from tgi_cli.text.windowed_encoding import is_long
from tgi_cli.text.workers import TextWorkers
from tgi_cli.vision.load import TEXT_ONLY, Vision
from tgi_cli.vision.prompts import PromptTooLongError


class _AtLeast(int):
    """Number of tokens of a prompt whose encoding stopped at the limit: it has more."""

    def __str__(self) -> str:
        return f"at least {int(self)}"


class Generator:
    """Admits, tokenizes and submits prompts.

    Args:
        sleep: Has requests wait for an engine that sleeps.
        grammars: Compiles grammars. Default: requests with one are refused.
        vision: Reads the images of prompts. Default: those with images are refused.
    """

    def __init__(
        self,
        client: EngineClient,
        text: TextBundle,
        workers: TextWorkers,
        metrics: Metrics,
        admission: ConcurrencyLimiter,
        sleep: EngineSleep,
        grammars: GrammarChecker | None = None,
        vision: Vision = TEXT_ONLY,
    ) -> None:
        self.client = client
        self.text = text
        self.metrics = metrics
        self.admission = admission
        self.sleep = sleep
        self.grammars = grammars
        self.images = PromptImageLoader(text, workers, admission, vision)
        self._workers = workers
        self._languages = Languages(text.tokenizer)
        self._context = GenerationContext(client, text.tokenizer, metrics, admission)
        self.live = self._context.live
        self.take(client.info)

    def take(self, info: EngineInfo) -> None:
        """Use the limits and the stop ids of another engine from now on."""
        self.info = info
        self.stop_ids = frozenset(info.eos_token_ids)
        self._context.hidden_ids = self.text.tokenizer.special_ids | self.stop_ids

    def abort(self, cause: str) -> None:
        """End all generations now with an error, also those that wait for a sleeping engine."""
        self.sleep.fail_waiting(cause)
        self.abort_running(cause)

    def abort_running(self, cause: str) -> None:
        """End the generations that the engine has."""
        for generation in list(self.live):
            generation.abort(errors.generation_failed(cause))

    async def open(
        self,
        specs: Sequence[GenerationSpec],
        arrived: float,
        timeout_seconds: float | None = None,
    ) -> list[Generation]:
        """Admit, tokenize and submit prompts together: all samples of all, or none.

        The samples of the first prompt come first; each counts toward the concurrency limit.
        ``timeout_seconds`` counts from ``arrived``.

        Raises:
            ApiError: 429, 503, 422, 424 or 504; already counted.
        """
        count = sum(spec.samples for spec in specs)
        self.metrics.requests.add(count)
        try:
            self.fit(count)
            if self.sleep.awake and not self.client.connected:
                raise errors.engine_gone(GONE)
            self.admission.enter(count)
        except errors.ApiError as error:
            self.metrics.failures.add(count, error.failure_label)
            access_log.note(error)
            raise
        opened: list[Generation] = []
        try:
            info = self.info
            requests = [
                (spec, await self._prepare(spec)) for spec in await self._with_bad_words(specs)
            ]
            if not self.sleep.awake:
                adapters = {spec.adapter for spec in specs} - {""}
                left = None
                if timeout_seconds is not None:
                    left = max(0.0, timeout_seconds - (time.perf_counter() - arrived))
                await self.sleep.ready(count, adapters, left)
            if self.info is not info:  # the engine restarted meanwhile, perhaps with less memory
                requests = [(spec, self._again(spec, made)) for spec, made in requests]
            trace = _trace_context()
            for spec, prepared in requests:
                request = replace(prepared, trace=trace) if trace is not None else prepared
                lead: Generation | None = None
                for sample in range(spec.samples):
                    if sample:
                        each = request.fork(self.client.next_request_id(), sample)
                    else:
                        each = request
                    generation = Generation(
                        self._context, len(opened), spec, each, lead, arrived, timeout_seconds
                    )
                    opened.append(generation)
                    lead = lead or generation
        except BaseException as error:
            for generation in opened:
                generation.close()
            for _ in range(count - len(opened)):
                self.admission.leave()
            label = "dropped"
            if isinstance(error, errors.ApiError):
                label = error.failure_label
                access_log.note(error)
            self.metrics.failures.add(count - len(opened), label)
            raise
        return opened

    def refuse(self, error: errors.ApiError) -> errors.ApiError:
        """Count a request that was refused before it was opened. Returns its error."""
        self.metrics.requests.add()
        self.metrics.failures.add(1, error.failure_label)
        access_log.note(error)
        return error

    def fit(self, count: int) -> None:
        """Refuse more sequences than may ever run at once. Raises ApiError."""
        if count > self.admission.limit:
            raise errors.validation(
                f"{count} sequences in one request (prompts x `n` or `best_of`) are more than "
                f"the {self.admission.limit} that run at once",
                "n",
            )

    async def _with_bad_words(self, specs: Sequence[GenerationSpec]) -> list[GenerationSpec]:
        """The specs with the token ids of their bad words, each tokenized once."""
        found: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {(): ()}
        for words in {spec.bad_words for spec in specs} - found.keys():
            try:
                ids = await self._workers.word_ids(words)
            except ModelError as error:
                raise errors.tokenizer(error.cause, "bad_words") from error
            # Ids beyond the vocabulary cannot be generated anyway.
            found[words] = tuple(word for word in ids if max(word) < self.info.vocab_size)
        return [
            replace(spec, sampling=replace(spec.sampling, bad_words=found[spec.bad_words]))
            if spec.bad_words
            else spec
            for spec in specs
        ]

    async def _prepare(self, spec: GenerationSpec) -> GenerationRequest:
        """The engine's request for the first sample of a prompt. Raises ApiError."""
        images: tuple[ImageInput, ...] = ()
        if spec.images:
            ids, count, images = await self._with_images(spec)
        elif isinstance(spec.prompt, str):
            most = self.info.max_input_tokens if spec.truncate is None else None
            try:
                ids = await self._workers.encode(
                    spec.prompt, spec.add_special_tokens, most, spec.truncate
                )
            except ModelError as error:
                raise errors.tokenizer(error.cause, spec.prompt_param) from error
            count = len(ids)
            if most is not None and count > most and is_long(spec.prompt):
                count = _AtLeast(count)
        elif isinstance(spec.prompt, PromptParts):
            try:
                most = self.info.max_input_tokens
                ids = await self._workers.encode_parts(spec.prompt, most)
            except ModelError as error:
                raise errors.tokenizer(error.cause, spec.prompt_param) from error
            count = _AtLeast(len(ids)) if len(ids) > most else len(ids)
        else:
            ids = list(spec.prompt)
            if spec.truncate is not None:
                ids = ids[-spec.truncate :]
            count = len(ids)
        self._max_new_tokens(count, spec)  # before the grammar, which costs more
        if spec.translation is not None:
            ids = self._with_languages(ids, spec.translation)
        grammar = None if spec.grammar is None else await self._compile(spec.grammar)
        prediction = await self._predicted(spec.prediction) if spec.prediction else ()
        request = self._request(spec, tuple(ids), images, grammar, prediction)
        self.metrics.input_length.observe(len(ids))
        self.metrics.max_new_tokens.observe(request.max_new_tokens, spec.samples)
        return request

    async def _with_images(
        self, spec: GenerationSpec
    ) -> tuple[list[int], int, tuple[ImageInput, ...]]:
        """The token ids of a prompt with images, their number, and the images. Raises ApiError."""
        try:
            prompt = await self.images.encode(spec, self.info.max_input_tokens)
        except PromptTooLongError as error:
            return [], _AtLeast(error.tokens), ()  # to be refused for its length
        except ModelError as error:
            raise errors.tokenizer(error.cause, spec.prompt_param) from error
        return prompt.ids, len(prompt.ids), prompt.images

    def _with_languages(self, ids: Sequence[int], translation: Translation) -> list[int]:
        """The token ids of a prompt with the languages of a translation. Raises ApiError."""
        try:
            return self._languages.prompt(ids, translation)
        except LanguageError as error:
            raise errors.validation(str(error), error.param) from error

    def _first_id(self, translation: Translation | None) -> int | None:
        """The token that an answer begins with, or None for the model's own. Raises ApiError."""
        if translation is None:
            return None
        try:
            return self._languages.first_id(translation, self.info.decoder_start_ids)
        except LanguageError as error:
            raise errors.validation(str(error), error.param) from error

    async def _predicted(self, text: str) -> tuple[int, ...]:
        """The token ids of a prediction, as many as an answer may have. Raises ApiError."""
        most = self.info.max_total_tokens
        try:
            ids = await self._workers.encode(text, add_special_tokens=False, most=most)
        except ModelError as error:
            raise errors.tokenizer(error.cause, "prediction") from error
        # Ids beyond the vocabulary cannot be generated anyway.
        return tuple(token_id for token_id in ids[:most] if token_id < self.info.vocab_size)

    def _request(
        self,
        spec: GenerationSpec,
        prompt_ids: tuple[int, ...],
        images: tuple[ImageInput, ...],
        grammar: str | None,
        prediction: tuple[int, ...],
    ) -> GenerationRequest:
        sampling = spec.sampling
        if not sampling.greedy:
            seed = secrets.randbits(64) if spec.seed is None else spec.seed
            sampling = replace(sampling, seed=seed)
        # A client that ignores the end tokens still wants its own stop ids.
        only_own = spec.ignore_eos and bool(spec.stop_token_ids)
        return GenerationRequest(
            request_id=self.client.next_request_id(),
            prompt_ids=prompt_ids,
            sampling=sampling,
            max_new_tokens=self._max_new_tokens(len(prompt_ids), spec),
            stop_token_ids=spec.stop_token_ids if only_own else self.stop_ids | spec.stop_token_ids,
            ignore_eos=spec.ignore_eos and not only_own,
            priority=spec.priority,
            cache_salt=spec.cache_salt,
            tenant=spec.tenant,
            grammar=grammar,
            thinking=spec.thinking,
            prediction=prediction[: self.info.max_total_tokens],
            first_id=self._first_id(spec.translation),
            images=images,
            # An encoder gives its tokens none.
            prompt_logprobs=None if self.info.decoder_start_ids else spec.prompt_logprobs,
        )

    def _again(self, spec: GenerationSpec, made: GenerationRequest) -> GenerationRequest:
        """Adapt the request to another engine. Raises ApiError."""
        return self._request(spec, made.prompt_ids, made.images, made.grammar, made.prediction)

    def _max_new_tokens(self, input_length: int, spec: GenerationSpec) -> int:
        """How many tokens may follow the prompt. Raises ApiError."""
        new_tokens = fit_length(input_length, spec.max_new_tokens, self.info, spec.prompt_param)
        if spec.sampling.min_new_tokens > new_tokens:
            raise errors.validation(
                f"`min_tokens` must be <= {new_tokens}, the tokens that may be generated. "
                f"Given: {spec.sampling.min_new_tokens}",
                "min_tokens",
            )
        return new_tokens

    async def _compile(self, grammar: Grammar) -> str:
        """A grammar in the engine's form. Raises ApiError."""
        if self.grammars is None or not self.info.grammar:
            raise structured_output.grammar_unsupported(grammar.param)
        try:
            return await self.grammars.compile(grammar)
        except GrammarError as error:
            raise structured_output.invalid_grammar(error, grammar.param) from error
        except WorkersBusy:
            raise self.admission.overloaded() from None
        except WorkerError as error:
            raise errors.engine_gone(error.cause) from error


def _trace_context() -> TraceContext | None:
    """The span of the model's work for the current HTTP request, if that is traced and sampled."""
    record = access_log.record()
    return None if record is None or record.span is None else record.span.work()
