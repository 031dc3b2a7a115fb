"""TGI's own API: ``POST /generate``, ``POST /generate_stream`` and ``POST /``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.engine.messages import FinishReason
from tgi_cli.router.api.prompt_echo import prefill_tokens
from tgi_cli.router.api.schemas.tgi import (
    BestOfSequence,
    CompatRequest,
    Details,
    GenerateRequest,
    GenerateResponse,
    Reason,
    StreamDetails,
    StreamResponse,
)
from tgi_cli.router.generation.deltas import Delta, DeltaSource, Finish, Token
from tgi_cli.router.generation.generation import Generation
from tgi_cli.router.generation.merge import Whole, best, collect
from tgi_cli.router.generation.spec import GenerationSpec
from tgi_cli.router.generation.validation import native_spec, request_timeout
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import json_response, read_json
from tgi_cli.router.http.sse import EventStream, FailedSource
from tgi_cli.router.state import RouterState, leads, state_of

_GENERATE = msgspec.json.Decoder(GenerateRequest)
_COMPAT = msgspec.json.Decoder(CompatRequest)
_encode = msgspec.json.Encoder().encode

_REASONS: dict[FinishReason, Reason] = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS_TOKEN: "eos_token",
    FinishReason.STOP_SEQUENCE: "stop_sequence",
}


async def generate(request: Request) -> Response:
    """The whole answer, as an object."""
    arrived = time.perf_counter()
    state = state_of(request)
    body = await read_json(request, _GENERATE, state.config.payload_limit)
    answer, headers = await _whole(request, state, body, arrived)
    return json_response(answer, headers)


async def generate_stream(request: Request) -> EventStream:
    """One event per token; errors come as an event too, with status 200."""
    arrived = time.perf_counter()
    state = state_of(request)
    body = await read_json(request, _GENERATE, state.config.payload_limit)
    return await _stream(request, state, body, arrived)


async def compat_generate(request: Request) -> Response | EventStream:
    """``stream`` chooses; a whole answer is an array of one; the prompt is put in front."""
    arrived = time.perf_counter()
    state = state_of(request)
    body = await read_json(request, _COMPAT, state.config.payload_limit)
    if body.parameters.return_full_text is None:
        # TGI's default for models whose pipeline is text-generation, as all here are.
        body.parameters.return_full_text = True
    if body.stream:
        return await _stream(request, state, body, arrived)
    answer, headers = await _whole(request, state, body, arrived)
    return json_response([answer], headers)


async def _whole(
    request: Request, state: RouterState, body: GenerateRequest, arrived: float
) -> tuple[GenerateResponse, dict[str, str]]:
    try:
        spec = await tgi_spec(body, state)
        timeout = request_timeout(request)
    except errors.ApiError as error:
        raise state.generator.refuse(error) from None
    generations = await state.generator.open([spec], arrived, timeout)
    wholes = await collect(request, generations)
    (winner,) = best(wholes, 1)
    answer = GenerateResponse(generated_text=_full_text(body, winner.finish))
    if body.parameters.details or body.parameters.decoder_input_details:
        prefill = await prefill_tokens(winner.generation, state.text.tokenizer, state.workers)
        answer.details = Details(
            finish_reason=_REASONS[winner.finish.reason],
            generated_tokens=winner.finish.generated_tokens,
            seed=winner.generation.seed,
            prefill=prefill,
            tokens=winner.tokens,
            top_tokens=winner.top_tokens or UNSET,
        )
        if len(wholes) > 1:
            answer.details.best_of_sequences = [
                BestOfSequence(
                    generated_text=_full_text(body, whole.finish),
                    finish_reason=_REASONS[whole.finish.reason],
                    generated_tokens=whole.finish.generated_tokens,
                    seed=whole.generation.seed,
                    prefill=prefill,
                    tokens=whole.tokens,
                    top_tokens=whole.top_tokens or UNSET,
                )
                for whole in wholes
                if whole is not winner
            ]
    # The headers tell of the winner, but as TGI's the clock stops with the last of them.
    timings = winner.generation.timings
    timings.finished = max(generation.timings.finished for generation in generations)
    return answer, state.timing_headers([winner.generation], len(body.inputs))


async def _stream(
    request: Request, state: RouterState, body: GenerateRequest, arrived: float
) -> EventStream:
    source: DeltaSource
    generation: Generation | None = None
    try:
        spec = await tgi_spec(body, state, stream=True)
        timeout = request_timeout(request)
    except errors.ApiError as error:
        source = FailedSource(state.generator.refuse(error))
    else:
        try:
            (generation,) = await state.generator.open([spec], arrived, timeout)
            source = generation
        except errors.ApiError as error:
            if error.status == 503:
                raise
            source = FailedSource(error)
    return EventStream(source, TgiEvents(body, generation), state.stream_headers(len(body.inputs)))


async def tgi_spec(
    body: GenerateRequest, state: RouterState, stream: bool = False
) -> GenerationSpec:
    """What a native body asks for, its adapter found. Raises ApiError."""
    spec = native_spec(body, state.config, state.generator.info, stream)
    return replace(spec, adapter=await state.adapters.native(body.parameters.adapter_id))


async def answer_all(
    request: Request, specs: Sequence[GenerationSpec], arrived: float
) -> tuple[list[Whole], dict[str, str]]:
    """The best answer to each of several prompts, which run together, and the headers.

    Raises:
        ApiError: one of them failed, or they cannot all be let in; none is left running.
        ClientDisconnected: so did the client.
    """
    state = state_of(request)
    try:
        timeout = request_timeout(request)
    except errors.ApiError as error:
        raise state.generator.refuse(error) from None
    generations = await state.generator.open(specs, arrived, timeout)
    wholes = await collect(request, generations)
    winners = [
        best([whole for whole in wholes if whole.generation.lead is lead], 1)[0]
        for lead in leads(generations)
    ]
    characters = sum(len(spec.prompt) for spec in specs)
    return winners, state.timing_headers([winner.generation for winner in winners], characters)


def _full_text(body: GenerateRequest, finish: Finish) -> str:
    return body.inputs + finish.text if body.parameters.return_full_text else finish.text


class TgiEvents:
    """TGI's events: one per token, the last with the whole text, and nothing behind it."""

    def __init__(self, body: GenerateRequest, generation: Generation | None) -> None:
        self._body = body
        self._generation = generation
        self._index = 0
        self._so_far: str | None = "" if body.parameters.full_text else None

    def encode(self, delta: Delta) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        parts: list[bytes] = []
        last = len(delta.tokens) - 1
        for place, token in enumerate(delta.tokens):
            self._index += 1
            event = StreamResponse(index=self._index, token=token)
            if delta.top_tokens:
                event.top_tokens = delta.top_tokens[place]
            if place == last and delta.finish is not None:
                self._finish(event, delta.finish)
            if self._so_far is not None:
                self._lengthen(event, delta.finish if place == last else None)
            parts += (b"data: ", _encode(event), b"\n\n")
        return b"".join(parts)

    def _finish(self, event: StreamResponse, finish: Finish) -> None:
        event.generated_text = _full_text(self._body, finish)
        if self._body.parameters.details and self._generation is not None:
            event.details = StreamDetails(
                finish_reason=_REASONS[finish.reason],
                generated_tokens=finish.generated_tokens,
                seed=self._generation.seed,
                input_length=self._generation.prompt_tokens,
            )

    def _lengthen(self, event: StreamResponse, finish: Finish | None) -> None:
        """Show the text so far in place of what the token adds to it."""
        token = event.token
        if finish is not None:
            self._so_far = finish.text  # ends where a stop string does, perhaps within the token
        elif not token.special:
            self._so_far = f"{self._so_far}{token.text}"
        event.token = Token(token.id, self._so_far or "", token.logprob, token.special)

    def fail(self, error: errors.ApiError) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        return b"data: " + errors.tgi_body(error) + b"\n\n"

    def end(self) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        return b""


ROUTES = [
    Route("/generate", generate, methods=["POST"]),
    Route("/generate_stream", generate_stream, methods=["POST"]),
    Route("/", compat_generate, methods=["POST"]),
]
