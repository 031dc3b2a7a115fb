"""Custom tools and allowed tools in /v1/chat/completions: text instead of JSON, and choices."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tests.router.test_tools import TOOL, USER, bundle, prompt_of
from tgi_cli.text.bundle import TextBundle

ROUTE = "/v1/chat/completions"
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits files."}}
TEXT = 'say "hi"\n\tto C:\\ and 🤗'
CALL = (
    '<tool_call>\n{"name": "patch", "arguments": '
    + json.dumps({"input": TEXT}, ensure_ascii=False)
    + "}\n</tool_call>"
)
ESCAPED = CALL.replace("🤗", "\\ud83e\\udd17")
FUNCTION_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>'


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tgi", "messages": USER, "tools": [TOOL, PATCH], **fields}


def with_grammar(syntax: str, definition: str) -> dict[str, Any]:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "patch", "format": grammar}}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    return bundle(tmp_path_factory.mktemp("custom"))


@pytest.fixture
def engine(text: TextBundle) -> FakeEngine:
    engine = FakeEngine(text.tokenizer)
    engine.info = replace(engine.info, max_input_tokens=3999, max_total_tokens=4000)
    return engine


@pytest.fixture
def ai(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60)


def grammar_of(engine: FakeEngine) -> str:
    grammar = engine.requests[-1].grammar
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("reply", [CALL, ESCAPED])
async def test_call_of_a_custom_tool_has_its_text(
    client: httpx.AsyncClient, engine: FakeEngine, reply: str
) -> None:
    engine.reply_with(f"{FUNCTION_CALL}\n{reply}")
    choice = (await client.post(ROUTE, json=body())).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    function, custom = choice["message"]["tool_calls"]
    assert (function["type"], custom["type"]) == ("function", "custom")
    assert "custom" not in function
    assert "function" not in custom
    assert custom["custom"] == {"name": "patch", "input": TEXT}


@pytest.mark.parametrize("reply", [CALL, ESCAPED])
@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_stream_has_the_text_of_a_custom_tool(
    client: httpx.AsyncClient, engine: FakeEngine, reply: str, step: int
) -> None:
    engine.reply_with(f"{reply}\n{FUNCTION_CALL}")
    engine.step = step
    answer = await client.post(ROUTE, json=body(stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in events(answer.text)[:-1]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    custom = [call for call in calls if call["index"] == 0]
    assert custom[0]["type"] == "custom"
    assert custom[0]["custom"]["name"] == "patch"
    assert "".join(call["custom"]["input"] for call in custom) == TEXT
    arguments = "".join(call["function"]["arguments"] for call in calls if call["index"] == 1)
    assert json.loads(arguments) == {"city": "x"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"text": "x"}', '{"text": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"other": 1, "input": "x"}', "x"),
        ('{"input": "a\\qb"}', "a\\qb"),
        ('{"input": ""}', ""),
        ('{"input": "\\ud83e"}', "\\ud83e"),
    ],
)
async def test_arguments_of_another_form_are_not_lost(
    client: httpx.AsyncClient, engine: FakeEngine, arguments: str, expected: str
) -> None:
    engine.reply_with(f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>')
    choice = (await client.post(ROUTE, json=body())).json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert call["custom"]["input"] == expected


async def test_model_sees_a_function_of_one_text(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    tool = with_grammar("regex", "[a-z]+")
    await client.post(ROUTE, json=body(tools=[PATCH]))
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    }
    function = {"name": "patch", "description": "Edits files.", "parameters": parameters}
    assert json.dumps({"type": "function", "function": function}) in prompt_of(engine)
    await client.post(ROUTE, json=body(tools=[tool]))
    assert "Text that this regular expression matches: [a-z]+" in prompt_of(engine)


async def test_conversation_with_a_custom_call_is_rendered(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": TEXT}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    await client.post(ROUTE, json=body(messages=messages))
    written = json.dumps({"input": TEXT}, ensure_ascii=False)
    assert (
        f'"patch", "arguments": {written}}}</tool_call><|im_end|>\n<|im_start|>tool\ndone'
        in prompt_of(engine)
    )


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [("regex", "^[a-z]+$"), ("lark", 'start: WORD ("\\n" WORD)*\nWORD: /[a-z]+/')],
)
async def test_grammar_of_a_custom_tool_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, syntax: str, definition: str
) -> None:
    await client.post(ROUTE, json=body(tools=[with_grammar(syntax, definition)]))
    [_, arguments] = json.loads(grammar_of(engine))["grammars"]
    assert "input" in arguments["lark_grammar"]
    assert "[a-z]+" in arguments["lark_grammar"]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "grammar"}, "the format of a custom tool"),
        ({"type": "json"}, "the format of a custom tool"),
        ({"type": "grammar", "grammar": {"syntax": "abnf", "definition": "x"}}, "`lark` or"),
        (
            {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: start"}},
            "grammar of `patch`: the rule `start` refers to itself",
        ),
        (
            {"type": "grammar", "grammar": {"syntax": "regex", "definition": "("}},
            "grammar of `patch`: ",
        ),
    ],
)
async def test_invalid_formats_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, form: dict[str, Any], words: str
) -> None:
    tool = {"type": "custom", "custom": {"name": "patch", "format": form}}
    answer = await client.post(ROUTE, json=body(tools=[tool]))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    assert words in answer.json()["error"]["message"]
    assert engine.requests == []


class TestWithoutGrammars:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"disable_grammar_support": True}

    async def test_grammar_that_would_not_hold_is_refused(self, client: httpx.AsyncClient) -> None:
        answer = await client.post(ROUTE, json=body(tools=[with_grammar("regex", "x")]))
        assert answer.status_code == 400
        assert "the grammar of a custom tool" in answer.json()["error"]["message"]
        assert (await client.post(ROUTE, json=body())).status_code == 200

    async def test_only_allowed_tools_are_offered(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await client.post(ROUTE, json=body(tool_choice=allowed("auto", "weather")))
        assert "weather" in prompt_of(engine)
        assert "patch" not in prompt_of(engine)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    kinds = {"weather": "function", "patch": "custom"}
    tools = [{"type": kinds[name], kinds[name]: {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_leave_the_prompt_as_it_is(
    client: httpx.AsyncClient, engine: FakeEngine, mode: str
) -> None:
    await client.post(ROUTE, json=body())
    every = prompt_of(engine)
    assert "weather" in grammar_of(engine)
    await client.post(ROUTE, json=body(tool_choice=allowed(mode, "patch")))
    assert prompt_of(engine) == every
    assert "patch" in grammar_of(engine)
    assert "weather" not in grammar_of(engine)
    free = "free" in grammar_of(engine)
    assert free is (mode == "auto")


async def test_named_custom_tool_must_be_called(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    choice = {"type": "custom", "custom": {"name": "patch"}}
    assert (await client.post(ROUTE, json=body(tool_choice=choice))).status_code == 200
    assert "free" not in grammar_of(engine)
    assert "weather" not in grammar_of(engine)


@pytest.mark.parametrize(
    "choice",
    [
        allowed("none", "patch"),
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["patch"]}},
        {"type": "custom", "custom": {"name": "other"}},
        {"type": "custom", "function": {"name": "patch"}},
        allowed("required"),
    ],
)
async def test_invalid_choices_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, choice: dict[str, Any]
) -> None:
    answer = await client.post(ROUTE, json=body(tool_choice=choice))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"
    assert engine.requests == []


async def test_openais_client_gets_custom_calls(ai: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.reply_with(CALL)
    answer = await ai.chat.completions.create(
        model="tgi",
        messages=USER,  # type: ignore[arg-type]
        tools=[PATCH],  # type: ignore[list-item]
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "custom"
    assert call.custom.input == TEXT
