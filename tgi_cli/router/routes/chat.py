"""OpenAI's chat: ``POST /v1/chat/completions``."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.router import errors
from tgi_cli.router.delta import Delta, Token
from tgi_cli.router.generation import Generation
from tgi_cli.router.http import json_response, read_json, unless_gone
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
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    Message,
)
from tgi_cli.router.spec import GenerationSpec
from tgi_cli.router.sse import EventStream
from tgi_cli.router.state import RouterState, state_of
from tgi_cli.router.validation import openai_specs
from tgi_cli.text.chat import ChatTemplateError
from tgi_cli.text.tokenizer import Tokenizer

_DECODER = msgspec.json.Decoder(ChatRequest)
_encode = msgspec.json.Encoder().encode


async def chat_completions(request: Request) -> Response | EventStream:
    """The assistant's next message, whole or as a stream of chunks."""
    arrived = time.perf_counter()
    state = state_of(request)
    body = await read_json(request, _DECODER, state.config.payload_limit)
    try:
        spec = _spec(body, state)
    except errors.ApiError as error:
        raise state.generator.refuse(error) from None
    (generation,) = await state.generator.open([spec], arrived)
    identity = Identity.new("chatcmpl", body, state)
    characters = len(spec.prompt)
    if body.stream:
        encoder = ChatEvents(body, identity, generation, state.text.tokenizer)
        return EventStream(generation, encoder, state.stream_headers(characters))
    try:
        choice = await unless_gone(
            request, _collect(generation, bool(body.logprobs), state.text.tokenizer)
        )
    finally:
        generation.close()
    answer = ChatCompletion(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        system_fingerprint=identity.system_fingerprint,
        choices=[choice],
        usage=usage_of([generation]),
    )
    return json_response(answer, state.timing_headers([generation], characters))


async def _collect(generation: Generation, logprobs: bool, tokenizer: Tokenizer) -> ChatChoice:
    tokens: list[Token] = []
    top_tokens: list[list[Token]] = []
    async for delta in generation:
        if logprobs:
            tokens.extend(delta.tokens)
            top_tokens.extend(delta.top_tokens)
        if delta.finish is not None:
            content = chat_logprobs(tokenizer, tokens, top_tokens)
            return ChatChoice(
                index=0,
                message=AssistantMessage(content=delta.finish.text),
                logprobs=ChatLogprobs(content=content) if logprobs else None,
                finish_reason=FINISH_REASONS[delta.finish.reason],
            )
    raise errors.incomplete()


def _spec(body: ChatRequest, state: RouterState) -> GenerationSpec:
    """Validate, and render the conversation. Raises ApiError."""
    for name, given in (
        ("tools", bool(body.tools)),
        ("functions", bool(body.functions)),
        ("tool_choice", body.tool_choice not in (None, "none", "auto")),
        ("function_call", body.function_call not in (None, "none", "auto")),
        ("chat_template_kwargs", bool(body.chat_template_kwargs)),
    ):
        if given:
            raise errors.unsupported(name)
    if body.top_logprobs and not body.logprobs:
        raise errors.validation("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    if not body.messages:
        raise errors.validation("`messages` cannot be empty", "messages")
    messages = [_template_message(message) for message in body.messages]
    if state.text.chat_template is None:
        raise errors.template("template not found")
    # Check the parameters first: rendering costs more.
    max_tokens = body.max_completion_tokens
    specs = openai_specs(
        body,
        [""],
        state.config,
        max_tokens=body.max_tokens if max_tokens is None else max_tokens,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
        add_special_tokens=False,
    )
    try:
        prompt = state.text.chat_template.render(messages)
    except ChatTemplateError as error:
        raise errors.template(str(error)) from error
    return replace(specs[0], prompt=prompt)


def _template_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: text content, tool arguments as objects."""
    rendered: dict[str, Any] = {"role": message.role}
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text" or part.text is None:
                raise errors.validation(
                    f"content of type `{part.type}` is not supported by this model", "messages"
                )
        rendered["content"] = "".join(part.text or "" for part in message.content)
    else:
        rendered["content"] = message.content or ""
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            rendered[name] = value
    if message.tool_calls:
        rendered["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return rendered


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise errors.validation(f"tool call arguments are no JSON: {error}", "messages") from error
    return {**call, "function": {**function, "arguments": arguments}}


class ChatEvents:
    """OpenAI's chunks: the role first, then text as it comes, the reason with the last."""

    def __init__(
        self, body: ChatRequest, identity: Identity, generation: Generation, tokenizer: Tokenizer
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._logprobs = bool(body.logprobs)
        self._usage = include_usage(body)
        head = identity.head("chat.completion.chunk")
        self._empty = head + b'[],"usage":'
        self._head = head + b'[{"index":0,"delta":{'
        self._text = self._head + b'"content":'
        self._open = b'},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
        self._first = self._head + b'"role":"assistant","content":""' + self._open

    def encode(self, delta: Delta) -> bytes:
        """See :class:`tgi_cli.router.sse.EventEncoder`."""
        first, self._first = self._first, b""
        if delta.finish is None and not self._logprobs:
            return first + self._text + _encode(delta.text) + self._open if delta.text else first
        logprobs = b"null"
        if self._logprobs:
            content = chat_logprobs(self._tokenizer, delta.tokens, delta.top_tokens)
            logprobs = _encode(ChatLogprobs(content=content))
        text = b'"content":' + _encode(delta.text) if delta.text else b""
        reason = None if delta.finish is None else FINISH_REASONS[delta.finish.reason]
        return b'%b%b%b},"logprobs":%b,"finish_reason":%b}],"usage":null}\n\n' % (
            first,
            self._head,
            text,
            logprobs,
            _encode(reason),
        )

    def fail(self, error: errors.ApiError) -> bytes:
        """See :class:`tgi_cli.router.sse.EventEncoder`."""
        return fail_stream(error)

    def end(self) -> bytes:
        """See :class:`tgi_cli.router.sse.EventEncoder`."""
        if not self._usage:
            return DONE
        return self._empty + _encode(usage_of([self._generation])) + b"}\n\n" + DONE


ROUTES = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
