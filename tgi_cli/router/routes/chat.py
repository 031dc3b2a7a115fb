"""OpenAI's chat: ``POST /v1/chat/completions``."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.router import errors
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
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    Message,
)
from tgi_cli.router.spec import GenerationSpec
from tgi_cli.router.sse import EventStream
from tgi_cli.router.state import RouterState, state_of
from tgi_cli.router.validation import openai_specs, request_timeout
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
        adapter = await state.adapters.openai(body.model)
        spec = replace(_spec(body, state), adapter=adapter)
        timeout = request_timeout(request)
    except errors.ApiError as error:
        raise state.generator.refuse(error) from None
    generations = await state.generator.open([spec], arrived, timeout)
    identity = Identity.new("chatcmpl", body, state)
    characters = len(spec.prompt)
    if body.stream:
        encoder = ChatEvents(body, identity, generations, state.text.tokenizer)
        return EventStream(merge(generations), encoder, state.stream_headers(characters))
    wholes = await collect(request, generations)
    answer = ChatCompletion(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        system_fingerprint=identity.system_fingerprint,
        choices=[_choice(whole, bool(body.logprobs), state.text.tokenizer) for whole in wholes],
        usage=usage_of(generations),
    )
    return json_response(answer, state.timing_headers(generations, characters))


def _choice(whole: Whole, logprobs: bool, tokenizer: Tokenizer) -> ChatChoice:
    content = chat_logprobs(tokenizer, whole.tokens, whole.top_tokens) if logprobs else []
    return ChatChoice(
        index=whole.generation.index,
        message=AssistantMessage(content=whole.finish.text),
        logprobs=ChatLogprobs(content=content) if logprobs else None,
        finish_reason=FINISH_REASONS[whole.finish.reason],
    )


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
        state.client.info,
        state.text.tokenizer,
        state.defaults,
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
    """OpenAI's chunks: a choice's role first, then text as it comes, the reason with the last."""

    def __init__(
        self,
        body: ChatRequest,
        identity: Identity,
        generations: Sequence[Generation],
        tokenizer: Tokenizer,
    ) -> None:
        self._generations = generations
        self._tokenizer = tokenizer
        self._logprobs = bool(body.logprobs)
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
        if delta.finish is None and not self._logprobs:
            if not delta.text:
                return first
            return first + self._texts[index] + _encode(delta.text) + self._open
        logprobs = b"null"
        if self._logprobs:
            content = chat_logprobs(self._tokenizer, delta.tokens, delta.top_tokens)
            logprobs = _encode(ChatLogprobs(content=content))
        text = b'"content":' + _encode(delta.text) if delta.text else b""
        reason = None if delta.finish is None else FINISH_REASONS[delta.finish.reason]
        return b'%b%b%b},"logprobs":%b,"finish_reason":%b}],"usage":null}\n\n' % (
            first,
            self._heads[index],
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
        return self._empty + _encode(usage_of(self._generations)) + b"}\n\n" + DONE


ROUTES = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
