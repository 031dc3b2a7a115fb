"""OpenAI's chat: ``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.router import errors
from tgi_cli.router.conversation import converse
from tgi_cli.router.delta import Delta
from tgi_cli.router.generation import Generation
from tgi_cli.router.http import json_response, read_json
from tgi_cli.router.merge import Whole, collect, merge
from tgi_cli.router.openai import (
    DONE,
    FINISH_REASONS,
    Identity,
    chat_logprobs,
    fail_stream,
    include_usage,
    usage_of,
)
from tgi_cli.router.schemas.openai import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ToolCall,
)
from tgi_cli.router.sse import EventStream
from tgi_cli.router.state import state_of
from tgi_cli.router.validation import request_timeout
from tgi_cli.text.calls import Arguments, Call
from tgi_cli.text.response_reader import Content, Message, Piece, ResponseReader
from tgi_cli.text.tokenizer import Tokenizer

_DECODER = msgspec.json.Decoder(ChatRequest)
_encode = msgspec.json.Encoder().encode

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that calls; TGI said ``stop``, which OpenAI's clients take for
the end of the conversation."""


async def chat_completions(request: Request) -> Response | EventStream:
    """The assistant's next message, whole or as a stream of chunks."""
    arrived = time.perf_counter()
    state = state_of(request)
    body = await read_json(request, _DECODER, state.config.payload_limit)
    try:
        adapter = await state.adapters.openai(body.model)
        conversation = await converse(body, state)
        timeout = request_timeout(request)
    except errors.ApiError as error:
        raise state.generator.refuse(error) from None
    spec = replace(conversation.to_generate(state.generator.stop_ids), adapter=adapter)
    generations = await state.generator.open([spec], arrived, timeout)
    identity = Identity.new("chatcmpl", body, state)
    characters = len(spec.prompt)
    readers = [conversation.reader() for _ in generations]
    if body.stream:
        encoder = ChatEvents(body, identity, generations, readers, state.text.tokenizer)
        return EventStream(merge(generations), encoder, state.stream_headers(characters))
    wholes = await collect(request, generations)
    answer = ChatCompletion(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        system_fingerprint=identity.system_fingerprint,
        choices=[
            _choice(body, whole, reader, state.text.tokenizer)
            for whole, reader in zip(wholes, readers, strict=True)
        ],
        usage=usage_of(generations),
    )
    return json_response(answer, state.timing_headers(generations, characters))


def _choice(
    body: ChatRequest, whole: Whole, reader: ResponseReader | None, tokenizer: Tokenizer
) -> ChatChoice:
    content = chat_logprobs(tokenizer, whole.tokens, whole.top_tokens) if body.logprobs else []
    message = AssistantMessage(content=whole.finish.text)
    reason = FINISH_REASONS[whole.finish.reason]
    if reader is not None:
        pieces = reader.push(whole.finish.text)
        read = Message.of([*pieces, *reader.finish(cut_off=reason == "length")])
        message.content = read.content
        if read.reasoning and body.include_reasoning is not False:
            message.reasoning_content = message.reasoning = read.reasoning
        if read.calls:
            message.content = read.content or None
            message.tool_calls = [
                ToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=arguments))
                for call, arguments in zip(read.calls, read.arguments, strict=True)
            ]
            reason = _with_calls(reason)
    return ChatChoice(
        index=whole.generation.index,
        message=message,
        logprobs=ChatLogprobs(content=content) if body.logprobs else None,
        finish_reason=reason,
    )


def _with_calls(reason: str) -> str:
    """The finish reason of an answer with calls: one that was cut off says so."""
    return reason if reason == "length" else TOOL_CALLS


class ChatEvents:
    """OpenAI's chunks: a choice's role first, then what comes, the reason with the last.

    Only the first has the role: OpenAI's clients add the strings of deltas up.
    """

    def __init__(
        self,
        body: ChatRequest,
        identity: Identity,
        generations: Sequence[Generation],
        readers: Sequence[ResponseReader | None],
        tokenizer: Tokenizer,
    ) -> None:
        self._generations = generations
        self._readers = readers
        self._tokenizer = tokenizer
        self._logprobs = bool(body.logprobs)
        self._reasoning = body.include_reasoning is not False
        self._usage = include_usage(body)
        head = identity.head("chat.completion.chunk")
        self._empty = head + b'[],"usage":'
        places = range(len(generations))
        self._heads = [head + b'[{"index":%d,"delta":{' % index for index in places]
        self._texts = [head + b'"content":' for head in self._heads]
        self._open = b'},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
        self._firsts = [head + b'"role":"assistant","content":""' + self._open
                        for head in self._heads]  # fmt: skip

    def encode(self, delta: Delta) -> bytes:
        """See :class:`tgi_cli.router.sse.EventEncoder`."""
        index = delta.index
        first, self._firsts[index] = self._firsts[index], b""
        reader = self._readers[index]
        pieces: list[Piece] = []
        if delta.text:
            pieces = [Content(delta.text)] if reader is None else reader.push(delta.text)
        if delta.finish is None and not self._logprobs:
            if not pieces:
                return first
            if len(pieces) == 1 and isinstance(pieces[0], Content):
                return first + self._texts[index] + _encode(pieces[0].text) + self._open
        reason = None if delta.finish is None else FINISH_REASONS[delta.finish.reason]
        if reader is not None and reason is not None:
            pieces += reader.finish(cut_off=reason == "length")
            if reader.calls:
                reason = _with_calls(reason)
        fields = self._fields(pieces)
        if not fields and reason is None and not self._logprobs:
            return first
        logprobs = b"null"
        if self._logprobs:
            content = chat_logprobs(self._tokenizer, delta.tokens, delta.top_tokens)
            logprobs = _encode(ChatLogprobs(content=content))
        return b'%b%b%b},"logprobs":%b,"finish_reason":%b}],"usage":null}\n\n' % (
            first,
            self._heads[index],
            _encode(fields)[1:-1],
            logprobs,
            _encode(reason),
        )

    def _fields(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What the pieces add to a message; one entry for each call that they concern."""
        fields: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if isinstance(piece, Call):
                function = {"name": piece.name, "arguments": ""}
                calls[piece.index] = {
                    "index": piece.index,
                    "id": piece.id,
                    "type": "function",
                    "function": function,
                }
            elif isinstance(piece, Arguments):
                entry = {"index": piece.index, "function": {"arguments": ""}}
                calls.setdefault(piece.index, entry)["function"]["arguments"] += piece.text
            elif isinstance(piece, Content):
                fields["content"] = fields.get("content", "") + piece.text
            elif self._reasoning:
                reasoning = fields.get("reasoning", "") + piece.text
                fields["reasoning_content"] = fields["reasoning"] = reasoning
        if calls:
            fields["tool_calls"] = list(calls.values())
        return fields

    def fail(self, error: errors.ApiError) -> bytes:
        """See :class:`tgi_cli.router.sse.EventEncoder`."""
        return fail_stream(error)

    def end(self) -> bytes:
        """See :class:`tgi_cli.router.sse.EventEncoder`."""
        if not self._usage:
            return DONE
        return self._empty + _encode(usage_of(self._generations)) + b"}\n\n" + DONE


ROUTES = [
    Route(path, chat_completions, methods=["POST"])
    for path in ("/v1/chat/completions", "/chat/completions")
]
