"""OpenAI's chat: ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from tgi_cli.router.api.openai_common import (
    DONE,
    FINISH_REASONS,
    GENERATION,
    Identity,
    StreamUsage,
    chat_logprobs,
    chat_report,
    fail_stream,
    timings_of,
    usage_of,
    v1_endpoints,
)
from tgi_cli.router.api.schemas import openai_answers as schemas
from tgi_cli.router.api.schemas.openai import ChatRequest
from tgi_cli.router.generation.chat_prompt import render_chat
from tgi_cli.router.generation.deltas import Delta
from tgi_cli.router.generation.generation import Generation
from tgi_cli.router.generation.merge import Whole, merge
from tgi_cli.router.generation.thinking import includes_reasoning
from tgi_cli.router.http import errors
from tgi_cli.router.http.endpoint import RequestContext
from tgi_cli.router.http.sse import EventStream
from tgi_cli.router.state import RouterState
from tgi_cli.text.custom_calls import ResponseReader
from tgi_cli.text.formats.calls import ToolCallArguments, ToolCallStart
from tgi_cli.text.response_parser import Content, ParsedResponse, ResponsePart
from tgi_cli.text.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer with tool calls. TGI used ``stop``, which OpenAI's clients take
for the end of the conversation."""

_ARGUMENTS = {False: ("function", "arguments"), True: ("custom", "input")}
"""Keys of a call and of what follows its name, by whether the tool is custom."""


async def chat_completions(context: RequestContext[ChatRequest]) -> Response | EventStream:
    """The assistant's next message, complete or as a stream of chunks."""
    body, state = context.body, context.state
    with context.preparing():
        adapter = await state.adapters.for_openai(body.model, body.adapter_id)
        conversation = await render_chat(body, state)
    spec = replace(conversation.to_generate(state.generator.stop_ids), adapter=adapter)
    generations = await context.open([spec], chat=True)
    identity = Identity.new("chatcmpl", body, state)
    readers = [conversation.parser() for _ in generations]
    if body.stream:
        encoder = ChatEvents(
            body, identity, generations, readers, state.text.tokenizer, conversation.echoed
        )
        return context.stream(merge(generations), encoder, len(spec.prompt))
    wholes = await context.collect(generations)
    answer = schemas.ChatCompletion(
        **identity.fields(),
        choices=[
            _choice(body, whole, reader, await _report(body, whole, state), conversation.echoed)
            for whole, reader in zip(wholes, readers, strict=True)
        ],
        usage=usage_of(generations),
    )
    if body.timings_per_token:
        answer.timings = timings_of(generations)
    if body.return_token_ids:
        answer.prompt_token_ids = generations[0].prompt_ids
    return context.answer(answer, generations)


def _reports(body: ChatRequest) -> bool:
    """Whether the request wants log-probabilities, by OpenAI's parameter or TGI's."""
    return bool(body.logprobs or body.top_n_tokens)


async def _report(
    body: ChatRequest, whole: Whole, state: RouterState
) -> schemas.ChatLogprobs | None:
    if not _reports(body):
        return None
    content = await chat_report(
        state.workers,
        state.text.tokenizer,
        whole.tokens,
        whole.top_tokens,
        bool(body.return_tokens_as_token_ids),
    )
    return schemas.ChatLogprobs(content=content)


def _choice(
    body: ChatRequest,
    whole: Whole,
    reader: ResponseReader | None,
    logprobs: schemas.ChatLogprobs | None,
    echoed: str,
) -> schemas.ChatChoice:
    message = schemas.AssistantMessage(content=whole.finish.text)
    reason = FINISH_REASONS[whole.finish.reason]
    if reader is not None:
        pieces = reader.push(whole.finish.text)
        read = ParsedResponse.of([*pieces, *reader.finish(cut_off=reason == "length")])
        message.content = read.content
        if read.reasoning and includes_reasoning(body):
            message.reasoning_content = message.reasoning = read.reasoning
        if read.calls:
            message.content = read.content or None
            message.tool_calls = [
                _tool_call(call, arguments)
                for call, arguments in zip(read.calls, read.arguments, strict=True)
            ]
            reason = _with_calls(reason)
    if echoed:
        message.content = echoed + (message.content or "")
    return schemas.ChatChoice(
        index=whole.generation.index,
        message=message,
        logprobs=logprobs,
        finish_reason=reason,
        token_ids=[token.id for token in whole.tokens] if body.return_token_ids else UNSET,
    )


def _tool_call(call: ToolCallStart, arguments: str) -> schemas.ToolCall:
    if call.custom:
        custom = schemas.CalledCustom(name=call.name, input=arguments)
        return schemas.ToolCall(id=call.id, type="custom", custom=custom)
    function = schemas.CalledFunction(name=call.name, arguments=arguments)
    return schemas.ToolCall(id=call.id, function=function)


def _with_calls(reason: str) -> str:
    """The finish reason of an answer with tool calls, unless it was cut off."""
    return reason if reason == "length" else TOOL_CALLS


