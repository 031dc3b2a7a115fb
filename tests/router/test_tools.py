"""Tools and reasoning in /v1/chat/completions, over scripted answers."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from huggingface_hub import AsyncInferenceClient
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tests.router.fakes import END_ID, FakeEngine
from tests.router.sse import events
from tests.unit.text import tiny
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.text.bundle import TextBundle

ROUTE = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln \\"x\\""}}\n</tool_call>'
ANSWER = f"<think>Hm.</think>\n\nLet me see.\n{CALL}\n{CALL}"
ARGUMENTS = {"city": 'Köln "x"'}

TOOL_CALL = {"name": "weather", "arguments": '{"city": "Köln \\"x\\""}'}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tgi", "messages": USER, "tools": [TOOL], **fields}


def bundle(path: Path, template: str = TEMPLATE, *special: str, **options: str) -> TextBundle:
    tiny.write_model(path, template)
    if special:
        backend = Backend.from_file(str(path / "tokenizer.json"))
        backend.add_special_tokens([AddedToken(text, special=True) for text in special])
        backend.save(str(path / "tokenizer.json"))
    parsers = {"tool_call_parser": "auto", "reasoning_parser": "auto", **options}
    return TextBundle.load(path, **parsers)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    return bundle(tmp_path_factory.mktemp("tools"))


@pytest.fixture
def engine(text: TextBundle) -> FakeEngine:
    engine = FakeEngine(text.tokenizer)
    engine.info = replace(engine.info, max_input_tokens=1999, max_total_tokens=2000)
    return engine


@pytest.fixture
def ai(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60)


def prompt_of(engine: FakeEngine) -> str:
    ids = engine.requests[-1].prompt_ids
    return engine.tokenizer.decode(ids, skip_special_tokens=False)


async def message(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(ROUTE, json=body(**fields))
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return {**choice["message"], "reason": choice["finish_reason"]}


def add_up(chunks: list[Any]) -> dict[str, Any]:
    """The message of a stream's chunks, as OpenAI's clients add them up."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            found["content"] += delta.get("content", "")
            found["reasoning"] += delta.get("reasoning", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                calls = found["tool_calls"]
                if call["index"] == len(calls):
                    assert call["type"] == "function"
                    calls.append({"id": call["id"], **call["function"]})
                else:
                    assert set(call) == {"index", "function"}
                    calls[call["index"]]["arguments"] += call["function"]["arguments"]
            found["reason"] = choice["finish_reason"]
    return found


@pytest.mark.tgi_pain(6)
async def test_calls_are_parsed(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply_with(ANSWER)
    found = await message(client)
    assert found["reason"] == "tool_calls"
    assert found["content"] == "Let me see."
    assert found["reasoning"] == found["reasoning_content"] == "Hm."
    first, second = found["tool_calls"]
    assert first["type"] == "function"
    assert first["id"].startswith("call_")
    assert first["id"] != second["id"]
    assert first["function"]["name"] == "weather"
    assert json.loads(second["function"]["arguments"]) == ARGUMENTS
    assert '"name": "weather", "description": "of a city"' in prompt_of(engine)


async def test_a_call_alone_has_no_content(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply_with(CALL)
    found = await message(client)
    assert found["content"] is None
    assert "reasoning" not in found


@pytest.mark.parametrize("step", [1, 2, 3, 5, 8, 13, 1000])
async def test_calls_are_streamed(client: httpx.AsyncClient, engine: FakeEngine, step: int) -> None:
    """However many tokens come at a time, the chunks add up to the same message."""
    engine.reply_with(ANSWER)
    engine.step = step
    answer = await client.post(ROUTE, json=body(stream=True))
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    found = add_up(chunks)
    assert [call["name"] for call in found["tool_calls"]] == ["weather"] * 2
    assert [json.loads(call["arguments"]) for call in found["tool_calls"]] == [ARGUMENTS] * 2
    assert (found["content"], found["reasoning"]) == ("Let me see.", "Hm.")
    assert found["reason"] == "tool_calls"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1)
    if step == 1:
        pieces = [
            call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())
        ]
        assert len(pieces) > 10, "arguments come as they are written"


async def test_any_split_of_the_tokens_gives_the_same_message(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """The same text in other tokens: letters, and pieces cut at random."""
    chance = random.Random(3)
    for _ in range(20):
        text, ids = ANSWER, []
        while text:
            size = chance.choice([1, 1, 2, 5, 9])
            ids += engine.tokenizer.encode(text[:size], False)
            text = text[size:]
        engine.play([*ids, END_ID])
        engine.step = chance.choice([1, 2, 4])
        found = add_up(events((await client.post(ROUTE, json=body(stream=True))).text)[:-1])
        assert (found["content"], found["reasoning"]) == ("Let me see.", "Hm.")
        assert [json.loads(call["arguments"]) for call in found["tool_calls"]] == [ARGUMENTS] * 2


async def test_text_streams_until_a_call_may_begin(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.reply_with("a < b <tool or not")
    *chunks, _ = events((await client.post(ROUTE, json=body(stream=True))).text)
    found = add_up(chunks)
    assert (found["content"], found["reason"]) == ("a < b <tool or not", "stop")
    assert chunks[1]["choices"][0]["delta"]["content"] == "a"


async def test_every_sample_has_its_calls(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for stream in (False, True):
        engine.reply_with(CALL, "no")
        answer = await client.post(ROUTE, json=body(n=2, stream=stream, logprobs=True))
        if stream:
            chunks = events(answer.text)[:-1]
            reasons = {
                choice["index"]: choice["finish_reason"]
                for chunk in chunks
                for choice in chunk["choices"]
                if choice["finish_reason"]
            }
            logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
            tokens = sum(len(found["content"]) for found in logprobs if found)
            assert tokens > len(engine.tokenizer.encode(CALL, False))
        else:
            reasons = {c["index"]: c["finish_reason"] for c in answer.json()["choices"]}
        assert reasons == {0: "tool_calls", 1: "stop"}


async def test_parallel_tool_calls_false_allows_one_call(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.reply_with(f"{CALL}{CALL}")
    assert len((await message(client, parallel_tool_calls=False))["tool_calls"]) == 1
    assert len((await message(client, parallel_tool_calls=True))["tool_calls"]) == 2


async def test_cut_off_call_has_finish_reason_length(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    [ids] = engine.reply_with(CALL)
    found = await message(client, max_tokens=len(ids) - 12)
    assert found["reason"] == "length"
    [call] = found["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert 'Köln "x"'.startswith(call["function"]["arguments"][10:].replace("\\", "")[:2])


@pytest.mark.parametrize("left", [1, 5, 20, 30])
async def test_beginning_of_a_second_call_is_not_text(
    client: httpx.AsyncClient, engine: FakeEngine, left: int
) -> None:
    [ids] = engine.reply_with(f"{CALL}\n{CALL}")
    found = await message(client, max_tokens=len(ids) // 2 + left)
    assert found["reason"] == "length"
    assert not found["content"]
    assert found["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize("choice", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
async def test_without_tools_markers_are_text(
    client: httpx.AsyncClient, engine: FakeEngine, choice: dict[str, Any]
) -> None:
    engine.reply_with(ANSWER)
    found = await message(client, **choice)
    assert found["content"] == f"Let me see.\n{CALL}\n{CALL}"
    assert found["reasoning"] == "Hm."
    assert found["reason"] == "stop"
    assert "weather" not in prompt_of(engine)


async def test_conversation_with_calls_is_rendered(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.reply_with(ANSWER)
    answered = await message(client)
    answered.pop("reason")
    call = answered["tool_calls"][0]
    objects = {**call, "function": {"name": "weather", "arguments": {"city": "y"}}}
    messages = [
        *USER,
        answered,
        {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": None, "tool_calls": [objects]},
        {"role": "developer", "content": "be brief"},
    ]
    await message(client, messages=messages)
    text = prompt_of(engine)
    written = '<tool_call>{"name": "weather", "arguments": {"city": "%s"}}</tool_call>'
    assert "Hm.Let me see." + written % 'Köln \\"x\\"' in text
    assert written % 'Köln \\"x\\"' + written % 'Köln \\"x\\"' in text
    assert written % "y" in text
    assert "<|im_start|>tool\nrain<|im_end|>" in text
    assert "<|im_start|>system\nbe brief<|im_end|>" in text


class TestReasoning:
    async def test_template_can_open_the_reasoning(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.reply_with("because</think>\n\nyes")
        kwargs = {"enable_thinking": True}
        found = await message(client, chat_template_kwargs=kwargs, tools=None)
        assert prompt_of(engine).endswith("assistant\n<think>\n")
        assert (found["reasoning"], found["content"]) == ("because", "yes")
        answer = await client.post(
            ROUTE, json=body(chat_template_kwargs=kwargs, tools=None, stream=True)
        )
        streamed = add_up(events(answer.text)[:-1])
        assert (streamed["reasoning"], streamed["content"]) == ("because", "yes")
        found = await message(client, chat_template_kwargs={"enable_thinking": False}, tools=None)
        assert found["content"] == "because</think>\n\nyes"

    async def test_reasoning_can_be_excluded(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.reply_with(ANSWER)
        found = await message(client, include_reasoning=False)
        assert "reasoning" not in found
        assert found["content"] == "Let me see."
        answer = await client.post(ROUTE, json=body(include_reasoning=False, stream=True))
        assert "Hm" not in answer.text

    async def test_reasoning_effort_reaches_the_template(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await message(client, reasoning_effort="none", chat_template_kwargs={})
        assert not prompt_of(engine).endswith("<think>\n")
        kwargs = {"enable_thinking": True}
        await message(client, reasoning_effort="none", chat_template_kwargs=kwargs)
        assert prompt_of(engine).endswith("<think>\n")


async def test_reasoning_opened_by_the_prompt_is_recognised(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    messages = [*USER, {"role": "assistant", "content": "<think>so "}]
    engine.reply_with("far</think>good")
    found = await message(client, messages=messages, tools=None)
    assert prompt_of(engine).endswith("assistant\n<think>so ")
    assert (found["reasoning"], found["content"]) == ("far", "good")
    await message(client, messages=messages, continue_final_message=False)
    assert prompt_of(engine).endswith("<|im_end|>\n<|im_start|>assistant\n")
    await message(client, add_generation_prompt=False)
    assert prompt_of(engine).endswith("hi<|im_end|>\n")
    await message(client, continue_final_message=True)
    assert prompt_of(engine).endswith("<|im_start|>user\nhi")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": {"function": {"name": "time"}}}, "tool_choice", "'time', which is no"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "needs `tools`"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "must name a function"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "`tools` has none"),
        ({"tools": [{"type": "web_search"}]}, "tools", r"tools[0] is of type 'web_search'"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "has no name"),
        ({"functions": [{}]}, "functions", "use `tools`"),
        ({"function_call": {"name": "f"}}, "function_call", "use `tools`"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "in the request"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
        ({"chat_template_kwargs": {"eos_token": ""}}, "chat_template_kwargs", "'eos_token'"),
        ({"chat_template_kwargs": {"nothing": 1}}, "chat_template_kwargs", "does not use it"),
        ({"continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message", "contradict"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "must name its"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "{"}}]}]}, "messages", "are not valid JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "[1]"}}]}]}, "messages", "a JSON object"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages",
         "`image_url` is not supported"),
    ],
)  # fmt: skip
async def test_invalid_tools_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = await client.post(ROUTE, json=body(**fields))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]
    assert engine.requests == []


class TestOtherModels:
    """Markers that are special tokens, and templates that know no tools."""

    @pytest.fixture
    def ask(self, config: RouterConfig, tmp_path: Path) -> Any:
        async def ask(
            template: str, special: tuple[str, ...], reply: str, **options: Any
        ) -> tuple[dict[str, Any], FakeEngine]:
            fields = options.pop("fields", {})
            text = bundle(tmp_path, template, *special, **options)
            engine = FakeEngine(text.tokenizer, reply)
            engine.info = replace(engine.info, max_input_tokens=1999, max_total_tokens=2000)
            transport = httpx.ASGITransport(create_app(engine, text, config))
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                found = await message(client, **fields)
                stream = await client.post(ROUTE, json=body(stream=True, **fields))
            streamed = add_up(events(stream.text)[:-1])
            assert streamed["content"] == (found["content"] or "")
            assert streamed["reason"] == found["reason"]
            assert len(streamed["tool_calls"]) == len(found.get("tool_calls", ()))
            return found, engine

        return ask

    async def test_mistrals_format_is_parsed(self, ask: Any) -> None:
        found, _ = await ask(
            TEMPLATE,
            ("[TOOL_CALLS]", "[OTHER]"),
            'Well.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "x"}}][OTHER]',
            tool_call_parser="mistral_list",
        )
        [call] = found["tool_calls"]
        assert len(call["id"]) == 9
        assert json.loads(call["function"]["arguments"]) == {"city": "x"}
        assert found["content"] == "Well."

    async def test_harmony_is_parsed(self, ask: Any) -> None:
        special = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
        found, _ = await ask(
            "{{ tools }}<|channel|><|message|>{{ messages[0].content }}<|start|>assistant",
            special,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.weather <|constrain|>json<|message|>{"city": "x"}',
        )
        assert found["reasoning"] == "Hm."
        assert found["content"] is None
        assert found["tool_calls"][0]["function"] == {
            "name": "weather",
            "arguments": '{"city": "x"}',
        }

    async def test_template_without_tools_gets_them_as_text(self, ask: Any) -> None:
        found, engine = await ask(tiny.CHAT_TEMPLATE, (), f"Sure. {CALL}")
        assert len(found["tool_calls"]) == 1
        text = prompt_of(engine)
        assert f"system\nYou can call these functions:\n{json.dumps(TOOL)}\n" in text
        assert "between <tool_call> and </tool_call>" in text
        _, engine = await ask(tiny.CHAT_TEMPLATE, (), "x", fields={"tool_prompt": "Call!"})
        assert "\n\nCall!<|im_end|>\n<|im_start|>user\nhi<|im_end|>" in prompt_of(engine)

    async def test_template_without_tools_gets_calls_as_text(self, ask: Any) -> None:
        calls = [{"id": "1", "type": "function", "function": TOOL_CALL}]
        messages = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ]
        _, engine = await ask(tiny.CHAT_TEMPLATE, (), "x", fields={"messages": messages})
        assert prompt_of(engine).endswith(
            f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>user\n"
            "<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )

    async def test_unknown_formats_are_refused(self, config: RouterConfig, tmp_path: Path) -> None:
        text = bundle(tmp_path, "{{ tools }}{{ messages[0].content }}")
        transport = httpx.ASGITransport(create_app(FakeEngine(text.tokenizer), text, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            answer = await client.post(ROUTE, json=body())
            assert answer.status_code == 400
            assert "--tool-call-parser" in answer.json()["error"]["message"]
            assert (await client.post(ROUTE, json=body(tool_choice="none"))).status_code == 200


class TestClients:
    async def test_openais_client_gets_calls(
        self, ai: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.reply_with(ANSWER)
        answer = await ai.chat.completions.create(model="tgi", messages=USER, tools=[TOOL])
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        assert len(choice.message.tool_calls) == 2
        follow = [
            *USER,
            choice.message,
            {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "rain"},
        ]
        await ai.chat.completions.create(model="tgi", messages=follow, tools=[TOOL])
        assert '"weather", "arguments": {"city": "Köln' in prompt_of(engine)

    async def test_openais_stream_helper_accumulates_calls(
        self, ai: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.reply_with(ANSWER)
        kinds = set()
        async with ai.chat.completions.stream(
            model="tgi", messages=USER, tools=[TOOL], stream_options={"include_usage": True}
        ) as stream:
            async for event in stream:
                kinds.add(event.type)
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
        assert "tool_calls.function.arguments.done" in kinds
        found = final.choices[0].message
        assert found.role == "assistant"
        assert found.content == "Let me see."
        assert found.tool_calls is not None
        assert [json.loads(c.function.arguments) for c in found.tool_calls] == [ARGUMENTS] * 2
        assert len({call.id for call in found.tool_calls}) == 2
        assert final.usage is not None

    async def test_client_of_huggingface_hub_gets_calls(self, url: str, engine: FakeEngine) -> None:
        engine.reply_with(ANSWER)
        hub = AsyncInferenceClient(url, timeout=60)
        answer = await hub.chat_completion(USER, tools=[TOOL], tool_choice="auto")
        found = answer.choices[0].message
        assert found.reasoning == "Hm."
        assert found.tool_calls is not None
        assert found.tool_calls[0].function.name == "weather"
        chunks = [c async for c in await hub.chat_completion(USER, tools=[TOOL], stream=True)]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        written = [call for delta in deltas for call in delta.tool_calls or ()]
        text = "".join(call.function.arguments for call in written if call.index == 1)
        assert json.loads(text) == ARGUMENTS
        assert "".join(delta.reasoning or "" for delta in deltas) == "Hm."
