"""The tools of a chat request: their kinds, and which of them the model may or must call.

There are functions, and custom tools, which take free text that a grammar may describe
(https://platform.openai.com/docs/guides/function-calling#custom-tools). Models know functions only:
a custom tool is one for them, with the text as its argument ``input``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tgi_cli.router import bounds
from tgi_cli.router.api.schemas.openai import ChatRequest, Tool
from tgi_cli.router.http import errors
from tgi_cli.text.response_format import ResponseFormat
from tgi_cli.text.tools import tool_grammar

_SYNTAXES = {
    "lark": "Text of this Lark grammar:\n",
    "regex": "Text that this regular expression matches: ",
}


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of a chat.

    Attributes:
        offered: Those in the prompt, in the form that templates expect.
        allowed: Those that the model may call.
        choice: ``auto``, ``required``, or ``{"function": {"name": NAME}}``.
        strict: Names of functions whose schemas must compile.
        custom: Names of custom tools.
        grammars: For custom tools with a grammar ``{"lark": ...}`` or ``{"regex": ...}``.
    """

    offered: Sequence[Mapping[str, Any]] = ()
    allowed: Sequence[Mapping[str, Any]] = ()
    choice: str | Mapping[str, Any] = "auto"
    strict: frozenset[str] = frozenset()
    custom: frozenset[str] = frozenset()
    grammars: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def chat_tools(body: ChatRequest, form: ResponseFormat | None, constrained: bool) -> ChatTools:
    """Read ``tools`` and ``tool_choice``.

    Tools that are not among the allowed ones stay in the prompt, so that its beginning does not
    depend on the choice, provided that a grammar keeps the model from calling them.

    Args:
        constrained: The server supports grammars.

    Raises:
        ApiError: They are invalid, or the format of the model's calls is unknown.
    """
    given = body.tools or []
    tools = [_tool(index, tool) for index, tool in enumerate(given)]
    names = [tool["function"]["name"] for tool in tools]
    custom = frozenset(
        name for name, tool in zip(names, given, strict=True) if tool.custom is not None
    )
    if custom and len(set(names)) < len(names):
        raise errors.validation("two of the `tools` have the same name", "tools")
    choice, allowed = _choice(body.tool_choice, names)
    if choice == "none":
        return ChatTools()
    if choice == "required" and not allowed:
        raise errors.validation("`tool_choice` is `required`, and `tools` has none", "tool_choice")
    if not allowed:
        return ChatTools()
    if form is None or not form.knows_tools:
        raise errors.validation(
            "the server does not know how this model writes tool calls (see --tool-call-parser)",
            "tools",
        )
    callable_tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    offered = tools
    if len(callable_tools) < len(tools):
        tag = tool_grammar(callable_tools, "auto", True, form.tools) if constrained else None
        if tag is None or not tag["triggers"][0]:
            offered = callable_tools
    return ChatTools(
        offered=offered,
        allowed=callable_tools,
        choice=choice,
        strict=frozenset(
            tool.function.name for tool in given if tool.function and tool.function.strict
        ),
        custom=custom & allowed,
        grammars={
            tool.custom.name: grammar
            for index, tool in enumerate(given)
            if tool.custom is not None
            and tool.custom.name in allowed
            and (grammar := _grammar(index, tool)) is not None
        },
    )


def _choice(
    given: str | Mapping[str, Any] | None, names: Sequence[str]
) -> tuple[str | Mapping[str, Any], frozenset[str]]:
    """The choice, and the names of the tools that may be called. Raises ApiError."""
    every = frozenset(names)
    if given is None:
        return "auto", every
    if isinstance(given, str):
        if given in ("auto", "none", "required"):
            return given, every
        name = given
    elif given.get("type") == "allowed_tools":
        return _allowed(given, every)
    else:
        name = _name(given)
    _check_name(name, every)
    return {"function": {"name": name}}, every


def _allowed(given: Mapping[str, Any], every: frozenset[str]) -> tuple[str, frozenset[str]]:
    options = given.get("allowed_tools")
    mode = options.get("mode") if isinstance(options, dict) else None
    tools = options.get("tools") if isinstance(options, dict) else None
    few = isinstance(tools, list) and len(tools) <= bounds.TOOLS
    if mode not in ("auto", "required") or tools is None or not few:
        raise errors.validation(
            "`tool_choice` of type `allowed_tools` needs `tools`, at most "
            f"{bounds.TOOLS}, and the `mode` `auto` or `required`",
            "tool_choice",
        )
    names = [_name(tool) for tool in tools]
    for name in names:
        _check_name(name, every)
    return mode, frozenset(names)


def _name(choice: Any) -> str:
    """The name in a reference to a tool. Raises ApiError."""
    kind = choice.get("type", "function") if isinstance(choice, dict) else None
    inner = choice.get(kind) if kind in ("function", "custom") else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str):
        raise errors.validation("`tool_choice` must name a function or custom tool", "tool_choice")
    return name


def _check_name(name: str, every: frozenset[str]) -> None:
    if name not in every:
        raise errors.validation(f"`tool_choice` names {name!r}, which is no tool", "tool_choice")


def _tool(index: int, tool: Tool) -> dict[str, Any]:
    """A tool as templates expect it."""
    if tool.type == "custom" and tool.custom is not None:
        return _custom_tool(index, tool)
    function = tool.function
    if tool.type != "function" or function is None:
        raise errors.validation(
            f"tools[{index}] is of type {tool.type!r}: only functions and custom tools can be "
            "called",
            "tools",
        )
    parameters = function.arguments if function.parameters is None else function.parameters
    return _function(index, function.name, function.description, parameters)


def _custom_tool(index: int, tool: Tool) -> dict[str, Any]:
    custom = tool.custom
    assert custom is not None
    grammar = _grammar(index, tool)
    text = {"type": "string"}
    if grammar is not None:
        ((syntax, definition),) = grammar.items()
        text["description"] = _SYNTAXES[syntax] + definition
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    return _function(index, custom.name, custom.description, parameters)


def _function(
    index: int, name: str, description: str | None, parameters: Mapping[str, Any] | None
) -> dict[str, Any]:
    if not name:
        raise errors.validation(f"tools[{index}] has no name", "tools")
    fields = {"name": name, "description": description, "parameters": parameters}
    return {
        "type": "function",
        "function": {name: value for name, value in fields.items() if value is not None},
    }


def _grammar(index: int, tool: Tool) -> dict[str, str] | None:
    """The grammar of a custom tool's text, or None if it is free. Raises ApiError."""
    form = tool.custom.format if tool.custom is not None else None
    if form is None or form.get("type") == "text":
        return None
    found = form.get("grammar")
    syntax = found.get("syntax") if isinstance(found, dict) else None
    definition = found.get("definition") if isinstance(found, dict) else None
    if (
        form.get("type") != "grammar"
        or not isinstance(syntax, str)
        or syntax not in _SYNTAXES
        or not isinstance(definition, str)
    ):
        raise errors.validation(
            f"tools[{index}]: the format of a custom tool is `text`, or a `grammar` with a "
            "`definition` and the `syntax` `lark` or `regex`",
            "tools",
        )
    return {syntax: definition}
