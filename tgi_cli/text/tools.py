"""Tools as text, for chat templates that do not support them, and the grammar of their calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from tgi_cli.text.formats.syntax import (
    INDEX,
    NAME,
    CallSyntax,
    LiteralSyntax,
    TagSyntax,
    ToolFormat,
)

_CALL_FIELDS = ("tool_calls", "tool_call_id")

TOOL_PROMPT = """\
If one of these functions helps with the message above, call it: write a JSON object with its \
name and its arguments between <tool_call> and </tool_call>, for each call one, like this:
<tool_call>
{"name": "NAME", "arguments": {...}}
</tool_call>
If none does, answer without a call."""
"""Text behind the list of tools. Requests may replace it: ``tool_prompt``."""


def as_text(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    tool_prompt: str | None = None,
) -> list[dict[str, Any]]:
    """A conversation without tools for the template: they are part of the messages' text.

    As in TGI, the tools are listed at the end of the user's last message. Calls become text of
    the assistant, and their results become messages of the user.
    """
    converted = [_without_calls(message) for message in messages]
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = f"\n---\n{listed}\n{TOOL_PROMPT if tool_prompt is None else tool_prompt}"
        for message in reversed(converted):
            if message["role"] == "user":
                message["content"] += text
                break
        else:
            converted.append({"role": "user", "content": text.lstrip()})
    return _join_user_messages(converted)


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    converted = {key: value for key, value in message.items() if key not in _CALL_FIELDS}
    content = converted.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        json.dumps(
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
            ensure_ascii=False,
        )
        for call in message.get("tool_calls") or ()
    ]
    written = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    converted["content"] = "\n".join([*([content] if content else []), *written])
    return converted


def _join_user_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join consecutive messages of the user: many templates require alternating roles."""
    joined: list[dict[str, Any]] = []
    for is_user, group in groupby(messages, lambda message: message["role"] == "user"):
        if is_user:
            first, *others = group
            content = "\n".join([first["content"], *(other["content"] for other in others)])
            joined.append({**first, "content": content})
        else:
            joined += map(dict, group)
    return joined


def tool_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any],
    parallel: bool,
    form: ToolFormat | None,
) -> dict[str, Any] | None:
    """The grammar of the tool calls in a response, or None if the format has none.

    The result is a structural tag: ``{"type": "structural_tag", "triggers": [text], "structures":
    [{"name", "begin", "schema", "end", "counter", "arguments"}, ...], "first", "between", "last",
    "at_least", "at_most"}``.
    If ``at_least`` is 0 (``auto``), text that does not begin with a trigger is free. If it is 1,
    the response is ``first``, structures with ``between`` between them, and ``last``. ``at_most``
    None means any number.

    Args:
        choice: ``auto``, ``required``, or an object with the function's name.
    """
    if form is None or form.grammar is None or not tools:
        return None
    only = choice["function"]["name"] if isinstance(choice, Mapping) else None
    grammar = form.grammar
    counter = INDEX if INDEX in grammar.begin else ""
    arguments = _arguments(form.syntax)
    structures = [
        {
            "name": function["name"],
            "begin": grammar.begin.replace(NAME, function["name"]),
            "schema": function.get("parameters") or {"type": "object"},
            "end": grammar.end,
            "counter": counter,
            "arguments": arguments,
        }
        for function in (tool["function"] for tool in tools)
        if only is None or function["name"] == only
    ]
    return {
        "type": "structural_tag",
        "triggers": [grammar.trigger],
        "structures": structures,
        "first": grammar.first,
        "between": grammar.between,
        "last": grammar.last,
        "at_least": 0 if choice == "auto" else 1,
        "at_most": None if parallel and only is None and not grammar.single else 1,
    }


def _arguments(syntax: CallSyntax | None) -> dict[str, Any] | None:
    """How a grammar writes arguments, or None for JSON."""
    if syntax is None or (isinstance(syntax, LiteralSyntax) and syntax.json):
        return None
    kind = "tags" if isinstance(syntax, TagSyntax) else "literals"
    return {"kind": kind, **asdict(syntax)}
