"""TGI's own API: ``POST /generate``, ``POST /generate_stream`` and ``POST /``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from tgi_cli.engine.messages import FinishReason
from tgi_cli.router.api.schemas import tgi as schemas
from tgi_cli.router.generation.deltas import Delta, DeltaSource, Finish, Token
from tgi_cli.router.generation.generation import Generation
from tgi_cli.router.generation.image_parts import native_prompt
from tgi_cli.router.generation.merge import Whole, best
from tgi_cli.router.generation.prompt_logprobs import shortest
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.generation.validation import generation_spec
from tgi_cli.router.http import errors
from tgi_cli.router.http.endpoint import Endpoint, Operation, RequestContext
from tgi_cli.router.http.error_styles import tgi_body
from tgi_cli.router.http.sse import EventStream, FailedSource
from tgi_cli.router.state import RouterState, leads
from tgi_cli.text.tokenizer import Tokenizer

_INLINE_TOKENS = 256
"""Longest prompt whose tokens are rendered on the event loop: 1 ms, if none is cached."""

_encode = msgspec.json.Encoder().encode

_REASONS: dict[FinishReason, schemas.Reason] = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS_TOKEN: "eos_token",
    FinishReason.STOP_SEQUENCE: "stop_sequence",
}


async def generate(context: RequestContext[schemas.GenerateRequest]) -> Response:
    """The complete answer, as an object."""
    answer, winner = await _generate(context)
    return context.answer(answer, [winner])


async def generate_stream(context: RequestContext[schemas.GenerateRequest]) -> EventStream:
    """One event per token; errors are events too, with status 200."""
    body, generation = context.body, None
    source: DeltaSource
    try:
        with context.preparing():
            spec = await tgi_spec(body, context.state, stream=True)
        (generation,) = await context.open([spec])
        source = generation
    except errors.ApiError as error:
        if error.status == 503:
            raise
        source = FailedSource(error)
    return context.stream(source, TgiEvents(body, generation), len(body.text))


async def compat_generate(context: RequestContext[schemas.CompatRequest]) -> Response | EventStream:
    """A stream, or an array of one complete answer; the prompt precedes the text by default."""
    if context.body.parameters.return_full_text is None:
        # TGI's default for models whose pipeline is text-generation, not text2text-generation.
        decoder = context.state.generator.info.decoder_start_ids
        context.body.parameters.return_full_text = not decoder
    if context.body.stream:
        return await generate_stream(context)
    answer, winner = await _generate(context)
    if context.state.generator.info.decoder_start_ids:
        answer.translation_text = answer.generated_text
    return context.answer([answer], [winner])


async def _generate(
    context: RequestContext[schemas.GenerateRequest],
) -> tuple[schemas.GenerateResponse, Generation]:
    body, state = context.body, context.state
    with context.preparing():
        spec = await tgi_spec(body, state)
    generations = await context.open([spec])
    wholes = await context.collect(generations)
    (winner,) = best(wholes, 1)
    answer = schemas.GenerateResponse(generated_text=_full_text(body, winner.finish))
    if body.parameters.details or body.parameters.decoder_input_details:
        prefill = await _prefill(winner.generation, state)
        answer.details = schemas.Details(**_details(winner, prefill))
        if len(wholes) > 1:
            answer.details.best_of_sequences = [
                schemas.BestOfSequence(
                    generated_text=_full_text(body, whole.finish), **_details(whole, prefill)
                )
                for whole in wholes
                if whole is not winner
            ]
    # The headers describe the winner, but as in TGI the clock stops with the last sequence.
    timings = winner.generation.timings
    timings.finished = max(generation.timings.finished for generation in generations)
    return answer, winner.generation


def _details(whole: Whole, prefill: list[schemas.PrefillToken]) -> dict[str, Any]:
    """The fields of :class:`tgi_cli.router.api.schemas.tgi.SequenceDetails`."""
    return {
        "finish_reason": _REASONS[whole.finish.reason],
        "generated_tokens": whole.finish.generated_tokens,
        "seed": whole.generation.seed,
        "prefill": prefill,
        "tokens": whole.tokens,
        "top_tokens": whole.top_tokens or UNSET,
    }


async def _prefill(generation: Generation, state: RouterState) -> list[schemas.PrefillToken]:
    """The prompt's tokens if requested; a worker thread renders long prompts."""
    if generation.spec.prompt_logprobs is None:
        return []
    begun = state.generator.info.decoder_start_ids
    if begun:  # as in TGI, what the decoder is given is all that precedes the answer
        surface = state.text.tokenizer.surface
        return [schemas.PrefillToken(token_id, surface(token_id), None) for token_id in begun]
    if generation.prompt_tokens <= _INLINE_TOKENS:
        return _prefill_tokens(generation, state.text.tokenizer)
    return await state.workers.run(_prefill_tokens, generation, state.text.tokenizer)


