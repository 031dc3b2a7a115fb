"""Translates a request for a response into a chat request."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import get_annotations
from typing import Any

from msgspec import UNSET

from tgi_cli.router import bounds
from tgi_cli.router.api.openai_parameters import check_stream_options, requested_logprobs
from tgi_cli.router.api.response_tools import ChatToolSet, chat_tool_set, flat_name
from tgi_cli.router.api.schemas.openai import (
    ChatMessage,
    ChatReasoning,
    ChatRequest,
    ContentPart,
    SharedParameters,
)
from tgi_cli.router.api.schemas.refused import refuse
from tgi_cli.router.api.schemas.responses import ReasoningOptions, ResponsesRequest
from tgi_cli.router.http import errors

Item = Mapping[str, Any]

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_LOGPROBS = "message.output_text.logprobs"
_SHARED = tuple(get_annotations(SharedParameters))
"""Fields that mean the same in both APIs."""

_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_TOOLS = ("additional_tools", "tool_search_output")
"""Items with tools that the model may call from then on."""
_HOSTED = frozenset(
    (
        "tool_search_call", "web_search_call", "file_search_call", "code_interpreter_call",
        "image_generation_call", "computer_call", "computer_call_output", "local_shell_call",
        "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call",
        "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request",
        "mcp_approval_response", "mcp_call", "program", "program_output",
    )
)  # fmt: skip
"""Traces of hosted tools, which clients send back that had answers from another server."""
_MOST_FURTHER_TOOLS = 4 * bounds.TOOLS
"""Tools in items, which clients repeat."""
_SEALED = "tgi1."
"""How the encrypted reasoning of this server begins."""


@dataclass(frozen=True, slots=True)
class ResponseChat:
    """A request for a response as a chat.

    Attributes:
        request: The chat.
        tools: Its tools, with their names in the response.
    """

    request: ChatRequest
    tools: ChatToolSet


def input_items(body: ResponsesRequest) -> Sequence[Item]:
    """The request's own items: text is a message of the user. Raises ApiError."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    if body.input is None and body.previous_response_id is None:
        raise errors.validation(
            "Missing required parameter: 'input'.", "input", "missing_required_parameter"
        )
    return body.input or []


def response_chat(body: ResponsesRequest, items: Sequence[Item]) -> ResponseChat:
    """The equivalent chat.

    Args:
        items: The whole conversation, with the items of earlier responses.

    Raises:
        ApiError: The request is invalid, or asks for something that this server cannot do.
    """
    _check(body)
    if len(items) > bounds.ITEMS:
        raise errors.validation(f"the conversation has more than {bounds.ITEMS} items", "input")
    reasoning = body.reasoning or ReasoningOptions()
    messages = _messages(items)
    if body.instructions:
        messages.insert(0, ChatMessage(role="system", content=body.instructions))
    tools = chat_tool_set(body.tools or (), _further_tools(items), body.tool_choice)
    request = ChatRequest(
        **{name: getattr(body, name) for name in _SHARED},
        messages=messages,
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        logprobs=reports_logprobs(body),
        top_logprobs=body.top_logprobs,
        tools=list(tools.tools),
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        reasoning=ChatReasoning(
            effort=reasoning.effort,
            max_tokens=None if reasoning.max_tokens is UNSET else reasoning.max_tokens,
        ),
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=False,
    )
    return ResponseChat(request, tools)


def reports_logprobs(body: ResponsesRequest) -> bool:
    """Whether the request wants log-probabilities."""
    return bool(body.top_logprobs) or _LOGPROBS in (body.include or ())


