"""Bodies of the shape that Claude Code sends: turns that extend each other keep their prefix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tests.router.test_messages import accumulated
from tests.router.test_tools import bundle, prompt_of
from tgi_cli.text.bundle import TextBundle

HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,"
    "context-management-2025-06-27,mid-conversation-tool-changes-2026-07-01,"
    "thinking-token-count-2026-05-13,advanced-tool-use-2025-11-20,effort-2025-11-24",
    "x-claude-code-session-id": "8f9b2c6e",
}
CACHED = {"cache_control": {"type": "ephemeral"}}


def schema(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": list(properties)[:1],
        "additionalProperties": False,
    }


TOOLS: list[dict[str, Any]] = [
    {
        "name": "Read",
        "description": "Reads a file.",
        "input_schema": schema(
            file_path={"type": "string", "minLength": 1},
            limit={"type": "integer", "minimum": 1, "maximum": 2000, "default": 200},
        ),
    },
    {
        "name": "Bash",
        "description": "Runs a command.",
        "input_schema": schema(
            command={"type": "string"},
            mode={"type": "string", "enum": ["wait", "detach"]},
            names={"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}},
        ),
    },
    {"name": "ToolSearch", "description": "Finds tools.", "input_schema": schema(query={})},
    {"name": "Notebook", "input_schema": schema(path={"type": "string"}), "defer_loading": True},
]


def request(turns: list[dict[str, Any]], nonce: str = "7") -> dict[str, Any]:
    """The body of a turn; the last block is marked for the cache."""
    *earlier, last = turns
    content = last["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    marked = {**last, "content": [*content[:-1], {**content[-1], **CACHED}]}
    return {
        "model": "acme/tiny",
        "max_tokens": 32_000,
        "stream": True,
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "system": [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.330.{nonce}; "
                "cc_entrypoint=sdk-cli;",
            },
            {"type": "text", "text": "You write programs."},
            {"type": "text", "text": "Rules:\n- be brief", **CACHED},
        ],
        "messages": [*earlier, marked],
        "tools": TOOLS,
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    path: Path = tmp_path_factory.mktemp("claude")
    return bundle(path)


@pytest.fixture
def engine(text: TextBundle) -> FakeEngine:
    engine = FakeEngine(text.tokenizer)
    engine.info = replace(engine.info, max_input_tokens=15_999, max_total_tokens=16_000)
    return engine


def call(name: str, arguments: str) -> str:
    return (
        f"<think>I need {name}.</think>I look.\n"
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    )


async def test_every_turn_begins_with_the_turn_before(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    rules = "<system-reminder>Rules of this project.</system-reminder>"
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("env", "date", "go")]},
        {"role": "system", "content": [{"type": "text", "text": rules}]},
    ]
    before = ""
    for number, said in enumerate(
        [
            call("Read", '{"file_path": "a.py"}'),
            call("Bash", '{"command": "make"}'),
            call("Read", '{"file_path": "b.py", "limit": 3}'),
        ]
    ):
        engine.reply_with(said)
        body = request(turns, nonce=str(number))
        answer = await client.post("/v1/messages?beta=true", json=body, headers=HEADERS)
        assert answer.status_code == 200, answer.text
        message = accumulated(events(answer.text))
        assert message["stop_reason"] == "tool_use"
        prompt = prompt_of(engine)
        assert prompt.startswith(before)
        assert "billing" not in prompt
        assert "Notebook" not in prompt
        before = prompt.removesuffix("<|im_start|>assistant\n")
        thought, _, use = message["content"]
        assert thought["thinking"] == ""
        turns[1] = {"role": "system", "content": rules}  # a plain string from the second turn on
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "done"}
        turns += [
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": [{**result, "is_error": number == 1}]},
        ]
    assert 'I need Read.I look.<tool_call>{"name": "Read"' in before
    assert "tool\nError: done" in before


async def test_found_tool_is_offered_from_then_on(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    found = [{"type": "tool_reference", "tool_name": "Notebook"}]
    turns = [
        {"role": "user", "content": "edit the notebook"},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {"query": "nb"}}
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": found}],
        },
    ]
    engine.reply_with(call("Notebook", '{"path": "x.ipynb"}'))
    answer = await client.post("/v1/messages?beta=true", json=request(turns), headers=HEADERS)
    assert accumulated(events(answer.text))["content"][-1]["name"] == "Notebook"
    assert '"name": "Notebook"' in prompt_of(engine)


async def test_discovery_of_models(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models?limit=1000", headers=HEADERS)
    assert [model["id"] for model in answer.json()["data"]] == ["acme/tiny"]
    assert (await client.head("/")).status_code == 200
