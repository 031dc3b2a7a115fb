"""OpenAI's responses: ``POST /v1/responses`` and ``POST /v1/responses/input_tokens``.

A response is a chat by other names, which later requests may continue
(:mod:`tgi_cli.router.api.response_state`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from starlette.responses import Response

from tgi_cli.engine.messages import FinishReason
from tgi_cli.router.api.openai_common import GENERATION, v1_endpoints
from tgi_cli.router.api.response_input import ResponseChat, reports_logprobs, response_chat
from tgi_cli.router.api.response_state import ResponseRecord, Turn, own_items, read_turn, stores
from tgi_cli.router.api.response_writer import ResponseWriter, TextLogprobs, WriterOptions
from tgi_cli.router.api.schemas import responses as schemas
from tgi_cli.router.generation.chat_prompt import INLINE_MESSAGES, Conversation, render_chat
from tgi_cli.router.generation.deltas import Delta
from tgi_cli.router.generation.generation import Generation
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import json_response, unless_disconnected
from tgi_cli.router.http.endpoint import Operation, RequestContext
from tgi_cli.router.http.sse import EventStream
from tgi_cli.router.state import RouterState
from tgi_cli.text.custom_calls import ResponseReader
from tgi_cli.text.response_parser import Content, ResponsePart

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ENCRYPTED = "reasoning.encrypted_content"


async def responses(context: RequestContext[schemas.ResponsesRequest]) -> Response | EventStream:
    """The assistant's answer as items, complete or as a stream of events, or in the background."""
    body, state = context.body, context.state
    with context.preparing():
        _check_background(body, state)
        adapter = await state.adapters.for_openai(body.model, body.adapter_id)
        turn, chat, conversation = await _prepare(body, state)
        spec = replace(conversation.to_generate(state.generator.stop_ids), adapter=adapter)
        own = None
        if stores(body, state):
            own = await _off_loop(state, len(turn.own), own_items, turn)
    generations = await context.open([spec], chat=True)
    (generation,) = generations
    writer = ResponseWriter(_response(body, state), _options(body, chat))
    logprobs = None
    if reports_logprobs(body):
        as_ids = bool(body.return_tokens_as_token_ids)
        logprobs = TextLogprobs(state.text.tokenizer, spec.shown_ids, as_ids)
    record = None
    if own is not None:
        record = ResponseRecord(state.responses, writer.response, turn, own)
    events = ResponseEvents(writer, generation, conversation.parser(), logprobs, record)
    if body.stream:
        return context.stream(generation, events, len(spec.prompt))
    if body.background and record is not None:
        writer.response.status = "queued"
        task = asyncio.ensure_future(_in_background(events, writer))
        record.save(task)
        answer = json_response(writer.response)
        await asyncio.sleep(0)  # a task that has not begun would be cancelled without cleaning up
        return answer
    await unless_disconnected(context.request, events.read())
    return context.answer(writer.response, generations)


async def input_tokens(context: RequestContext[schemas.InputTokensRequest]) -> Response:
    """The number of tokens of the prompt that a response would have."""
    body, state = context.body, context.state
    await state.adapters.for_openai(body.model)
    fields = {name: getattr(body, name) for name in body.__struct_fields__}
    # It decides on what happens to prompts that are too long, not on their length.
    request = schemas.ResponsesRequest(**{**fields, "truncation": None})
    _, _, conversation = await _prepare(request, state)
    tokens = await state.generator.images.count(conversation.spec)
    return json_response(schemas.InputTokens(input_tokens=tokens))


def _check_background(body: schemas.ResponsesRequest, state: RouterState) -> None:
    if not body.background:
        return
    if body.stream:
        raise errors.unsupported(
            "background", "`background` together with `stream`", "unsupported_value"
        )
    if not stores(body, state):
        raise errors.validation(
            "`background` needs a stored response (`store`, --response-store-bytes)", "background"
        )


async def _prepare(
    body: schemas.ResponsesRequest, state: RouterState
) -> tuple[Turn, ResponseChat, Conversation]:
    """The conversation of a request, as items, as a chat and as a prompt. Raises ApiError."""
    turn = await read_turn(body, state)
    count = len(turn.items) + len(body.tools or ())
    chat = await _off_loop(state, count, response_chat, body, turn.items)
    return turn, chat, await render_chat(chat.request, state)