def sealed(reasoning: str) -> str:
    """The ``encrypted_content`` of reasoning: an opaque text that :func:`response_chat` reads.

    It is not encrypted: what the model thinks on a server of one's own is no secret.
    """
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def _unsealed(content: Any) -> str:
    """The reasoning in ``encrypted_content``; empty if another server wrote it."""
    if not isinstance(content, str) or not content.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(content[len(_SEALED) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _check(body: ResponsesRequest) -> None:
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise errors.unsupported(
                name, f"`{name}` (use `previous_response_id`, or send the whole `input`)"
            )
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


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    """A chat's ``response_format``, with the schema's fields in an object of their own."""
    form = body.text.format if body.text else None
    if form is None or form.get("type") != "json_schema" or "json_schema" in form:
        return form
    fields = {key: value for key, value in form.items() if key != "type"}
    return {"type": "json_schema", "json_schema": fields}


def _further_tools(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The tools in items. Raises ApiError."""
    found: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if item.get("type") not in _TOOLS:
            continue
        tools = item.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise errors.validation(f"input[{index}] needs a list of `tools`", "input")
        found += tools
        if len(found) > _MOST_FURTHER_TOOLS:
            raise errors.validation(f"`input` has more than {_MOST_FURTHER_TOOLS} tools", "input")
    return found


def _messages(items: Sequence[Item]) -> list[ChatMessage]:
    """Items as messages; consecutive items of the assistant make one message."""
    messages: list[ChatMessage] = []
    reasoning = ""
    for index, item in enumerate(items):
        kind = item.get("type") or "message"
        if not isinstance(kind, str):
            raise errors.validation(f"input[{index}] needs a text as `type`", "input")
        if kind in _HOSTED or kind in _TOOLS:
            continue
        if kind == "reasoning":
            reasoning += _reasoning(index, item)
            continue
        if kind in _OUTPUTS:
            messages.append(
                ChatMessage(
                    role="tool",
                    content=_content(index, item.get("output")),
                    tool_call_id=_string(index, item, "call_id"),
                )
            )
            continue
        if kind == "message":
            role = _string(index, item, "role")
            messages.append(ChatMessage(role=role, content=_content(index, item.get("content"))))
        elif kind in _CALLS:
            if not messages or messages[-1].role != "assistant" or reasoning:
                messages.append(ChatMessage(role="assistant"))
            calls = messages[-1].tool_calls = messages[-1].tool_calls or []
            calls.append(_call(index, item))
        elif kind in ("compaction", "compaction_summary"):
            raise errors.validation(
                f"input[{index}] is of type {kind!r}: only the server that wrote it can read it",
                "input",
            )
        else:
            raise errors.validation(f"input[{index}] is of type {kind!r}: not supported", "input")
        if messages[-1].role == "assistant" and reasoning:
            messages[-1].reasoning_content, reasoning = reasoning, ""
    return messages


def _reasoning(index: int, item: Item) -> str:
    content = item.get("content")
    if content:
        return _text(index, content)
    return _unsealed(item.get("encrypted_content")) or _text(index, item.get("summary") or "")


def _call(index: int, item: Item) -> dict[str, Any]:
    """A call of a message."""
    namespace = item.get("namespace")
    name = flat_name(
        namespace if isinstance(namespace, str) else None, _string(index, item, "name")
    )
    call_id = _string(index, item, "call_id")
    if item.get("type") == "custom_tool_call":
        custom = {"name": name, "input": _string(index, item, "input")}
        return {"id": call_id, "type": "custom", "custom": custom}
    function = {"name": name, "arguments": _string(index, item, "arguments")}
    return {"id": call_id, "type": "function", "function": function}


def _string(index: int, item: Item, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise errors.validation(f"input[{index}] needs a text as `{name}`", "input")
    return value


def _content(index: int, content: Any) -> str | list[ContentPart]:
    """The content of a message or an output: a string, or parts if it has images.

    Raises ApiError for parts of other types.
    """
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return _text(index, content)
    return [
        _image(index, part)
        if _is_image(part)
        else ContentPart(type="text", text=_text(index, [part]))
        for part in content
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _image(index: int, part: Item) -> ContentPart:
    """The image of a part. Raises ApiError."""
    url, detail = part.get("image_url"), part.get("detail")
    if part.get("file_id") is not None:
        raise errors.validation(
            f"input[{index}]: an image may not be a `file_id`: this server keeps no files", "input"
        )
    if not isinstance(url, str) or not (detail is None or isinstance(detail, str)):
        raise errors.validation(
            f"input[{index}]: an `input_image` needs a text as `image_url`", "input"
        )
    return ContentPart(type="input_image", image_url=url, detail=detail)


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
