"""Tools of /v1/responses: functions, custom tools, namespaces, hosted ones; choices; echoed items.

The body of ``codex_body`` has the shape of an agent's, with words of its own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tests.router.test_tools import bundle, prompt_of
from tgi_cli.text.bundle import TextBundle

ROUTE = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
PATCH = {"type": "custom", "name": "patch", "description": "Edits files."}
TEAM = {
    "type": "namespace",
    "name": "team",
    "description": "Other workers.",
    "tools": [
        {"type": "function", "name": "ask", "description": "Asks one."},
        {"type": "function", "name": "wait"},
        {"type": "custom", "name": "note"},
    ],
}
HOSTED = [
    {"type": "web_search", "external_web_access": False},
    {"type": "tool_search", "execution": "client"},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "mcp", "server_label": "x"},
    {"type": "local_shell"},
    {"type": "a_kind_of_next_year"},
]


def called(name: str, arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def rendered(name: str, arguments: Any) -> str:
    """A call as the tests' template writes it."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>{text}</tool_call>"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tgi", "input": "hi", "tools": [WEATHER, PATCH, TEAM, *HOSTED], **fields}


def codex_body(*items: dict[str, Any]) -> dict[str, Any]:
    """A request with the keys, types of items and types of tools of Codex 0.169."""

    def message(role: str, text: str) -> dict[str, Any]:
        content = [{"type": "input_text", "text": text}]
        return {"type": "message", "id": f"msg_{role}", "role": role, "content": content}

    def function(name: str, *required: str) -> dict[str, Any]:
        properties = {each: {"type": "string"} for each in required}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        return {
            "type": "function",
            "name": name,
            "description": f"Does {name}.",
            "strict": False,
            "parameters": {**schema, "required": list(required)},
        }

    inner = [function(name, "target") for name in ("spawn", "send", "wait", "close", "resume")]
    team = {"type": "namespace", "name": "team_v1", "description": "Workers.", "tools": inner}
    return {
        "model": "acme/tiny",
        "input": [
            message("developer", "Sandbox rules."),
            message("developer", "Style rules."),
            message("user", "The folder is /src."),
            message("user", "Say hello."),
            *items,
        ],
        "tools": [
            *(function(f"tool_{index}", "cmd") for index in range(7)),
            team,
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread-1",
        "client_metadata": {"installation": "x"},
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    return bundle(tmp_path_factory.mktemp("response_tools"))


@pytest.fixture
def engine(text: TextBundle) -> FakeEngine:
    engine = FakeEngine(text.tokenizer)
    engine.info = replace(engine.info, max_input_tokens=5999, max_total_tokens=6000)
    return engine


@pytest.fixture
def ai(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60)


async def post(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(ROUTE, json=body(**fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def grammar_of(engine: FakeEngine) -> str:
    grammar = engine.requests[-1].grammar
    assert grammar is not None
    return grammar


async def test_agent_takes_two_turns(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """The second turn's prompt begins with the first's, and with the call of a namespace."""
    call = called("team_v1__wait", {"target": "a"})
    engine.reply_with(f"<think>Let me wait.</think>\n\n{call}", "Done.")
    answer = await client.post(ROUTE, json=codex_body())
    assert answer.status_code == 200, answer.text
    found = events(answer.text)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    final = found[-1]["response"]
    assert found[-1]["type"] == "response.completed"
    assert set(final["usage"]) >= {"input_tokens", "output_tokens", "total_tokens"}
    assert final["store"] is False
    assert final["prompt_cache_key"] == "thread-1"
    items = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert items == final["output"]
    reasoning, call_item = items
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Let me wait."}]
    assert (call_item["namespace"], call_item["name"]) == ("team_v1", "wait")
    first = prompt_of(engine)
    assert '"name": "team_v1__wait"' in first
    assert "team_v1: Workers." in first
    assert "web_search" not in first

    echoed = {key: reasoning[key] for key in ("type", "id", "summary", "encrypted_content")}
    output = {"type": "function_call_output", "call_id": call_item["call_id"], "output": "ok"}
    answer = await client.post(ROUTE, json=codex_body(echoed, call_item, output))
    assert events(answer.text)[-1]["response"]["output"][0]["content"][0]["text"] == "Done."
    second = prompt_of(engine)
    start = first.removesuffix("<|im_start|>assistant\n")
    assert second.startswith(start)
    assert second[len(start) :].startswith(
        "<|im_start|>assistant\nLet me wait."
        + rendered("team_v1__wait", {"target": "a"})
        + "<|im_end|>\n<|im_start|>tool\nok"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_come_back_by_their_kind(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    text = 'say "hi"\n'
    engine.reply_with(
        "\n".join(
            [
                called("weather", {"city": "x"}),
                called("patch", {"input": text}),
                called("team__ask", {}),
                called("team__note", {"input": "n"}),
            ]
        )
    )
    answer = await client.post(ROUTE, json=body(stream=stream))
    found = events(answer.text)[-1]["response"] if stream else answer.json()
    kept = [
        {key: item.get(key) for key in ("type", "namespace", "name", "arguments", "input")}
        for item in found["output"]
    ]

    def item(kind: str, namespace: str | None, name: str, **rest: str) -> dict[str, Any]:
        fields = {"type": kind, "namespace": namespace, "name": name}
        return {"arguments": None, "input": None, **fields, **rest}

    assert kept == [
        item("function_call", None, "weather", arguments='{"city": "x"}'),
        item("custom_tool_call", None, "patch", input=text),
        item("function_call", "team", "ask", arguments="{}"),
        item("custom_tool_call", "team", "note", input="n"),
    ]
    assert "namespace" not in found["output"][0]
    assert len({call["call_id"] for call in found["output"]}) == 4


@pytest.mark.parametrize("step", [1, 1000])
async def test_stream_of_a_custom_call(
    client: httpx.AsyncClient, engine: FakeEngine, step: int
) -> None:
    text = 'say "hi"\n'
    engine.reply_with(called("patch", {"input": text}))
    engine.step = step
    found = events((await client.post(ROUTE, json=body(stream=True))).text)[2:-1]
    kinds = [event["type"] for event in found]
    assert kinds[0] == "response.output_item.added"
    assert kinds[-2:] == ["response.custom_tool_call_input.done", "response.output_item.done"]
    assert set(kinds[1:-2]) == {"response.custom_tool_call_input.delta"}
    item = found[-1]["item"]
    assert "".join(event["delta"] for event in found[1:-2]) == text == found[-2]["input"]
    assert item["input"] == text
    assert item["id"].startswith("ctc_")
    for event in found[1:-1]:
        assert (event["item_id"], event["output_index"]) == (item["id"], 0)


async def test_tools_are_echoed_as_given(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    tools = (await post(client))["tools"]
    assert tools[0] == {**WEATHER, "description": None, "strict": None}
    assert tools[1:] == [PATCH, TEAM, *HOSTED]


async def test_hosted_tools_are_left_out_of_the_prompt(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await post(client)
    for tool in HOSTED:
        assert str(tool["type"]) not in prompt_of(engine)
    await post(client, tools=HOSTED)
    assert prompt_of(engine).startswith("<|im_start|>user\nhi")


CHOICES: list[tuple[Any, list[str], bool]] = [
    ("auto", ["weather", "patch", "team__ask", "team__wait", "team__note"], False),
    ("required", ["weather", "patch", "team__ask", "team__wait", "team__note"], True),
    ({"type": "function", "name": "weather"}, ["weather"], True),
    ({"type": "custom", "name": "patch"}, ["patch"], True),
    ({"type": "function", "name": "ask", "namespace": "team"}, ["team__ask"], True),
    ({"type": "function", "name": "ask"}, ["team__ask"], True),
    ({"type": "function", "name": "team__ask"}, ["team__ask"], True),
    (
        {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "weather"}, {"type": "web_search"}],
        },
        ["weather"],
        False,
    ),
    (
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "custom", "name": "patch"}, {"type": "namespace", "name": "team"}],
        },
        ["patch", "team__ask", "team__wait", "team__note"],
        True,
    ),
]


@pytest.mark.parametrize(("choice", "names", "forced"), CHOICES)
async def test_choice_of_tools(
    client: httpx.AsyncClient, engine: FakeEngine, choice: Any, names: list[str], forced: bool
) -> None:
    found = await post(client, tool_choice=choice)
    assert found["tool_choice"] == choice
    every = ("weather", "patch", "team__ask", "team__wait", "team__note")
    assert [name for name in every if name in grammar_of(engine)] == names
    assert ("free" not in grammar_of(engine)) is forced
    assert all(name in prompt_of(engine) for name in every)


@pytest.mark.parametrize(
    "choice",
    [
        "none",
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
    ],
)
async def test_choice_of_no_tool(
    client: httpx.AsyncClient, engine: FakeEngine, choice: Any
) -> None:
    await post(client, tool_choice=choice)
    assert "weather" not in prompt_of(engine)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": {"type": "web_search"}}, "'web_search'"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "'mcp'"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "web_search"}],
                }
            },
            "'web_search'",
        ),
        ({"tool_choice": "required", "tools": HOSTED[:1]}, "'web_search'"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "'other', which is no tool"),
        ({"tool_choice": {"type": "function"}}, "must name"),
        ({"tool_choice": {"type": "function", "name": ["x"]}}, "must name"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "`mode`"),
        ({"tool_choice": "required", "tools": []}, "`tools` has none"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "needs `tools`"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "namespace", "name": "team"}] * 1025,
                }
            },
            "at most 1024",
        ),
        (
            {
                "tools": [TEAM, {**TEAM, "name": "other"}],
                "tool_choice": {"type": "function", "name": "ask"},
            },
            "'ask', which is no tool",
        ),
    ],
)
async def test_forced_tools_that_cannot_be_called_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], words: str
) -> None:
    answer = await client.post(ROUTE, json=body(**fields))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"
    assert words in answer.json()["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([WEATHER, WEATHER], "tools[1]: two tools are named 'weather'"),
        ([TEAM, {"type": "function", "name": "team__ask"}], "two tools are named 'team__ask'"),
        ([TEAM, TEAM], "two tools are named 'team__ask'"),
        ([{"name": "x"}], "tools[0] has no `type`"),
        ([{**TEAM, "tools": [WEATHER] * 1025}], "more than 1024 `tools`"),
        (
            [
                {**TEAM, "name": name, "tools": [{**PATCH, "name": str(i)} for i in range(513)]}
                for name in "ab"
            ],
            "more than 1024 `tools`",
        ),
        ([{"type": ""}], "tools[0] has no `type`"),
        (
            [{**PATCH, "format": {"type": "grammar", "syntax": [], "definition": "x"}}],
            "tools[0]: the format",
        ),
        ([{"type": "namespace", "name": "x"}], "needs a `name` and `tools`"),
        ([{"type": "namespace", "name": "x", "tools": [5]}], "tools[0].tools[0] must be"),
        ([{"type": "namespace", "name": "x", "tools": [{"type": "function"}]}], "`name`"),
        ([{"type": "function", "name": 5}], "tools[0]: "),
        ([{"type": "custom", "name": "x", "format": {"type": "grammar"}}], "tools[0]: the format"),
        (
            [
                {
                    "type": "custom",
                    "name": "x",
                    "format": {"type": "grammar", "syntax": "regex", "definition": "("},
                }
            ],
            "grammar of `x`",
        ),
        ([{**TEAM, "name": "n" * 300, "tools": [{"type": "custom", "name": "x" * 300}]}],
         "too long a name"),
    ],
)  # fmt: skip
async def test_invalid_tools_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, tools: list[Any], words: str
) -> None:
    answer = await client.post(ROUTE, json=body(tools=tools))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    assert words in answer.json()["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("syntax", "definition"), [("regex", "[a-z]+"), ("lark", "start: /[a-z]+/")]
)
async def test_grammar_of_a_custom_tool_is_held(
    client: httpx.AsyncClient, engine: FakeEngine, syntax: str, definition: str
) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    await post(client, tools=[{**PATCH, "format": form}])
    assert "[a-z]+" in grammar_of(engine)
    await post(client, tools=[{**PATCH, "format": {"type": "text"}}])
    assert "[a-z]+" not in grammar_of(engine)


