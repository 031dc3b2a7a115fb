"""OpenAI's responses: ``POST /v1/responses``, for text and function tools.

A response is a chat by other names. The server stores nothing: requests that refer to an earlier
response are refused, and clients send the whole conversation, as in chats.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from tgi_cli.engine.messages import FinishReason
from tgi_cli.router.api.openai_common import GENERATION, openai_endpoints
from tgi_cli.router.api.response_input import chat_request, reports_logprobs
from tgi_cli.router.api.response_writer import ResponseWriter, TextLogprobs
from tgi_cli.router.api.schemas import responses as schemas
from tgi_cli.router.generation.chat_prompt import INLINE_MESSAGES, render_chat
from tgi_cli.router.generation.deltas import Delta
from tgi_cli.router.generation.generation import Generation
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import unless_disconnected
from tgi_cli.router.http.endpoint import RequestContext
from tgi_cli.router.http.sse import EventStream
from tgi_cli.router.state import RouterState
from tgi_cli.text.response_parser import Content, ResponseParser, ResponsePart


async def responses(context: RequestContext[schemas.ResponsesRequest]) -> Response | EventStream:
    """The assistant's answer as items, complete or as a stream of events."""
    body, state = context.body, context.state
    with context.preparing():
        if isinstance(body.input, str) or len(body.input) <= INLINE_MESSAGES:
            chat = chat_request(body)
        else:
            chat = await state.workers.run(chat_request, body)
        adapter = await state.adapters.for_openai(body.model, body.adapter_id)
        conversation = await render_chat(chat, state)
    spec = replace(conversation.to_generate(state.generator.stop_ids), adapter=adapter)
    generations = await context.open([spec])
    (generation,) = generations
    writer = ResponseWriter(_response(body, state), bool(body.stream))
    tokenizer = state.text.tokenizer
    logprobs = None
    if reports_logprobs(body):
        logprobs = TextLogprobs(tokenizer, spec.shown_ids, bool(body.return_tokens_as_token_ids))
    events = ResponseEvents(writer, generation, conversation.parser(), logprobs)
    if body.stream:
        return context.stream(generation, events, len(spec.prompt))
    await unless_disconnected(context.request, events.read())
    return context.answer(writer.response, generations)


def _response(body: schemas.ResponsesRequest, state: RouterState) -> schemas.ResponseObject:
    """The response before it has any output."""
    defaults = state.defaults
    choice: str | Mapping[str, Any] = "auto" if body.tool_choice is None else body.tool_choice
    return schemas.ResponseObject(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=state.model_name(body.model),
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=body.reasoning or schemas.ReasoningOptions(),
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        text=body.text
        if body.text and body.text.format
        else schemas.TextOptions(format={"type": "text"}),
        tool_choice=choice if isinstance(choice, str) else dict(choice),
        tools=body.tools or [],
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        user=body.user,
    )


class ResponseEvents:
    """Writes a generation as a response, or as the events of its stream."""

    def __init__(
        self,
        writer: ResponseWriter,
        generation: Generation,
        reader: ResponseParser | None,
        logprobs: TextLogprobs | None,
    ) -> None:
        self._writer = writer
        self._generation = generation
        self._reader = reader
        self._logprobs = logprobs
        self._begun = False

    async def read(self) -> None:
        """Read the whole generation delta by delta. Raises ApiError."""
        try:
            async for delta in self._generation:
                self._add(delta)
        finally:
            self._generation.close()

    def _add(self, delta: Delta) -> None:
        if not self._begun:
            self._begun = True
            self._writer.begin()
        if self._logprobs is not None:
            self._logprobs.push(delta)
        text, finish = delta.text, delta.finish
        pieces: list[ResponsePart] = [Content(text)] if text else []
        if self._reader is not None:
            pieces = self._reader.push(text) if text else []
            if finish is not None:
                pieces += self._reader.finish(finish.reason is FinishReason.LENGTH)
        for piece in pieces:
            self._writer.add(piece, () if self._logprobs is None else self._logprobs.of(piece))
        if finish is None:
            return
        response = self._writer.response
        response.usage = self._usage()
        if finish.reason is FinishReason.LENGTH:
            response.incomplete_details = schemas.IncompleteDetails()
        self._writer.end("incomplete" if response.incomplete_details else "completed")

    def encode(self, delta: Delta) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        self._add(delta)
        return self._writer.take()

    def fail(self, error: errors.ApiError) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        if not self._begun:
            self._writer.begin()
        self._writer.response.error = schemas.ResponseError(
            code=error.response_code, message=error.openai_message
        )
        self._writer.fail()
        return self._writer.take()

    def end(self) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        return b""

    def _usage(self) -> schemas.ResponseUsage:
        generation = self._generation
        return schemas.ResponseUsage(
            input_tokens=generation.prompt_tokens,
            input_tokens_details=schemas.InputDetails(cached_tokens=generation.cached_tokens),
            output_tokens=generation.generated_tokens,
            output_tokens_details=schemas.OutputDetails(
                reasoning_tokens=generation.reasoning_tokens
            ),
            total_tokens=generation.prompt_tokens + generation.generated_tokens,
        )


RESPONSES = replace(
    GENERATION,
    body=(schemas.ResponsesRequest,),
    answer=(schemas.ResponseObject,),
    events=(schemas.ResponseEvent,),
    example={"input": "Hello!", "max_output_tokens": 20},
)

ROUTES = openai_endpoints("/responses", responses, RESPONSES)
