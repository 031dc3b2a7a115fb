"""Tools: told to models whose chat template does not know them, and what a call may look like."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tgi_cli.text.known_formats import ToolFormat

TOOL_PROMPT = """\
If one of these functions helps with the message above, call it: write a JSON object with its \
name and its arguments between <tool_call> and </tool_call>, for each call one, like this:
<tool_call>
{"name": "NAME", "arguments": {...}}
</tool_call>
If none does, answer without a call."""
"""Behind the list of tools, where a request brings no ``tool_prompt`` of its own."""


def as_text(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    tool_prompt: str | None = None,
) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: all about them in words.

    As TGI does, the tools stand at the end of the last message of the user's. Calls become text
    of the assistant's, their results messages of the user's.
    """
    told = [_without_calls(message) for message in messages]
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = f"\n---\n{listed}\n{TOOL_PROMPT if tool_prompt is None else tool_prompt}"
        for message in reversed(told):
            if message["role"] == "user":
                message["content"] += text
                break
        else:
            told.append({"role": "user", "content": text.lstrip()})
    return _joined(told)


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    told = {key: value for key, value in message.items() if key not in _ABOUT_CALLS}
    content = told.get("content") or ""
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
    told["content"] = "\n".join([*([content] if content else []), *written])
    return told


_ABOUT_CALLS = ("tool_calls", "tool_call_id")


def _joined(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of the user's in a row as one: many templates want the roles to alternate."""
    told: list[dict[str, Any]] = []
    contents: list[list[str]] = []
    for message in messages:
        if told and message["role"] == told[-1]["role"] == "user":
            contents[-1].append(message["content"])
        else:
            told.append(dict(message))
            contents.append([message["content"]])
    for message, several in zip(told, contents, strict=True):
        if len(several) > 1:
            message["content"] = "\n".join(several)
    return told


def tool_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any],
    parallel: bool,
    form: ToolFormat | None,
) -> dict[str, Any] | None:
    """What the calls of an answer may look like, for whoever constrains the decoding.

    ``choice`` is ``auto``, ``required`` or the function's name in an object. The answer is a
    structural tag: ``{"type": "structural_tag", "triggers": [text], "structures": [{"name",
    "begin", "schema", "end"}, ...], "first", "between", "last", "at_least", "at_most"}``. Text
    that does not begin with a trigger is free where ``at_least`` is 0 (``auto``); with 1 the
    answer is ``first``, one structure or more with ``between`` between them, and ``last``.
    ``at_most`` None means any number. None: nothing can be said of this format.
    """
    if form is None or form.grammar is None or not tools:
        return None
    named = choice["function"]["name"] if isinstance(choice, Mapping) else None
    grammar = form.grammar
    structures = [
        {
            "name": function["name"],
            "begin": grammar.begin.replace("NAME", function["name"]),
            "schema": function.get("parameters") or {"type": "object"},
            "end": grammar.end,
        }
        for function in (tool["function"] for tool in tools)
        if named is None or function["name"] == named
    ]
    return {
        "type": "structural_tag",
        "triggers": [grammar.trigger],
        "structures": structures,
        "first": grammar.first,
        "between": grammar.between,
        "last": grammar.last,
        "at_least": 0 if choice == "auto" else 1,
        "at_most": None if parallel and named is None else 1,
    }
