"""OpenAI's text completions: ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import msgspec
from starlette.responses import Response

from tgi_cli.router.api.completion_choices import Choice, EchoedSource, prepare_echoes
from tgi_cli.router.api.openai_common import (
    DONE,
    GENERATION,
    Identity,
    StreamUsage,
    fail_stream,
    timings_of,
    usage_of,
    v1_endpoints,
)
from tgi_cli.router.api.openai_parameters import (
    check_stream_options,
    openai_spec,
    requested_length,
    requested_logprobs,
    requested_truncation,
)
from tgi_cli.router.api.schemas.openai import CompletionRequest
from tgi_cli.router.api.schemas.openai_answers import (
    CompletionChoice,
    CompletionChunk,
    OpenAIErrorResponse,
    TextCompletion,
)
from tgi_cli.router.api.schemas.refused import refuse
from tgi_cli.router.generation.deltas import Delta, DeltaSource
from tgi_cli.router.generation.merge import Whole, best, merge
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.generation.validation import check_ids, fit_length
from tgi_cli.router.http import errors
from tgi_cli.router.http.body_errors import wrong_types
from tgi_cli.router.http.endpoint import RequestContext
from tgi_cli.router.http.sse import EventStream
from tgi_cli.router.state import RouterState, leads, prompt_characters
from tgi_cli.text.fill_in_middle import FillInMiddle

_encode = msgspec.json.Encoder().encode

Prompt = str | tuple[int, ...]


async def completions(context: RequestContext[CompletionRequest]) -> Response | EventStream:
    """Continuations of one prompt or several, complete or as a stream of chunks."""
    body, state = context.body, context.state
    with context.preparing():
        _validate(body)
        adapter = await state.adapters.for_openai(body.model, body.adapter_id)
        specs = _specs(body, adapter, state)
    generations = await context.open(specs)
    identity = Identity.new("cmpl", body, state)
    echoed = {
        lead: _echoed(lead.spec, lead.prompt_ids, state) if body.echo else ""
        for lead in leads(generations)
    }
    choices = [
        Choice(body, generation, echoed[generation.lead], state.text.tokenizer)
        for generation in generations
    ]
    if body.stream:
        source: DeltaSource = merge(generations)
        if any(choice.awaits_report for choice in choices):
            source = EchoedSource(source, choices, state.workers)
        encoder = CompletionEvents(body, identity, choices)
        return context.stream(source, encoder, prompt_characters(generations))
    wholes = await context.collect(generations)
    await prepare_echoes(choices, state.workers)
    answer = TextCompletion(
        **identity.fields(),
        choices=[
            await choices[whole.generation.index].whole(whole, index, state.workers)
            for index, whole in enumerate(_selected(body, wholes, specs))
        ],
        usage=usage_of(generations),
    )
    if body.timings_per_token:
        answer.timings = timings_of(generations)
    return context.answer(answer, generations)


def _validate(body: CompletionRequest) -> None:
    """Check all but the prompts, and replace other names of parameters by OpenAI's."""
    refuse(body)
    check_stream_options(body.stream, body.stream_options)
    if body.return_full_text is not None:
        if body.echo is not None and body.echo is not body.return_full_text:
            raise errors.validation(
                "`echo` and `return_full_text` mean the same and differ", "return_full_text"
            )
        body.echo = body.return_full_text
    if body.suffix and body.echo:
        raise errors.validation("`echo` and `suffix` cannot be combined", "suffix")
    if body.top_n_tokens and body.logprobs is None:
        body.logprobs = requested_logprobs(body.top_n_tokens, "top_n_tokens")


def _selected(
    body: CompletionRequest, wholes: Sequence[Whole], specs: Sequence[GenerationSpec]
) -> list[Whole]:
    """The n best of each prompt's samples, or all of them as they are."""
    count = body.n or 1
    selected: list[Whole] = []
    start = 0
    for spec in specs:
        samples = wholes[start : start + spec.samples]
        selected += best(samples, count) if len(samples) > count else samples
        start += spec.samples
    return selected


def prompts_of(body: CompletionRequest, state: RouterState) -> list[Prompt]:
    """Text, token ids, or a list of either, as a list. Raises ApiError.

    Checks their number and lengths before their items.
    """
    given = body.prompt
    if isinstance(given, str):
        prompts: list[Prompt] = [given]
    elif given and type(given[0]) is int:
        prompts = [_ids(given, body, state)]
    else:
        limit = state.config.max_client_batch_size
        if len(given) > limit:
            message = f"Number of prompts exceeds the maximum allowed batch size of {limit}"
            raise errors.ApiError(
                422,
                message,
                "batch size exceeded",
                param="prompt",
                code="array_above_max_length",
                openai_message=f"{message}, which the server's --max-client-batch-size sets",
            )
        prompts = [item if isinstance(item, str) else _ids(item, body, state) for item in given]
    if not prompts or not (body.suffix or all(prompts)):
        raise errors.validation("`prompt` cannot be empty", "prompt")
    return prompts


