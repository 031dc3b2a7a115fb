"""OpenAI's text completions: ``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.router import errors
from tgi_cli.router.delta import Delta, Token
from tgi_cli.router.generation import Generation
from tgi_cli.router.http import json_response, read_json, wrong_types
from tgi_cli.router.merge import Whole, best, collect, merge
from tgi_cli.router.openai import (
    DONE,
    FINISH_REASONS,
    Identity,
    fail_stream,
    include_usage,
    usage_of,
)
from tgi_cli.router.prompt import echoed_logprobs, scores_are_complete
from tgi_cli.router.schemas.openai import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from tgi_cli.router.spec import GenerationSpec
from tgi_cli.router.sse import EventStream
from tgi_cli.router.state import RouterState, state_of
from tgi_cli.router.validation import check_ids, openai_specs, request_timeout
from tgi_cli.text.tokenizer import Tokenizer

_DECODER = msgspec.json.Decoder(CompletionRequest)
_encode = msgspec.json.Encoder().encode

Prompt = str | tuple[int, ...]


async def completions(request: Request) -> Response | EventStream:
    """Continuations of one prompt or several, whole or as a stream of chunks."""
    arrived = time.perf_counter()
    state = state_of(request)
    body = await read_json(request, _DECODER, state.config.payload_limit)
    try:
        adapter = await state.adapters.openai(body.model)
        prompts = _prompts(body, state)
        specs = [replace(spec, adapter=adapter) for spec in _specs(body, prompts, state)]
        timeout = request_timeout(request)
    except errors.ApiError as error:
        raise state.generator.refuse(error) from None
    generations = await state.generator.open(specs, arrived, timeout)
    identity = Identity.new("cmpl", body, state)
    characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    echoed = [_text(prompt, state) if body.echo else "" for prompt in prompts]
    texts = [text for text, spec in zip(echoed, specs, strict=True) for _ in range(spec.samples)]
    choices = [
        Choice(body, generation, text, state.text.tokenizer)
        for generation, text in zip(generations, texts, strict=True)
    ]
    if body.stream:
        return EventStream(
            merge(generations),
            CompletionEvents(body, identity, choices),
            state.stream_headers(characters),
        )
    wholes = await collect(request, generations)
    answer = Completion(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        system_fingerprint=identity.system_fingerprint,
        choices=[
            choices[whole.generation.index].whole(whole, index)
            for index, whole in enumerate(_chosen(body, wholes, specs))
        ],
        usage=usage_of(generations),
    )
    return json_response(answer, state.timing_headers(generations, characters))


def _chosen(
    body: CompletionRequest, wholes: Sequence[Whole], specs: Sequence[GenerationSpec]
) -> list[Whole]:
    """The n best of each prompt's samples, or all of them as they are."""
    count = body.n or 1
    chosen: list[Whole] = []
    start = 0
    for spec in specs:
        samples = wholes[start : start + spec.samples]
        chosen += best(samples, count) if len(samples) > count else samples
        start += spec.samples
    return chosen


def _prompts(body: CompletionRequest, state: RouterState) -> list[Prompt]:
    """Text, token ids, or a list of either, as a list. Raises ApiError."""
    info = state.client.info
    if isinstance(body.prompt, str):
        prompts: list[Prompt] = [body.prompt]
    elif body.prompt and all(type(item) is int for item in body.prompt):
        prompts = [tuple(check_ids(body.prompt, "prompt", info))]
    else:
        prompts = []
        for item in body.prompt:
            if isinstance(item, str):
                prompts.append(item)
            elif isinstance(item, list) and all(type(index) is int for index in item):
                prompts.append(tuple(check_ids(item, "prompt", info)))
            else:
                raise wrong_types("`prompt` must be text, token ids, or a list of either")
    if not prompts or not all(prompts):
        raise errors.validation("`prompt` cannot be empty", "prompt")
    limit = state.config.max_client_batch_size
    if len(prompts) > limit:
        raise errors.ApiError(
            422,
            f"Number of prompts exceeds the maximum allowed batch size of {limit}",
            "batch size exceeded",
            param="prompt",
            code="array_above_max_length",
        )
    return prompts


def _text(prompt: Prompt, state: RouterState) -> str:
    if isinstance(prompt, str):
        return prompt
    return state.text.tokenizer.decode(prompt, skip_special_tokens=False)


