"""OpenAI's text completions: ``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.router import errors
from tgi_cli.router.delta import Delta, Finish, Token
from tgi_cli.router.generation import Generation
from tgi_cli.router.http import json_response, read_json, unless_gone, wrong_types
from tgi_cli.router.merge import merge
from tgi_cli.router.openai import (
    DONE,
    FINISH_REASONS,
    Identity,
    fail_stream,
    include_usage,
    usage_of,
)
from tgi_cli.router.schemas.openai import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from tgi_cli.router.spec import GenerationSpec
from tgi_cli.router.sse import EventStream
from tgi_cli.router.state import RouterState, state_of
from tgi_cli.router.validation import openai_specs

_DECODER = msgspec.json.Decoder(CompletionRequest)
_encode = msgspec.json.Encoder().encode

Prompt = str | tuple[int, ...]


async def completions(request: Request) -> Response | EventStream:
    """Continuations of one prompt or several, whole or as a stream of chunks."""
    arrived = time.perf_counter()
    state = state_of(request)
    body = await read_json(request, _DECODER, state.config.payload_limit)
    try:
        prompts = _prompts(body, state)
        specs = _specs(body, prompts, state)
    except errors.ApiError as error:
        raise state.generator.refuse(error) from None
    generations = await state.generator.open(specs, arrived)
    identity = Identity.new("cmpl", body, state)
    characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    echoed = [_text(prompt, state) if body.echo else "" for prompt in prompts]
    if body.stream:
        return EventStream(
            merge(generations),
            CompletionEvents(body, identity, generations, echoed),
            state.stream_headers(characters),
        )
    source = merge(generations)
    choices = [_Choice(body, index, text) for index, text in enumerate(echoed)]

    async def collect() -> None:
        async for delta in source:
            choices[delta.index].add(delta)

    try:
        await unless_gone(request, collect())
    finally:
        source.close()
    answer = Completion(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        system_fingerprint=identity.system_fingerprint,
        choices=[choice.whole() for choice in choices],
        usage=usage_of(generations),
    )
    return json_response(answer, state.timing_headers(generations, characters))


def _prompts(body: CompletionRequest, state: RouterState) -> list[Prompt]:
    """Text, token ids, or a list of either, as a list. Raises ApiError."""
    if isinstance(body.prompt, str):
        prompts: list[Prompt] = [body.prompt]
    elif body.prompt and all(type(item) is int for item in body.prompt):
        prompts = [_ids(body.prompt, state)]
    else:
        prompts = []
        for item in body.prompt:
            if isinstance(item, str):
                prompts.append(item)
            elif isinstance(item, list) and all(type(index) is int for index in item):
                prompts.append(_ids(item, state))
            else:
                raise wrong_types("`prompt` must be text, token ids, or a list of either")
    if not prompts or not all(prompts):
        raise errors.validation("`inputs` cannot be empty", "prompt")
    limit = state.config.max_client_batch_size
    if len(prompts) > limit:
        raise errors.ApiError(
            422,
            f"Number of prompts exceeds the maximum allowed batch size of {limit}",
            "batch size exceeded",
            param="prompt",
        )
    return prompts


def _ids(items: Sequence[int], state: RouterState) -> tuple[int, ...]:
    size = state.client.info.vocab_size
    if any(not 0 <= index < size for index in items):
        raise errors.validation(f"token ids must be >= 0 and < {size}", "prompt")
    return tuple(items)


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
        )
    if (body.best_of or 1) != 1:
        raise errors.unsupported("best_of")
    if body.echo and body.logprobs is not None:
        raise errors.unsupported("echo", "`echo` together with `logprobs`")
    return openai_specs(
        body,
        prompts,
        state.config,
        max_tokens=body.max_tokens,
        top_logprobs=body.logprobs or 0,
        add_special_tokens=True,
    )


class _Choice:
    """One prompt's continuation, as it grows."""

    def __init__(self, body: CompletionRequest, index: int, echoed: str) -> None:
        self._logprobs = body.logprobs
        self._index = index
        self._echoed = echoed
        self._offset = 0
        self._tokens: list[Token] = []
        self._top_tokens: list[list[Token]] = []
        self._finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        """Keep what the whole answer needs of a delta."""
        if self._logprobs is not None:
            self._tokens.extend(delta.tokens)
            self._top_tokens.extend(delta.top_tokens)
        self._finish = delta.finish or self._finish

    def whole(self) -> CompletionChoice:
        """The finished choice. Raises ApiError when it never finished."""
        if self._finish is None:
            raise errors.incomplete()
        return CompletionChoice(
            index=self._index,
            text=self._echoed + self._finish.text,
            logprobs=self._log_probabilities(self._tokens, self._top_tokens),
            finish_reason=FINISH_REASONS[self._finish.reason],
        )

    def part(self, delta: Delta) -> CompletionChoice | None:
        """The piece of a stream that a delta makes; None when it shows nothing."""
        if not delta.text and delta.finish is None and self._logprobs is None:
            return None
        echoed, self._echoed = self._echoed, ""
        return CompletionChoice(
            index=self._index,
            text=echoed + delta.text,
            logprobs=self._log_probabilities(delta.tokens, delta.top_tokens),
            finish_reason=None if delta.finish is None else FINISH_REASONS[delta.finish.reason],
        )

    def _log_probabilities(
        self, tokens: Sequence[Token], top_tokens: Sequence[Sequence[Token]]
    ) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        top = [
            {other.text: other.logprob for other in [*others, token]}
            for token, others in zip(tokens, top_tokens, strict=False)
        ]
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=top or None,
            text_offset=offsets,
        )


class CompletionEvents:
    """OpenAI's chunks; without ``include_usage`` the last of a prompt counts tokens, as TGI's."""

    def __init__(
        self,
        body: CompletionRequest,
        identity: Identity,
        generations: Sequence[Generation],
        echoed: Sequence[str],
    ) -> None:
        self._generations = generations
        self._usage = include_usage(body)
        self._head = identity.head("text_completion")
        self._choices = [_Choice(body, index, text) for index, text in enumerate(echoed)]

    def encode(self, delta: Delta) -> bytes:
        """See :class:`tgi_cli.router.sse.EventEncoder`."""
        choice = self._choices[delta.index].part(delta)
        if choice is None:
            return b""
        usage = b"null"
        if delta.finish is not None and not self._usage:
            usage = _encode(usage_of([self._generations[delta.index]]))
        return b'%b[%b],"usage":%b}\n\n' % (self._head, _encode(choice), usage)

    def fail(self, error: errors.ApiError) -> bytes:
        """See :class:`tgi_cli.router.sse.EventEncoder`."""
        return fail_stream(error)

    def end(self) -> bytes:
        """See :class:`tgi_cli.router.sse.EventEncoder`."""
        if not self._usage:
            return DONE
        return b'%b[],"usage":%b}\n\n' % (self._head, _encode(usage_of(self._generations))) + DONE


ROUTES = [Route("/v1/completions", completions, methods=["POST"])]