def _prefill_tokens(generation: Generation, tokenizer: Tokenizer) -> list[schemas.PrefillToken]:
    logprobs = (None, *map(shortest, generation.prompt_scores.logprobs))
    return [
        schemas.PrefillToken(token_id, tokenizer.surface(token_id), logprob)
        for token_id, logprob in zip(generation.prompt_ids, logprobs, strict=True)
    ]


async def tgi_spec(
    body: schemas.GenerateRequest, state: RouterState, stream: bool = False
) -> GenerationSpec:
    """Validate a request of TGI's API and resolve its adapter. Raises ApiError."""
    prompt, images = native_prompt(body.inputs, state.generator.images)
    spec = generation_spec(body, prompt, state.config, state.generator.info, stream)
    if images and not body.parameters.return_full_text:
        body.inputs = prompt  # the images are megabytes, and a body lives as long as its answer
    adapter = await state.adapters.for_tgi(body.parameters.adapter_id)
    return replace(spec, images=images, adapter=adapter)


async def best_answers(
    context: RequestContext[object], specs: Sequence[GenerationSpec]
) -> list[Whole]:
    """The best answer to each of several prompts, which run together.

    Raises:
        ApiError: one of them failed, or they cannot all be admitted; none is left running.
        ClientDisconnected: the client closed the connection.
    """
    generations = await context.open(specs)
    wholes = await context.collect(generations)
    return [
        best([whole for whole in wholes if whole.generation.lead is lead], 1)[0]
        for lead in leads(generations)
    ]


def _full_text(body: schemas.GenerateRequest, finish: Finish) -> str:
    return body.text + finish.text if body.parameters.return_full_text else finish.text


class TgiEvents:
    """TGI's events: one per token, the last with the complete text, and no end marker."""

    def __init__(self, body: schemas.GenerateRequest, generation: Generation | None) -> None:
        self._body = body
        self._generation = generation
        self._index = 0
        self._text_so_far: str | None = "" if body.parameters.full_text else None

    def encode(self, delta: Delta) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        parts: list[bytes] = []
        last = len(delta.tokens) - 1
        for index, token in enumerate(delta.tokens):
            self._index += 1
            event = schemas.StreamResponse(index=self._index, token=token)
            if delta.top_tokens:
                event.top_tokens = delta.top_tokens[index]
            if index == last and delta.finish is not None:
                self._finish(event, delta.finish)
            if self._text_so_far is not None:
                self._accumulate(event, delta.finish if index == last else None)
            parts += (b"data: ", _encode(event), b"\n\n")
        return b"".join(parts)

    def _finish(self, event: schemas.StreamResponse, finish: Finish) -> None:
        event.generated_text = _full_text(self._body, finish)
        if self._body.parameters.details and self._generation is not None:
            event.details = schemas.StreamDetails(
                finish_reason=_REASONS[finish.reason],
                generated_tokens=finish.generated_tokens,
                seed=self._generation.seed,
                input_length=self._generation.prompt_tokens,
            )

    def _accumulate(self, event: schemas.StreamResponse, finish: Finish | None) -> None:
        """Replace the token's text with the text so far."""
        token = event.token
        if finish is not None:
            self._text_so_far = finish.text  # ends at a stop string, perhaps within the token
        elif not token.special:
            self._text_so_far = f"{self._text_so_far}{token.text}"
        event.token = Token(token.id, self._text_so_far or "", token.logprob, token.special)

    def fail(self, error: errors.ApiError) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        return b"data: " + tgi_body(error) + b"\n\n"

    def end(self) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        return b""


EVENTS = (schemas.StreamResponse, schemas.ErrorResponse)
GENERATE = Operation(
    tag="Text Generation Inference",
    body=(schemas.GenerateRequest,),
    answer=(schemas.GenerateResponse,),
    generates=True,
    example={"inputs": "Once upon a time", "parameters": {"max_new_tokens": 20}},
)
COMPAT = replace(
    GENERATE, body=(schemas.CompatRequest,), answer=(list[schemas.GenerateResponse],), events=EVENTS
)

ROUTES = [
    Endpoint("/generate", generate, GENERATE),
    Endpoint("/generate_stream", generate_stream, replace(GENERATE, answer=(), events=EVENTS)),
    Endpoint("/", compat_generate, COMPAT),
]