class ChatEvents:
    """OpenAI's chunks: a choice's first has the role, its last the finish reason.

    Only the first has the role because OpenAI's clients concatenate the strings of deltas.
    """

    def __init__(
        self,
        body: ChatRequest,
        identity: Identity,
        generations: Sequence[Generation],
        readers: Sequence[ResponseReader | None],
        tokenizer: Tokenizer,
        echoed: str,
    ) -> None:
        self._generations = generations
        self._readers = readers
        self._tokenizer = tokenizer
        self._logprobs = _reports(body)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._token_ids = bool(body.return_token_ids)
        self._reasoning = includes_reasoning(body)
        self._usage = StreamUsage.of(body.stream_options)
        self._timings = bool(body.timings_per_token)
        head = identity.head("chat.completion.chunk")
        self._empty = head + b'[],"usage":'
        self._heads = [head + b'[{"index":%d,"delta":{' % i for i in range(len(generations))]
        self._texts = [head + b'"content":' for head in self._heads]
        self._open = b'},"logprobs":null,"finish_reason":null'
        self._end = b'}],"usage":null}\n\n'
        role = b'"role":"assistant","content":' + _encode(echoed)
        self._firsts = [head + role + self._open for head in self._heads]

    def encode(self, delta: Delta) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        index = delta.index
        end = self._end
        if self._usage is StreamUsage.EACH or self._timings:
            end = self._detailed_end(self._generations[index])
        first, self._firsts[index] = self._firsts[index], b""
        if first:
            first += self._prompt_ids(index, end) if self._token_ids else end
        reader = self._readers[index]
        pieces: list[ResponsePart] = []
        if delta.text:
            pieces = [Content(delta.text)] if reader is None else reader.push(delta.text)
        detailed = self._logprobs or (self._token_ids and bool(delta.tokens))
        if delta.finish is None and not detailed:
            if not pieces:
                return first
            if len(pieces) == 1 and isinstance(pieces[0], Content):
                return first + self._texts[index] + _encode(pieces[0].text) + self._open + end
        reason = None if delta.finish is None else FINISH_REASONS[delta.finish.reason]
        if reader is not None and reason is not None:
            pieces += reader.finish(cut_off=reason == "length")
            if reader.calls:
                reason = _with_calls(reason)
        fields = self._fields(pieces)
        if not fields and reason is None and not detailed:
            return first
        logprobs = b"null"
        if self._logprobs:
            content = chat_logprobs(self._tokenizer, delta.tokens, delta.top_tokens, self._as_ids)
            logprobs = _encode(schemas.ChatLogprobs(content=content))
        ids = b""
        if self._token_ids:
            ids = b',"token_ids":' + _encode([token.id for token in delta.tokens])
        return b'%b%b%b},"logprobs":%b,"finish_reason":%b%b%b' % (
            first,
            self._heads[index],
            _encode(fields)[1:-1],
            logprobs,
            _encode(reason),
            ids,
            end,
        )

    def _detailed_end(self, generation: Generation) -> bytes:
        """The end of a chunk with the usage or the timings so far."""
        usage = b"null"
        if self._usage is StreamUsage.EACH:
            usage = _encode(usage_of([generation]))
        timings = b',"timings":' + _encode(timings_of([generation])) if self._timings else b""
        return b'}],"usage":%b%b}\n\n' % (usage, timings)

    def _prompt_ids(self, index: int, end: bytes) -> bytes:
        """The end of a choice's first chunk, with the ids of its prompt."""
        ids = _encode(self._generations[index].prompt_ids)
        return b'}],"prompt_token_ids":' + ids + end[2:]

    def _fields(self, pieces: Sequence[ResponsePart]) -> dict[str, Any]:
        """The delta that the pieces make, with one entry for each tool call."""
        fields: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if isinstance(piece, ToolCallStart):
                kind, text = _ARGUMENTS[piece.custom]
                calls[piece.index] = {
                    "index": piece.index,
                    "id": piece.id,
                    "type": kind,
                    kind: {"name": piece.name, text: ""},
                }
            elif isinstance(piece, ToolCallArguments):
                kind, text = _ARGUMENTS[piece.custom]
                entry = {"index": piece.index, kind: {text: ""}}
                calls.setdefault(piece.index, entry)[kind][text] += piece.text
            elif isinstance(piece, Content):
                fields["content"] = fields.get("content", "") + piece.text
            elif self._reasoning:
                reasoning = fields.get("reasoning", "") + piece.text
                fields["reasoning_content"] = fields["reasoning"] = reasoning
        if calls:
            fields["tool_calls"] = list(calls.values())
        return fields

    def fail(self, error: errors.ApiError) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        return fail_stream(error)

    def end(self) -> bytes:
        """See :class:`tgi_cli.router.http.sse.EventEncoder`."""
        if not self._usage.at_end:
            return DONE
        return self._empty + _encode(usage_of(self._generations)) + b"}\n\n" + DONE


CHAT = replace(
    GENERATION,
    body=(ChatRequest,),
    answer=(schemas.ChatCompletion,),
    events=(schemas.ChatCompletionChunk, schemas.OpenAIErrorResponse),
    example={"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20},
)

ROUTES = v1_endpoints("/chat/completions", chat_completions, CHAT)