def _ids(item: object, body: CompletionRequest, state: RouterState) -> tuple[int, ...]:
    """Check ``item`` to be token ids. Raises ApiError."""
    if not isinstance(item, list):
        raise wrong_types("`prompt` must be text, token ids, or a list of either")
    info = state.client.info
    length = requested_length(body)[1]
    last = requested_truncation(body, length, info)
    if last is not None:
        item = item[-last:]
    elif len(item) > info.max_input_tokens:
        fit_length(len(item), length or None, info)
    if not all(type(index) is int for index in item):
        raise wrong_types("`prompt` must be text, token ids, or a list of either")
    return tuple(check_ids(cast("list[int]", item), "prompt", info))


def _echoed(spec: GenerationSpec, ids: Sequence[int], state: RouterState) -> str:
    """The prompt's text, truncated as the prompt was."""
    if isinstance(spec.prompt, str) and spec.truncate is None:
        return spec.prompt
    given = not isinstance(spec.prompt, str)
    return state.text.tokenizer.decode(ids, skip_special_tokens=not given)


def fill_in_middle(state: RouterState, param: str) -> FillInMiddle:
    """How the model is asked for the text before a suffix. Raises ApiError if it cannot be."""
    found = state.text.fill_in_middle
    if found is None:
        raise errors.validation(
            f"`{param}` is not supported by the served model: its vocabulary has no tokens for "
            "filling in the middle",
            param,
            "unsupported_parameter",
        )
    return found


def _specs(body: CompletionRequest, adapter: str, state: RouterState) -> list[GenerationSpec]:
    prompts = prompts_of(body, state)
    count = 1 if body.n is None else body.n
    samples = count if body.best_of is None else body.best_of
    if samples < count:
        raise errors.validation(f"`best_of` must be >= `n`. Given: {samples}", "best_of")
    if body.stream and samples > count:
        raise errors.validation("`best_of` > `n` is not supported when streaming", "best_of")
    spec = openai_spec(
        body,
        state,
        top_logprobs=requested_logprobs(body.logprobs, "logprobs"),
        add_special_tokens=True,
        prompt_only=bool(body.echo) and requested_length(body)[1] == 0,
    )
    prompt_logprobs = body.logprobs if body.echo else None
    if prompt_logprobs is not None and state.generator.info.decoder_start_ids:
        raise errors.validation(
            "`echo` with `logprobs` is not supported for encoder-decoder models: an encoder gives "
            "its tokens no log-probabilities",
            "logprobs",
        )
    if body.suffix:
        infill = fill_in_middle(state, "suffix")
        if spec.truncate is not None:
            raise errors.validation("a prompt with a `suffix` cannot be truncated", "suffix")
        special = spec.add_special_tokens
        filled = [infill.prompt(each, body.suffix, add_special_tokens=special) for each in prompts]
        spec = replace(spec, stop_token_ids=spec.stop_token_ids | infill.stop_ids)
        return [replace(spec, prompt=prompt, adapter=adapter, samples=samples) for prompt in filled]
    return [
        replace(
            spec, prompt=prompt, adapter=adapter, samples=samples, prompt_logprobs=prompt_logprobs
        )
        for prompt in prompts
    ]


class CompletionEvents:
    """OpenAI's chunks; see :class:`StreamUsage` for which have the usage."""

    def __init__(
        self, body: CompletionRequest, identity: Identity, choices: Sequence[Choice]
    ) -> None:
        self._choices = choices
        self._usage = StreamUsage.of(body.stream_options)
        self._timings = bool(body.timings_per_token)
        self._head = identity.head("text_completion")

    def encode(self, delta: Delta) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        choice = self._choices[delta.index]
        return b"".join(self._event(choice, part) for part in choice.parts(delta))

    def _event(self, choice: Choice, part: CompletionChoice) -> bytes:
        usage = b"null"
        ends = part.finish_reason is not None
        if self._usage is StreamUsage.EACH or (ends and self._usage is StreamUsage.DEFAULT):
            usage = _encode(usage_of([choice.generation]))
        timings = b""
        if self._timings:
            timings = b',"timings":' + _encode(timings_of([choice.generation]))
        return b'%b[%b],"usage":%b%b}\n\n' % (self._head, _encode(part), usage, timings)

    def fail(self, error: errors.ApiError) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        return fail_stream(error)

    def end(self) -> bytes:
        """Chunks held back, the usage, and the end marker."""
        rest = [self._event(choice, part) for choice in self._choices for part in choice.rest()]
        if self._usage.at_end:
            usage = _encode(usage_of([choice.generation for choice in self._choices]))
            rest.append(b'%b[],"usage":%b}\n\n' % (self._head, usage))
        return b"".join(rest) + DONE


COMPLETIONS = replace(
    GENERATION,
    body=(CompletionRequest,),
    answer=(TextCompletion,),
    events=(CompletionChunk, OpenAIErrorResponse),
    example={"prompt": "Once upon a time", "max_tokens": 20},
)

ROUTES = v1_endpoints("/completions", completions, COMPLETIONS)