async def _off_loop(state: RouterState, count: int, work: Callable[..., T], *args: Any) -> T:
    """The result of ``work``, by a worker if it has more than a few items to read."""
    if count <= INLINE_MESSAGES:
        return work(*args)
    return await state.workers.run(work, *args)


def _options(body: schemas.ResponsesRequest, chat: ResponseChat) -> WriterOptions:
    reasoning = body.reasoning or schemas.ReasoningOptions()
    return WriterOptions(
        events=bool(body.stream),
        names=chat.tools.names,
        summary=bool(reasoning.summary or reasoning.generate_summary),
        encrypted=_ENCRYPTED in (body.include or ()),
    )


def _response(body: schemas.ResponsesRequest, state: RouterState) -> schemas.ResponseObject:
    """The response before it has any output."""
    defaults = state.defaults
    choice = "auto" if body.tool_choice is None else body.tool_choice
    text = body.text or schemas.TextOptions()
    return schemas.ResponseObject(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        background=bool(body.background),
        frequency_penalty=body.frequency_penalty or 0.0,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=state.model_name(body.model),
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        presence_penalty=body.presence_penalty or 0.0,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=body.reasoning or schemas.ReasoningOptions(),
        safety_identifier=body.safety_identifier,
        store=stores(body, state),
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        text=schemas.TextOptions(
            format=text.format or {"type": "text"}, verbosity=text.verbosity or "medium"
        ),
        tool_choice=choice if isinstance(choice, str) else dict(choice),
        tools=[_echoed(tool) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        user=body.user,
    )


def _echoed(tool: dict[str, object]) -> dict[str, object]:
    """A tool as given; Open Responses requires all fields of functions."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}


async def _in_background(events: ResponseEvents, writer: ResponseWriter) -> None:
    """Generate a response in the background; its record has the outcome."""
    writer.response.status = "in_progress"
    try:
        await events.read()
    except errors.ApiError as error:
        events.fail(error)
    except asyncio.CancelledError:
        events.cancel()
    except Exception:  # a bug: clients that poll must not wait forever
        logger.exception("response failed")
        events.fail(errors.internal())


class ResponseEvents:
    """Writes a generation as a response, or as the events of its stream.

    Args:
        parser: Parses the answer. Default: it is plain text.
        logprobs: Log-probabilities of the text. Default: they are not reported.
        record: Stores the response. Default: it is not stored.
    """

    def __init__(
        self,
        writer: ResponseWriter,
        generation: Generation,
        parser: ResponseReader | None = None,
        logprobs: TextLogprobs | None = None,
        record: ResponseRecord | None = None,
    ) -> None:
        self._writer = writer
        self._generation = generation
        self._parser = parser
        self._logprobs = logprobs
        self._record = record
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
        if self._parser is not None:
            pieces = self._parser.push(text) if text else []
            if finish is not None:
                pieces += self._parser.finish(finish.reason is FinishReason.LENGTH)
        for piece in pieces:
            self._writer.add(piece, () if self._logprobs is None else self._logprobs.of(piece))
        if finish is None:
            return
        response = self._writer.response
        response.usage = self._usage()
        if finish.reason is FinishReason.LENGTH:
            response.incomplete_details = schemas.IncompleteDetails()
        self._save("incomplete" if response.incomplete_details else "completed")

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
        self._save("failed")
        return self._writer.take()

    def cancel(self) -> None:
        """End the response as cancelled."""
        self._save("cancelled")

    def end(self) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        return b""

    def _save(self, status: schemas.Status) -> None:
        """End the response, and store it before the client knows that it has ended."""
        self._writer.close(status)
        if self._record is not None:
            self._record.save()
        self._writer.announce_end()

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
INPUT_TOKENS = Operation(
    tag="OpenAI",
    body=(schemas.InputTokensRequest,),
    answer=(schemas.InputTokens,),
    errors=(404, 429, 503),
    example={"input": "Hello!"},
)

ROUTES = [
    *v1_endpoints("/responses", responses, RESPONSES),
    *v1_endpoints("/responses/input_tokens", input_tokens, INPUT_TOKENS),
]
