"""Translates a request for a response into a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import get_annotations
from typing import Any

from msgspec import UNSET

from tgi_cli.router.api.openai_parameters import check_stream_options, requested_logprobs
from tgi_cli.router.api.schemas.openai import (
    ChatMessage,
    ChatReasoning,
    ChatRequest,
    Function,
    SharedParameters,
    Tool,
)
from tgi_cli.router.api.schemas.refused import refuse
from tgi_cli.router.api.schemas.responses import (
    FunctionTool,
    ReasoningOptions,
    ResponsesRequest,
)
from tgi_cli.router.http import errors

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_LOGPROBS = "message.output_text.logprobs"
_SHARED = tuple(get_annotations(SharedParameters))
"""Fields that mean the same in both APIs."""


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """The equivalent chat request. Raises ApiError for what a stateless server cannot do."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name) is not None:
            raise errors.validation(
                f"`{name}` is not supported: this server keeps nothing, so send the whole "
                "conversation as `input`",
                name,
            )
    if body.background:
        raise errors.unsupported("background")
    if body.truncation not in (None, "disabled"):
        raise errors.unsupported(
            "truncation", "`truncation` other than `disabled`", "unsupported_value"
        )
    refuse(body)
    check_stream_options(body.stream, body.stream_options)
    requested_logprobs(body.top_logprobs, "top_logprobs")
    if body.max_output_tokens is not None and body.max_output_tokens <= 0:
        raise errors.validation(
            "`max_output_tokens` must be strictly positive", "max_output_tokens"
        )
    reasoning = body.reasoning or ReasoningOptions()
    messages = _messages(body.input)
    if body.instructions:
        messages.insert(0, ChatMessage(role="system", content=body.instructions))
    return ChatRequest(
        **{name: getattr(body, name) for name in _SHARED},
        messages=messages,
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        logprobs=reports_logprobs(body),
        top_logprobs=body.top_logprobs,
        tools=[_tool(index, tool) for index, tool in enumerate(body.tools or ())],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        reasoning=ChatReasoning(
            effort=reasoning.effort,
            max_tokens=None if reasoning.max_tokens is UNSET else reasoning.max_tokens,
        ),
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=False,
    )


def reports_logprobs(body: ResponsesRequest) -> bool:
    """Whether the request wants log-probabilities."""
    return bool(body.top_logprobs) or _LOGPROBS in (body.include or ())


def _tool(index: int, tool: FunctionTool) -> Tool:
    if tool.type != "function":
        raise errors.validation(
            f"tools[{index}] is of type {tool.type!r}: only functions can be called", "tools"
        )
    function = Function(
        name=tool.name or "",
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool(function=function)


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    """A chat's ``response_format``, with the schema's fields in an object of their own."""
    form = body.text.format if body.text else None
    if form is None or form.get("type") != "json_schema" or "json_schema" in form:
        return form
    fields = {key: value for key, value in form.items() if key != "type"}
    return {"type": "json_schema", "json_schema": fields}


def _messages(given: str | list[dict[str, Any]]) -> list[ChatMessage]:
    """Input items as messages; consecutive items of the assistant make one message."""
    if isinstance(given, str):
        return [ChatMessage(role="user", content=given)]
    messages: list[ChatMessage] = []
    reasoning = ""
    for index, item in enumerate(given):
        kind = item.get("type") or "message"
        if kind == "reasoning":
            reasoning += _text(index, item.get("content") or item.get("summary") or "")
            continue
        if kind == "function_call_output":
            messages.append(
                ChatMessage(
                    role="tool",
                    content=_text(index, item.get("output")),
                    tool_call_id=_string(index, item, "call_id"),
                )
            )
            continue
        if kind == "message":
            role = _string(index, item, "role")
            messages.append(ChatMessage(role=role, content=_text(index, item.get("content"))))
        elif kind == "function_call":
            if not messages or messages[-1].role != "assistant" or reasoning:
                messages.append(ChatMessage(role="assistant"))
            calls = messages[-1].tool_calls = messages[-1].tool_calls or []
            calls.append(_call(index, item))
        else:
            raise errors.validation(f"input[{index}] is of type {kind!r}: not supported", "input")
        if messages[-1].role == "assistant" and reasoning:
            messages[-1].reasoning_content, reasoning = reasoning, ""
    return messages


def _call(index: int, item: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": _string(index, item, "call_id"),
        "type": "function",
        "function": {
            "name": _string(index, item, "name"),
            "arguments": _string(index, item, "arguments"),
        },
    }


def _string(index: int, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise errors.validation(f"input[{index}] needs a text as `{name}`", "input")
    return value


def _text(index: int, content: Any) -> str:
    """The text of content, a string or parts. Raises ApiError for parts of other types."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise errors.validation(f"input[{index}] has no content", "input")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if (kind not in _TEXTS and kind != "refusal") or not isinstance(text, str):
            raise errors.validation(
                f"input[{index}]: content of type {kind!r} is not supported by this model", "input"
            )
        texts.append(text)
    return "".join(texts)
