"""The messages of a chat request, in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tgi_cli.router.api.schemas.openai import ChatMessage
from tgi_cli.router.http import errors
from tgi_cli.text.chat_template import ChatTemplate
from tgi_cli.text.tools import as_text

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""OpenAI's roles; messages of all but the assistant must have content."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning in templates; all of them are set, as in transformers."""


def with_tools_as_text(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], tool_prompt: str | None
) -> list[dict[str, Any]]:
    """The messages for a template without tools, with any tools and calls as text."""
    if not tools and not any(m["role"] == "tool" or "tool_calls" in m for m in messages):
        return messages
    try:
        return as_text(messages, tools, tool_prompt)
    except RecursionError as error:
        raise errors.validation("`tools` are nested too deeply", "tools") from error


def template_message(index: int, message: ChatMessage, template: ChatTemplate) -> dict[str, Any]:
    """A message in the form of templates: text content, tool arguments as objects.

    Raises ApiError.
    """
    role = message.role
    if role not in _ROLES:
        raise errors.validation(
            f"messages[{index}].role must be one of {', '.join(_ROLES)}. Given: {role}", "messages"
        )
    if message.content is None and role != "assistant":
        raise errors.validation(f"messages[{index}] of role {role} has no `content`", "messages")
    if role == "developer" and "developer" not in template.text:
        role = "system"  # its older name
    rendered: dict[str, Any] = {"role": role, "content": _content(message)}
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            rendered[name] = value
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        rendered |= dict.fromkeys(_REASONING, reasoning)
    if message.tool_calls:
        rendered["tool_calls"] = [_call(call) for call in message.tool_calls]
    return rendered


def _content(message: ChatMessage) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    texts = []
    for part in message.content:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal") or text is None:
            raise errors.validation(
                f"content of type `{part.type}` is not supported by this model", "messages"
            )
        texts.append(text)
    return "".join(texts)


def _custom_call(custom: Any) -> dict[str, Any]:
    """The call of a custom tool as that of the function that it is for the model."""
    text = custom.get("input") if isinstance(custom, dict) else None
    if not isinstance(text, str):
        raise errors.validation("the call of a custom tool must have its `input`", "messages")
    return {"name": custom.get("name"), "arguments": {"input": text}}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if call.get("type") == "custom":
        function = _custom_call(call.get("custom"))
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise errors.validation("a tool call must name its function", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise errors.validation(
                f"tool call arguments are not valid JSON: {error}", "messages"
            ) from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise errors.validation("tool call arguments must be a JSON object", "messages")
    call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {
        **call_id,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
