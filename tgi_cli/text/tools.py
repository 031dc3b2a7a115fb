"""Tools as text, for chat templates that do not support them, and the grammar of their calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tgi_cli.text.conversation import instructions
from tgi_cli.text.formats.detect import FALLBACK
from tgi_cli.text.formats.syntax import (
    INDEX,
    NAME,
    CallSyntax,
    LiteralSyntax,
    TagSyntax,
    ToolFormat,
)
from tgi_cli.text.formats.tools import TOOL_FORMATS
from tgi_cli.text.formats.written import written_calls

_CALL_FIELDS = ("tool_calls", "tool_call_id")

TOOL_PROMPT = """\
To call functions, write a JSON object with the name and the arguments of each call between \
<tool_call> and </tool_call>, like this:
<tool_call>
{"name": "NAME", "arguments": {...}}
</tool_call>
If none of them helps, answer without a call."""
"""Text after the list of tools, for calls in the format ``FALLBACK``."""
_OTHER_PROMPT = """\
To call functions, write the name and the arguments of the calls like this:
{call}
If none of them helps, answer without a call."""


def tool_prompt(form: ToolFormat | None) -> str:
    """Text after the list of tools, which asks for calls in a format.

    Args:
        form: :data:`FALLBACK` if it is unknown, or cannot be written.
    """
    example = None
    if form is not None and form is not TOOL_FORMATS[FALLBACK]:
        example = written_calls(form, [("NAME", {"PARAMETER": "VALUE"})])
    return TOOL_PROMPT if example is None else _OTHER_PROMPT.format(call=example)


def with_tools_in_front(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    prompt: str = TOOL_PROMPT,
) -> list[Mapping[str, Any]]:
    """The conversation with the tools described in a system message.

    It follows the instructions at the start. After the last message, where TGI describes tools,
    the description would move with every turn, and no prompt would be a prefix of the next.
    """
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = f"You can call these functions:\n{listed}\n\n{prompt}"
    first = instructions(messages)
    return [*first, {"role": "system", "content": text}, *messages[len(first) :]]


def with_calls_as_text(
    messages: Sequence[Mapping[str, Any]],
    form: ToolFormat | None,
    *,
    calls: bool = True,
    results: bool = True,
) -> list[Mapping[str, Any]]:
    """The conversation without calls, or without results, for the template.

    Args:
        form: Format of the calls; :data:`FALLBACK` if it is unknown.
        calls: Make calls text of the assistant.
        results: Make results messages of the user.
    """
    if form is None or form.grammar is None:
        form = TOOL_FORMATS[FALLBACK]
    return [
        _result_as_text(message)
        if results and message["role"] == "tool"
        else _calls_as_text(message, form)
        if calls and message.get("tool_calls")
        else message
        for message in messages
    ]


def _result_as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "role": "user",
        "content": f"<tool_response>\n{message['content']}\n</tool_response>",
    }


def _calls_as_text(message: Mapping[str, Any], form: ToolFormat) -> Mapping[str, Any]:
    functions = [call["function"] for call in message["tool_calls"]]
    text = written_calls(form, [(each["name"], each["arguments"]) for each in functions])
    content = "\n".join(filter(None, (message["content"], text)))
    rest = {key: value for key, value in message.items() if key not in _CALL_FIELDS}
    return {**rest, "content": content}


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
