"""Anthropic's Messages: ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``.

A message is a chat by other names; betas that change neither the prompt nor the answer are
accepted.
"""

from __future__ import annotations

import uuid
from dataclasses import replace

from starlette.responses import Response

from tgi_cli.engine.messages import FinishReason
from tgi_cli.router.api.message_input import blocks_of, chat_request
from tgi_cli.router.api.message_writer import PING, MessageWriter
from tgi_cli.router.api.openai_common import v1_endpoints
from tgi_cli.router.api.schemas import messages as schemas
from tgi_cli.router.generation.chat_prompt import INLINE_MESSAGES, Conversation, render_chat
from tgi_cli.router.generation.deltas import Delta, Finish
from tgi_cli.router.generation.generation import Generation
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import json_response
from tgi_cli.router.http.endpoint import Operation, RequestContext
from tgi_cli.router.http.error_styles import ANTHROPIC
from tgi_cli.router.http.sse import KEEP_ALIVE, EventStream
from tgi_cli.router.state import RouterState
from tgi_cli.text.custom_calls import ResponseReader
from tgi_cli.text.response_parser import Content, ResponsePart


async def messages(context: RequestContext[schemas.MessagesRequest]) -> Response | EventStream:
    """The assistant's answer as blocks, complete or as a stream of events."""
    body, state = context.body, context.state
    with context.preparing():
        adapter = await state.adapters.for_openai(body.model)
        conversation = await _conversation(body, state)
    spec = replace(conversation.to_generate(state.generator.stop_ids), adapter=adapter)
    if body.max_tokens == 0:
        spec = replace(spec, prompt_only=True, max_new_tokens=1, grammar=None)
    images = bool(spec.images)
    try:
        (generation,) = await context.open([spec], chat=True)
    except errors.ApiError as error:
        if error.overflow is not None and not images:
            # Long prompts are not encoded to the end, but agents read how much to drop.
            tokens = await state.generator.images.count(conversation.spec)
            error.overflow = tokens, error.overflow[1]
        raise
    message = schemas.Message(
        id=f"msg_{uuid.uuid4().hex}",
        model=state.model_name(body.model),
        content=[],
        usage=schemas.MessageUsage(
            input_tokens=generation.prompt_tokens, cache_read_input_tokens=0, output_tokens=0
        ),
    )
    writer = MessageWriter(message, bool(body.stream), _shown_thinking(body))
    parser = conversation.parser()
    events = MessageEvents(writer, generation, parser, body.max_tokens)
    if body.stream:
        return context.stream(generation, events, len(spec.prompt), events.keep_alive)
    (whole,) = await context.collect([generation])
    events.add_whole(whole.finish)
    return context.answer(message, [generation])


async def count_tokens(context: RequestContext[schemas.CountTokensRequest]) -> Response:
    """The number of tokens of the prompt that a message would have."""
    body, state = context.body, context.state
    await state.adapters.for_openai(body.model)
    conversation = await _conversation(body, state)
    tokens = await state.generator.images.count(conversation.spec)
    return json_response(schemas.TokenCount(input_tokens=tokens))


async def _conversation(body: schemas.MessagesInput, state: RouterState) -> Conversation:
    if blocks_of(body) <= INLINE_MESSAGES:
        chat = chat_request(body)
    else:
        chat = await state.workers.run(chat_request, body)
    return await render_chat(chat, state)


def _shown_thinking(body: schemas.MessagesInput) -> str:
    """What :class:`MessageWriter` does with reasoning."""
    if body.thinking is None:
        return "shown"
    if body.thinking.type == "disabled":
        return "dropped"
    return "hidden" if body.thinking.display == "omitted" else "shown"


class MessageEvents:
    """Writes a generation as a message, or as the events of its stream.

    Args:
        max_tokens: The requested length; the context may end before.
    """

    def __init__(
        self,
        writer: MessageWriter,
        generation: Generation,
        parser: ResponseReader | None,
        max_tokens: int,
    ) -> None:
        self._writer = writer
        self._generation = generation
        self._parser = parser
        self._max_tokens = max_tokens
        self._begun = False

    def add_whole(self, finish: Finish) -> None:
        """Write a whole answer."""
        self._add(finish.text, finish)

    def encode(self, delta: Delta) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        self._add(delta.text, delta.finish)
        return self._writer.take()

    def keep_alive(self) -> bytes:
        """A ping; before the first event, which clients want to be the message's, a comment."""
        return PING if self._begun else KEEP_ALIVE

    def fail(self, error: errors.ApiError) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        return b"event: error\ndata: %b\n\n" % ANTHROPIC.body(ANTHROPIC.renamed(error))

    def end(self) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        return b""

    def _add(self, text: str, finish: Finish | None) -> None:
        generation, writer = self._generation, self._writer
        if not self._begun:
            self._begun = True
            usage = writer.message.usage
            usage.cache_read_input_tokens = generation.cached_tokens
            usage.input_tokens = generation.prompt_tokens - generation.cached_tokens
            writer.begin()
        pieces: list[ResponsePart] = [Content(text)] if text else []
        if self._parser is not None:
            pieces = self._parser.push(text) if text else []
            if finish is not None:
                pieces += self._parser.finish(finish.reason is FinishReason.LENGTH)
        for piece in pieces:
            writer.add(piece)
        if finish is not None:
            self._finish(finish)

    def _finish(self, finish: Finish) -> None:
        writer = self._writer
        usage = writer.message.usage
        usage.output_tokens = finish.generated_tokens if self._max_tokens else 0
        usage.output_tokens_details = schemas.ThinkingUsage(
            thinking_tokens=self._generation.reasoning_tokens if self._max_tokens else 0
        )
        reason: schemas.StopReason = "end_turn"
        if finish.reason is FinishReason.LENGTH:
            cut = finish.generated_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if cut else "max_tokens"
        elif writer.calls:
            reason = "tool_use"
        elif finish.stop is not None:
            reason = "stop_sequence"
        writer.end(reason, finish.stop if reason == "stop_sequence" else None)


_PROMPT = {"model": "tgi", "messages": [{"role": "user", "content": "Hello!"}]}
MESSAGES = Operation(
    tag="Anthropic",
    body=(schemas.MessagesRequest,),
    answer=(schemas.Message,),
    events=(schemas.MessageEvent,),
    errors=(404,),
    generates=True,
    example={**_PROMPT, "max_tokens": 20},
)
COUNT_TOKENS = Operation(
    tag="Anthropic",
    body=(schemas.CountTokensRequest,),
    answer=(schemas.TokenCount,),
    errors=(404, 429, 503),
    example=_PROMPT,
)

ROUTES = [
    *v1_endpoints("/messages/count_tokens", count_tokens, COUNT_TOKENS),
    *v1_endpoints("/messages", messages, MESSAGES),
]