async def test_echoed_items_are_rendered(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    call = {"call_id": "c1", "name": "ask", "namespace": "team"}
    text = 'a "b"'
    items = [
        {"type": "message", "role": "user", "content": "hi", "id": "msg_1", "status": "completed"},
        {"type": "tool_search_call", "call_id": "s", "arguments": {}, "execution": "client"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "id": "fc_1", **call, "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "fine", "id": "x"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA-of-another-server"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": text},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "done"}],
        },
    ]
    await post(client, input=items)
    assert prompt_of(engine).endswith(
        "<|im_start|>user\nhi<|im_end|>\n"
        f"<|im_start|>assistant\nHm.{rendered('team__ask', {'a': 1})}<|im_end|>\n"
        "<|im_start|>tool\nfine<|im_end|>\n"
        f"<|im_start|>assistant\n{rendered('patch', {'input': text})}<|im_end|>\n"
        "<|im_start|>tool\ndone<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("kind", ["additional_tools", "tool_search_output"])
async def test_tools_within_the_input_are_offered(
    client: httpx.AsyncClient, engine: FakeEngine, kind: str
) -> None:
    found = {"type": kind, "role": "developer", "call_id": "s", "tools": [PATCH, TEAM]}
    items = [{"role": "user", "content": "hi"}, found, found]
    engine.reply_with(called("team__ask", {}))
    more = {**found, "tools": [WEATHER, {**TEAM, "tools": [{"type": "custom", "name": "more"}]}]}
    answer = await post(client, input=[*items, more], tools=[{**WEATHER, "description": "Own."}])
    [call] = answer["output"]
    assert (call["namespace"], call["name"]) == ("team", "ask")
    assert prompt_of(engine).count('"name": "patch"') == 1
    assert prompt_of(engine).count('"name": "weather", "description": "Own."') == 1
    assert prompt_of(engine).count('"name": "weather"') == 1
    assert '"name": "team__more"' in prompt_of(engine)
    for tools in ("x", [5], [WEATHER] * 5000):
        answer = await client.post(ROUTE, json=body(input=[{"type": kind, "tools": tools}]))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "input"


@pytest.mark.parametrize(
    "item",
    [
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "unheard_of"},
        {"type": ["message"]},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch"},
        {"type": "custom_tool_call_output", "output": "x"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": {}},
    ],
)
async def test_unreadable_items_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, item: dict[str, Any]
) -> None:
    answer = await client.post(ROUTE, json=body(input=[item]))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input"
    assert answer.json()["error"]["message"].startswith("input[0] ")
    assert engine.requests == []


class TestReasoning:
    @pytest.fixture(autouse=True)
    def reply(self, engine: FakeEngine) -> None:
        engine.reply_with("<think>Hm, ü.</think>\n\nYes.")

    async def test_content_by_default(self, client: httpx.AsyncClient) -> None:
        [item, _] = (await post(client))["output"]
        assert item["summary"] == []
        assert item["content"] == [{"type": "reasoning_text", "text": "Hm, ü."}]
        assert "encrypted_content" not in item

    @pytest.mark.parametrize("name", ["summary", "generate_summary"])
    async def test_summary_on_request(self, client: httpx.AsyncClient, name: str) -> None:
        found = await post(client, reasoning={name: "auto"})
        [item, _] = found["output"]
        assert item["content"] == []
        assert item["summary"] == [{"type": "summary_text", "text": "Hm, ü."}]
        assert found["reasoning"][name] == "auto"

    async def test_stream_of_a_summary(self, client: httpx.AsyncClient) -> None:
        answer = await client.post(ROUTE, json=body(stream=True, reasoning={"summary": "auto"}))
        found = [event for event in events(answer.text) if "reasoning" in event["type"]]
        kinds = [event["type"].removeprefix("response.reasoning_summary_") for event in found]
        assert kinds[0] == "part.added"
        assert kinds[-2:] == ["text.done", "part.done"]
        assert set(kinds[1:-2]) == {"text.delta"}
        assert "".join(event["delta"] for event in found[1:-2]) == "Hm, ü." == found[-2]["text"]
        assert {event["summary_index"] for event in found} == {0}

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("reasoning", [None, {"summary": "auto"}])
    async def test_encrypted_content_comes_back(
        self, client: httpx.AsyncClient, engine: FakeEngine, stream: bool, reasoning: Any
    ) -> None:
        fields = {"include": ["reasoning.encrypted_content"], "reasoning": reasoning}
        answer = await client.post(ROUTE, json=body(stream=stream, **fields))
        found = events(answer.text)[-1]["response"] if stream else answer.json()
        sealed = found["output"][0]["encrypted_content"]
        assert "Hm" not in sealed
        items = [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": sealed},
            {"role": "assistant", "content": "Yes."},
        ]
        await post(client, input=items)
        assert "<|im_start|>assistant\nHm, ü.Yes.<|im_end|>" in prompt_of(engine)

    @pytest.mark.parametrize("sealed", ["tgi1.?", "tgi1./w==", "", "other"])
    async def test_unreadable_encrypted_content_is_left_out(
        self, client: httpx.AsyncClient, engine: FakeEngine, sealed: str
    ) -> None:
        item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
        await post(client, input=[{"role": "user", "content": "hi"}, item])
        assert prompt_of(engine).endswith("user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_openais_stream_helper_reads_custom_calls(
    ai: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    engine.reply_with(called("patch", {"input": "a\nb"}))
    async with ai.responses.stream(
        model="tgi",
        input="hi",
        tools=[PATCH, TEAM],  # type: ignore[list-item]
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert "response.custom_tool_call_input.delta" in kinds
    [call] = final.output
    assert call.type == "custom_tool_call"
    assert call.input == "a\nb"
