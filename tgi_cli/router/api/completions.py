"""OpenAI's text completions: ``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.router.api.completion_choices import Choice, EchoedSource, prepare_echoes
from tgi_cli.router.api.openai_common import DONE, Identity, StreamUsage, fail_stream, usage_of
from tgi_cli.router.api.openai_parameters import (
    asked_length,
    asked_logprobs,
    asked_truncation,
    check_stream_options,
    openai_specs,
)
from tgi_cli.router.api.schemas.openai import CompletionChoice, CompletionRequest, TextCompletion
from tgi_cli.router.api.schemas.refused import refuse
from tgi_cli.router.generation.deltas import Delta, DeltaSource
from tgi_cli.router.generation.merge import Whole, best, collect, merge
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.generation.validation import check_ids, fit_length, request_timeout
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import json_response, read_json, wrong_types
from tgi_cli.router.http.sse import EventStream
from tgi_cli.router.state import RouterState, state_of

_DECODER = msgspec.json.Decoder(CompletionRequest)
_encode = msgspec.json.Encoder().encode

Prompt = str | tuple[int, ...]


async def completions(request: Request) -> Response | EventStream:
    """Continuations of one prompt or several, whole or as a stream of chunks."""
    arrived = time.perf_counter()
    state = state_of(request)
    body = await read_json(request, _DECODER, state.config.payload_limit)
    try:
        _settle(body)
        adapter = await state.adapters.openai(body.model, body.adapter_id)
        prompts = _prompts(body, state)
        specs = [replace(spec, adapter=adapter) for spec in _specs(body, prompts, state)]
        timeout = request_timeout(request)
    except errors.ApiError as error:
        raise state.generator.refuse(error) from None
    generations = await state.generator.open(specs, arrived, timeout)
    identity = Identity.new("cmpl", body, state)
    characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    tokenizer = state.text.tokenizer
    echoed = {
        generation: _echoed(generation.spec, generation.prompt_ids, state) if body.echo else ""
        for generation in generations
        if generation.lead is generation
    }
    choices = [
        Choice(body, generation, echoed[generation.lead], tokenizer) for generation in generations
    ]
    if body.stream:
        source: DeltaSource = merge(generations)
        if any(choice.awaits_report for choice in choices):
            source = EchoedSource(source, choices, state.workers)
        encoder = CompletionEvents(body, identity, choices)
        return EventStream(source, encoder, state.stream_headers(characters))
    wholes = await collect(request, generations)
    await prepare_echoes(choices, state.workers)
    answer = TextCompletion(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        system_fingerprint=identity.system_fingerprint,
        choices=[
            await choices[whole.generation.index].whole(whole, index, state.workers)
            for index, whole in enumerate(_chosen(body, wholes, specs))
        ],
        usage=usage_of(generations),
    )
    return json_response(answer, state.timing_headers(generations, characters))


def _settle(body: CompletionRequest) -> None:
    """Refuse what no prompt needs to be looked at for; OpenAI's names for what has others."""
    refuse(body)
    check_stream_options(body.stream, body.stream_options)
    if body.suffix:
        raise errors.ApiError(
            422,
            "Suffix is not supported and can be achieved by preprocessing the prompt.",
            "suffix not supported",
            param="suffix",
            code="unsupported_parameter",
        )
    if body.return_full_text is not None:
        if body.echo is not None and body.echo is not body.return_full_text:
            raise errors.validation(
                "`echo` and `return_full_text` mean the same and differ", "return_full_text"
            )
        body.echo = body.return_full_text
    if body.top_n_tokens and body.logprobs is None:
        body.logprobs = asked_logprobs(body.top_n_tokens, "top_n_tokens")


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
    """Text, token ids, or a list of either, as a list. Raises ApiError.

    Their number and lengths are looked at before their items.
    """
    asked = body.prompt
    if isinstance(asked, str):
        prompts: list[Prompt] = [asked]
    elif asked and type(asked[0]) is int:
        prompts = [_ids(asked, body, state)]
    else:
        limit = state.config.max_client_batch_size
        if len(asked) > limit:
            raise errors.ApiError(
                422,
                f"Number of prompts exceeds the maximum allowed batch size of {limit}",
                "batch size exceeded",
                param="prompt",
                code="array_above_max_length",
            )
        prompts = [item if isinstance(item, str) else _ids(item, body, state) for item in asked]
    if not prompts or not all(prompts):
        raise errors.validation("`prompt` cannot be empty", "prompt")
    return prompts


