"""The tools of a request for a response, as those of a chat.

Functions and custom tools are the model's to call, also within namespaces. Tools of all other
types are executed by OpenAI's servers, or need item types of their own: they are left out of the
prompt, so that clients that always send them work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tgi_cli.router import bounds
from tgi_cli.router.api.schemas.openai import CustomTool, Function, Tool
from tgi_cli.router.http import errors

_CALLABLE = ("function", "custom")


@dataclass(frozen=True, slots=True)
class ChatToolSet:
    """Tools of a chat, with the names that the client knows them by.

    Attributes:
        tools: The tools.
        choice: The chat's ``tool_choice``.
        names: Namespace, or None, and name of each, by the name in the prompt.
    """

    tools: Sequence[Tool]
    choice: str | dict[str, Any] | None
    names: Mapping[str, tuple[str | None, str]]


def flat_name(namespace: str | None, name: str) -> str:
    """The name of a tool in the prompt, where there are no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def chat_tool_set(
    tools: Sequence[Mapping[str, Any]],
    further: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any] | None,
) -> ChatToolSet:
    """Translate tools and ``tool_choice``.

    Args:
        tools: The request's.
        further: Those in its items; they may repeat others.

    Raises:
        ApiError: They are invalid.
    """
    found: list[Tool] = []
    names: dict[str, tuple[str | None, str]] = {}
    for index, tool in enumerate([*tools, *further]):
        where = f"tools[{index}]" if index < len(tools) else "a tool in `input`"
        for namespace, each in _callable_tools(where, tool):
            named = each.custom or each.function
            assert named is not None
            flat = flat_name(namespace, named.name)
            if flat in names and index >= len(tools):
                continue
            if flat in names:
                raise errors.validation(f"{where}: two tools are named {flat!r}", "tools")
            if len(flat) > bounds.NAME_CHARACTERS:
                raise errors.validation(f"{where} has too long a name", "tools")
            names[flat] = namespace, named.name
            named.name = flat
            found.append(each)
        if len(found) > bounds.TOOLS:
            raise _too_many()
    return ChatToolSet(found, _choice(choice, names, {_type(tool) for tool in tools}), names)


def _callable_tools(
    where: str, tool: Mapping[str, Any], namespace: str | None = None
) -> list[tuple[str | None, Tool]]:
    """The tools that the model can call in one of the request's. Raises ApiError."""
    kind = _type(tool)
    if kind is None:
        raise errors.validation(f"{where} has no `type`", "tools")
    if kind == "namespace" and namespace is None:
        return _namespace(where, tool)
    if kind not in _CALLABLE:
        return []
    try:
        if kind == "function":
            function = msgspec.convert(tool, Function)
            return [(namespace, Tool(function=function))]
        custom = msgspec.convert(tool, CustomTool)
    except msgspec.ValidationError as error:
        raise errors.validation(f"{where}: {error}", "tools") from error
    if custom.format is not None and "syntax" in custom.format:
        custom.format = {"type": custom.format.get("type"), "grammar": custom.format}
    return [(namespace, Tool(type="custom", custom=custom))]


def _namespace(where: str, tool: Mapping[str, Any]) -> list[tuple[str | None, Tool]]:
    name, inner, description = tool.get("name"), tool.get("tools"), tool.get("description")
    if not isinstance(name, str) or not name or not isinstance(inner, list):
        raise errors.validation(f"{where} of type `namespace` needs a `name` and `tools`", "tools")
    if len(inner) > bounds.TOOLS:
        raise _too_many()
    found: list[tuple[str | None, Tool]] = []
    for index, each in enumerate(inner):
        if not isinstance(each, dict):
            raise errors.validation(f"{where}.tools[{index}] must be an object", "tools")
        found += _callable_tools(f"{where}.tools[{index}]", each, name)
    if found and isinstance(description, str) and description:
        first = found[0][1].custom or found[0][1].function
        assert first is not None
        about = f"{name}: {description}"
        first.description = f"{about}\n\n{first.description}" if first.description else about
    return found


def _too_many() -> errors.ApiError:
    return errors.validation(f"there are more than {bounds.TOOLS} `tools`", "tools")


def _type(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) and kind else None


def _choice(
    given: str | Mapping[str, Any] | None,
    names: Mapping[str, tuple[str | None, str]],
    kinds: set[str | None],
) -> str | dict[str, Any] | None:
    """A chat's ``tool_choice``; ``kinds`` are the types of the request's tools."""
    if given == "required" and not names and kinds:
        raise _hosted(str(min(kind for kind in kinds if kind)))
    if given is None or isinstance(given, str):
        return given
    kind = given.get("type")
    if kind == "allowed_tools":
        return _allowed(given, names)
    if kind not in _CALLABLE:
        raise _hosted(str(kind))
    return _reference(_name(given, _flat_names(names)))


def _allowed(
    given: Mapping[str, Any], names: Mapping[str, tuple[str | None, str]]
) -> str | dict[str, Any]:
    mode, tools = given.get("mode"), given.get("tools")
    if not isinstance(tools, list) or len(tools) > bounds.TOOLS:
        raise errors.validation(
            f"`tool_choice` of type `allowed_tools` needs `tools`, at most {bounds.TOOLS}",
            "tool_choice",
        )
    by_name = _flat_names(names)
    by_namespace: dict[str, list[str]] = {}
    for flat, (namespace, _) in names.items():
        if namespace is not None:
            by_namespace.setdefault(namespace, []).append(flat)
    allowed: dict[str, None] = {}
    for tool in tools:
        kind = _type(tool)
        if kind in _CALLABLE:
            allowed[_name(tool, by_name)] = None
        elif kind == "namespace":
            allowed |= dict.fromkeys(by_namespace.get(str(tool.get("name")), ()))
    if tools and not allowed:
        if mode == "required":
            raise _hosted(str(_type(tools[0])))
        return "none"
    references = [_reference(name) for name in allowed]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": references}}


def _flat_names(names: Mapping[str, tuple[str | None, str]]) -> dict[str, str | None]:
    """Names in the prompt by those without namespace; None for one of several namespaces."""
    found: dict[str, str | None] = {}
    for flat, (namespace, name) in names.items():
        if namespace is not None:
            found[name] = None if name in found else flat
    return found | {flat: flat for flat in names}


def _name(given: Mapping[str, Any], by_name: Mapping[str, str | None]) -> str:
    """The name in the prompt of a tool that is referred to. Raises ApiError."""
    name, namespace = given.get("name"), given.get("namespace")
    if not isinstance(name, str):
        raise errors.validation("`tool_choice` must name a function or custom tool", "tool_choice")
    if isinstance(namespace, str):
        return flat_name(namespace, name)
    return by_name.get(name) or name


def _reference(name: str) -> dict[str, Any]:
    """A chat's reference to a tool."""
    return {"type": "function", "function": {"name": name}}


def _hosted(kind: str) -> errors.ApiError:
    return errors.validation(
        f"`tool_choice` requires a tool of type {kind!r}: this server has none that it runs "
        "itself, and models call functions and custom tools only",
        "tool_choice",
        "unsupported_value",
    )
