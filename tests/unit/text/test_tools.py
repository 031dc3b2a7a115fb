"""Tools for templates that know none, and what calls may look like."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.text.call_samples import TOOLS
from tgi_cli.text.formats.tools import TOOL_FORMATS
from tgi_cli.text.tools import TOOL_PROMPT, as_text, tool_grammar

CALL = {"id": "1", "type": "function", "function": {"name": "time", "arguments": {"city": "Köln"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "noon"},
    {"role": "tool", "tool_call_id": "2", "content": "one"},
]


def test_tools_follow_the_last_user_message() -> None:
    told = as_text(TALK, TOOLS)
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert told[:2] == TALK[:2]
    call = '<tool_call>\n{"name": "time", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert told[2] == {"role": "assistant", "content": f"{call}\n{call}"}
    results = (
        "<tool_response>\nnoon\n</tool_response>\n<tool_response>\none\n</tool_response>\n---\n"
    )
    text = told[3]["content"]
    assert text.startswith(results)
    listed, _, words = text.removeprefix(results).partition("\n" + TOOL_PROMPT)
    assert [json.loads(line) for line in listed.splitlines()] == TOOLS
    assert words == ""


def test_a_prompt_of_the_requests_own() -> None:
    [message] = as_text([{"role": "system", "content": "x"}], TOOLS, "Call!")[1:]
    assert message["role"] == "user"
    assert message["content"].startswith("---\n{")
    assert message["content"].endswith("\nCall!")


def test_without_tools_only_past_calls_become_text() -> None:
    assert "---" not in str(as_text(TALK, []))
    assert as_text(TALK[:2], []) == TALK[:2]


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