def _ids(item: object, body: CompletionRequest, state: RouterState) -> tuple[int, ...]:
    """The token ids that ``item`` is. Raises ApiError."""
    if not isinstance(item, list):
        raise wrong_types("`prompt` must be text, token ids, or a list of either")
    info = state.client.info
    length = asked_length(body)[1]
    kept = asked_truncation(body, length, info)
    if kept is not None:
        item = item[-kept:]
    elif len(item) > info.max_input_tokens:
        fit_length(len(item), length or None, info)
    if not all(type(index) is int for index in item):
        raise wrong_types("`prompt` must be text, token ids, or a list of either")
    return tuple(check_ids(cast("list[int]", item), "prompt", info))


def _echoed(spec: GenerationSpec, ids: Sequence[int], state: RouterState) -> str:
    """The prompt's text, or what is left of it."""
    if isinstance(spec.prompt, str) and spec.truncate is None:
        return spec.prompt
    given = not isinstance(spec.prompt, str)
    return state.text.tokenizer.decode(ids, skip_special_tokens=not given)


def _specs(
    body: CompletionRequest, prompts: Sequence[Prompt], state: RouterState
) -> list[GenerationSpec]:
    count = 1 if body.n is None else body.n
    samples = count if body.best_of is None else body.best_of
    if samples < count:
        raise errors.validation(f"`best_of` must be >= `n`. Given: {samples}", "best_of")
    if body.stream and samples > count:
        raise errors.validation("`best_of` > `n` is not supported when streaming", "best_of")
    specs = openai_specs(
        body,
        prompts,
        state.config,
        state.client.info,
        state.text.tokenizer,
        state.defaults,
        top_logprobs=asked_logprobs(body.logprobs, "logprobs"),
        add_special_tokens=True,
        prompt_only=bool(body.echo) and asked_length(body)[1] == 0,
    )
    return [
        replace(spec, samples=samples, prompt_logprobs=body.logprobs if body.echo else None)
        for spec in specs
    ]


class CompletionEvents:
    """OpenAI's chunks; see :class:`StreamUsage` for which of them count tokens."""

    def __init__(
        self, body: CompletionRequest, identity: Identity, choices: Sequence[Choice]
    ) -> None:
        self._choices = choices
        self._usage = StreamUsage.of(body.stream_options)
        self._head = identity.head("text_completion")

    def encode(self, delta: Delta) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        choice = self._choices[delta.index]
        return b"".join(self._event(choice, part) for part in choice.parts(delta))

    def _event(self, choice: Choice, part: CompletionChoice) -> bytes:
        usage = b"null"
        ends = part.finish_reason is not None
        if self._usage is StreamUsage.EACH or (ends and self._usage is StreamUsage.OPEN):
            usage = _encode(usage_of([choice.generation]))
        return b'%b[%b],"usage":%b}\n\n' % (self._head, _encode(part), usage)

    def fail(self, error: errors.ApiError) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        return fail_stream(error)

    def end(self) -> bytes:
        """The pieces that still wait, the usage, and the end."""
        rest = [self._event(choice, part) for choice in self._choices for part in choice.rest()]
        if self._usage.at_end:
            usage = _encode(usage_of([choice.generation for choice in self._choices]))
            rest.append(b'%b[],"usage":%b}\n\n' % (self._head, usage))
        return b"".join(rest) + DONE


ROUTES = [
    Route(path, completions, methods=["POST"]) for path in ("/v1/completions", "/completions")
]
