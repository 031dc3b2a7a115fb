"""The tools of a chat request, and which of them the model must call."""

from __future__ import annotations

from typing import Any

from tgi_cli.router.api.schemas.openai import ChatRequest, Tool
from tgi_cli.router.http import errors
from tgi_cli.text.response_format import ResponseFormat


def chat_tools(body: ChatRequest, form: ResponseFormat | None) -> list[dict[str, Any]]:
    """The tools that the model may call, as templates expect them. Raises ApiError."""
    tools = [_tool(index, tool) for index, tool in enumerate(body.tools or ())]
    names = [tool["function"]["name"] for tool in tools]
    choice = "auto" if body.tool_choice is None else body.tool_choice
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or choice.get("type", "function") != "function":
            raise errors.validation("`tool_choice` must name a function", "tool_choice")
    else:
        name = None if choice in ("auto", "none", "required") else choice
    if name is not None and name not in names:
        raise errors.validation(f"`tool_choice` names {name!r}, which is no tool", "tool_choice")
    if choice == "required" and not tools:
        raise errors.validation("`tool_choice` is `required`, and `tools` has none", "tool_choice")
    if choice == "none" or not tools:
        return []
    if form is None or not form.knows_tools:
        raise errors.validation(
            "the server does not know how this model writes tool calls (see --tool-call-parser)",
            "tools",
        )
    return tools


def _tool(index: int, tool: Tool) -> dict[str, Any]:
    function = tool.function
    if tool.type != "function" or function is None:
        raise errors.validation(
            f"tools[{index}] is of type {tool.type!r}: only functions can be called", "tools"
        )
    if not function.name:
        raise errors.validation(f"tools[{index}] has no name", "tools")
    parameters = function.arguments if function.parameters is None else function.parameters
    fields = {
        "name": function.name,
        "description": function.description,
        "parameters": parameters,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in fields.items() if value is not None},
    }
