"""Tools for templates that know none, and what calls may look like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.text.call_samples import TOOLS
from tgi_cli.text.formats.tools import TOOL_FORMATS
from tgi_cli.text.formats.written import written_calls
from tgi_cli.text.tools import (
    TOOL_PROMPT,
    tool_grammar,
    tool_prompt,
    with_calls_as_text,
    with_tools_in_front,
)

CALL = {"id": "1", "type": "function", "function": {"name": "time", "arguments": {"city": "Köln"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "noon"},
    {"role": "tool", "tool_call_id": "2", "content": "one"},
]


def test_tools_are_described_in_front_of_the_first_turn() -> None:
    first, described, *rest = with_tools_in_front(TALK, TOOLS)
    assert [first, *rest] == TALK
    assert described["role"] == "system"
    listed, _, words = described["content"].partition("\n\n" + TOOL_PROMPT)
    assert [json.loads(line) for line in listed.splitlines()[1:]] == TOOLS
    assert words == ""


def test_a_prompt_of_the_requests_own() -> None:
    [message, user] = with_tools_in_front(TALK[1:2], TOOLS, "Call!")
    assert user == TALK[1]
    assert message["content"].endswith("\n\nCall!")
    assert TOOL_PROMPT not in message["content"]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_prompt_asks_for_calls_in_the_format_that_is_parsed(name: str) -> None:
    form = TOOL_FORMATS[name]
    example = written_calls(form, [("NAME", {"PARAMETER": "VALUE"})])
    prompt = tool_prompt(form)
    if name == "hermes" or example is None:
        assert prompt == TOOL_PROMPT == tool_prompt(None)
    else:
        assert example in prompt
        assert "<tool_call>\n{" not in prompt or "<tool_call>\n{" in example


def test_calls_and_results_become_text() -> None:
    told = with_calls_as_text(TALK, None)
    assert told[:2] == TALK[:2]
    call = '<tool_call>\n{"name": "time", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert told[2] == {"role": "assistant", "content": f"{call}\n{call}"}
    assert told[3:] == [
        {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"},
        {"role": "user", "content": "<tool_response>\none\n</tool_response>"},
    ]
    with_text = {**TALK[2], "content": "Let me see."}
    assert with_calls_as_text([with_text], None)[0]["content"] == f"Let me see.\n{call}\n{call}"


def test_calls_alone_or_results_alone_become_text() -> None:
    calls = with_calls_as_text(TALK, None, results=False)
    assert ("tool_calls" in calls[2], calls[3:]) == (False, TALK[3:])
    results = with_calls_as_text(TALK, None, calls=False)
    assert (results[2], results[3]["role"]) == (TALK[2], "user")


def test_calls_are_written_in_the_models_format() -> None:
    """What the model reads of its earlier calls is what it is expected to write."""
    told = with_calls_as_text(TALK, TOOL_FORMATS["mistral_list"])
    call = '{"name": "time", "arguments": {"city": "Köln"}}'
    assert told[2]["content"] == f"[TOOL_CALLS] [{call}, {call}]"
    told = with_calls_as_text(TALK, TOOL_FORMATS["glm47"])
    call = "<tool_call>time<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>"
    assert told[2]["content"] == call + call
    assert "<tool_call>\n{" in with_calls_as_text(TALK, None)[2]["content"]


def test_grammar() -> None:
    hermes = TOOL_FORMATS["hermes"]
    free = tool_grammar(TOOLS, "auto", True, hermes)
    assert free is not None
    assert (free["at_least"], free["at_most"]) == (0, None)
    assert free["triggers"] == ["<tool_call>"]
    assert [part["name"] for part in free["structures"]] == ["weather", "time"]
    one = tool_grammar(TOOLS, {"function": {"name": "time"}}, True, hermes)
    assert one is not None
    [part] = one["structures"]
    assert (one["at_least"], one["at_most"]) == (1, 1)
    assert part["schema"] == TOOLS[1]["function"]["parameters"]
    required = tool_grammar(TOOLS, "required", False, hermes)
    assert required is not None
    assert (required["at_least"], required["at_most"]) == (1, 1)
    assert tool_grammar([], "auto", True, hermes) is None
    assert tool_grammar(TOOLS, "auto", True, None) is None