def _specs(
    body: CompletionRequest, prompts: Sequence[Prompt], state: RouterState
) -> list[GenerationSpec]:
    if body.suffix:
        raise errors.ApiError(
            422,
            "Suffix is not supported and can be achieved by preprocessing the prompt.",
            "suffix not supported",
            param="suffix",
            code="unsupported_parameter",
        )
    count = 1 if body.n is None else body.n
    samples = count if body.best_of is None else body.best_of
    if samples < count:
        raise errors.validation(f"`best_of` must be >= `n`. Given: {samples}", "best_of")
    if body.stream and samples > count:
        raise errors.validation("`best_of` > `n` is not supported when streaming", "best_of")
    prompt_only = bool(body.echo) and body.max_tokens == 0
    specs = openai_specs(
        body,
        prompts,
        state.config,
        state.client.info,
        state.text.tokenizer,
        state.defaults,
        max_tokens=1 if prompt_only else body.max_tokens,
        top_logprobs=body.logprobs or 0,
        add_special_tokens=True,
    )
    return [
        replace(
            spec,
            samples=samples,
            prompt_only=prompt_only,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        for spec in specs
    ]


class Choice:
    """One continuation, as a whole or piece by piece; offsets and the echo go on from piece to
    piece."""

    def __init__(
        self, body: CompletionRequest, generation: Generation, echoed: str, tokenizer: Tokenizer
    ) -> None:
        self.generation = generation
        self._logprobs = body.logprobs is not None
        self._echo = bool(body.echo)
        self._echoed = echoed
        self._tokenizer = tokenizer
        self._offset = 0
        self._held: list[Delta] = []

    def whole(self, whole: Whole, index: int) -> CompletionChoice:
        """The finished choice, at ``index`` of the answer."""
        return CompletionChoice(
            index=index,
            logprobs=self._log_probabilities(whole.tokens, whole.top_tokens),
            text=self._echoed + whole.finish.text,
            finish_reason=FINISH_REASONS[whole.finish.reason],
        )

    def parts(self, delta: Delta) -> list[CompletionChoice]:
        """The pieces of a stream that a delta makes; none when it shows nothing.

        Another sample may be faster than the first, which reports on their prompt: its pieces
        wait.
        """
        self._held.append(delta)
        if self._echo and self._logprobs and not scores_are_complete(self.generation):
            return []
        return self.rest()

    def rest(self) -> list[CompletionChoice]:
        """The pieces that waited."""
        held, self._held = self._held, []
        return [part for part in map(self._part, held) if part is not None]

    def _part(self, delta: Delta) -> CompletionChoice | None:
        if not delta.text and delta.finish is None and not self._logprobs:
            return None
        logprobs = self._log_probabilities(delta.tokens, delta.top_tokens)
        echoed, self._echoed = self._echoed, ""
        return CompletionChoice(
            index=delta.index,
            text=echoed + delta.text,
            logprobs=logprobs,
            finish_reason=None if delta.finish is None else FINISH_REASONS[delta.finish.reason],
        )

    def _log_probabilities(
        self, tokens: Sequence[Token], top_tokens: Sequence[Sequence[Token]]
    ) -> CompletionLogprobs | None:
        if not self._logprobs:
            return None
        found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=None, text_offset=[])
        if self._echo:
            self._echo = False
            found, self._offset = echoed_logprobs(self.generation, self._tokenizer, self._echoed)
        for token in tokens:
            found.tokens.append(token.text)
            found.token_logprobs.append(token.logprob)
            found.text_offset.append(self._offset)
            self._offset += len(token.text)
        if top_tokens:
            # The token itself is among them, perhaps by another spelling; it counts once.
            found.top_logprobs = [
                *(found.top_logprobs or ()),
                *(
                    {
                        token.text if other.id == token.id else other.text: other.logprob
                        for other in (*others, token)
                    }
                    for token, others in zip(tokens, top_tokens, strict=True)
                ),
            ]
        return found


class CompletionEvents:
    """OpenAI's chunks; without ``include_usage`` the last of a choice counts tokens, as TGI's."""

    def __init__(
        self, body: CompletionRequest, identity: Identity, choices: Sequence[Choice]
    ) -> None:
        self._choices = choices
        self._usage = include_usage(body)
        self._head = identity.head("text_completion")

    def encode(self, delta: Delta) -> bytes:
        """See :class:`tgi_cli.router.sse.EventEncoder`."""
        choice = self._choices[delta.index]
        return b"".join(self._event(choice, part) for part in choice.parts(delta))

    def _event(self, choice: Choice, part: CompletionChoice) -> bytes:
        usage = b"null"
        if part.finish_reason is not None and not self._usage:
            usage = _encode(usage_of([choice.generation]))
        return b'%b[%b],"usage":%b}\n\n' % (self._head, _encode(part), usage)

    def fail(self, error: errors.ApiError) -> bytes:
        """See :class:`tgi_cli.router.sse.EventEncoder`."""
        return fail_stream(error)

    def end(self) -> bytes:
        """The pieces that still wait, the usage, and the end."""
        rest = [self._event(choice, part) for choice in self._choices for part in choice.rest()]
        if self._usage:
            usage = _encode(usage_of([choice.generation for choice in self._choices]))
            rest.append(b'%b[],"usage":%b}\n\n' % (self._head, usage))
        return b"".join(rest) + DONE


ROUTES = [
    Route(path, completions, methods=["POST"]) for path in ("/v1/completions", "/completions")
]
