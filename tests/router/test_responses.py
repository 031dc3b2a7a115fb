"""/v1/responses: items and events, for text, reasoning and function tools."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tests.router.test_tools import ANSWER, ARGUMENTS, CALL, bundle, prompt_of
from tgi_cli.engine.messages import FinishReason
from tgi_cli.text.bundle import TextBundle

ROUTE = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tgi", "input": "hi", **fields}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    path: Path = tmp_path_factory.mktemp("responses")
    return bundle(path)


@pytest.fixture
def engine(text: TextBundle) -> FakeEngine:
    engine = FakeEngine(text.tokenizer)
    engine.info = replace(engine.info, max_input_tokens=1999, max_total_tokens=2000)
    return engine


@pytest.fixture
def ai(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60)


async def post(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(ROUTE, json=body(**fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_text_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    found = await post(client, instructions="be brief", metadata={"a": "b"})
    assert found["id"].startswith("resp_")
    assert (found["object"], found["status"], found["error"]) == ("response", "completed", None)
    assert found["metadata"] == {"a": "b"}
    assert found["store"] is True
    [item] = found["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [
            {"type": "output_text", "text": "hello world", "annotations": [], "logprobs": []}
        ],
    }
    prompt, output = len(engine.requests[0].prompt_ids), len(engine.replies[0])
    assert found["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }
    assert prompt_of(engine) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_input_items_become_messages(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply_with(ANSWER)
    found = await post(client, tools=[TOOL], reasoning={"effort": "low"})
    reasoning, message, first, second = found["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Let me see."
    for call in (first, second):
        assert call["type"] == "function_call"
        assert call["id"].startswith("fc_")
        assert call["call_id"].startswith("call_")
        assert json.loads(call["arguments"]) == ARGUMENTS
    assert first["call_id"] != second["call_id"]
    details = found["usage"]["output_tokens_details"]
    assert details["reasoning_tokens"] == len(engine.tokenizer.encode("Hm.", False))
    assert found["tools"][0]["name"] == "weather"


@pytest.mark.parametrize("step", [1, 4, 1000])
async def test_stream_has_openais_events(
    client: httpx.AsyncClient, engine: FakeEngine, step: int
) -> None:
    engine.reply_with(ANSWER)
    engine.step = step
    answer = await client.post(ROUTE, json=body(tools=[TOOL], stream=True))
    assert answer.headers["content-type"] == "text/event-stream"
    found = events(answer.text)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds: list[str] = []
    for event in found:
        if not kinds or kinds[-1] != event["type"]:
            kinds.append(event["type"])
    part, call = "response.content_part", "response.function_call_arguments"
    item = "response.output_item"
    assert kinds == [
        *("response.created", "response.in_progress"),
        *(f"{item}.added", f"{part}.added", "response.reasoning_text.delta"),
        *("response.reasoning_text.done", f"{part}.done", f"{item}.done"),
        *(f"{item}.added", f"{part}.added", "response.output_text.delta"),
        *("response.output_text.done", f"{part}.done", f"{item}.done"),
        *(f"{item}.added", f"{call}.delta", f"{call}.done", f"{item}.done"),
        *(f"{item}.added", f"{call}.delta", f"{call}.done", f"{item}.done"),
        "response.completed",
    ]
    final = found[-1]["response"]
    assert [output["type"] for output in final["output"]] == [
        "reasoning",
        "message",
        *["function_call"] * 2,
    ]
    assert {output["status"] for output in final["output"]} == {"completed"}
    assert found[0]["response"]["output"] == []
    assert found[0]["response"]["status"] == "in_progress"
    done = [event["item"] for event in found if event["type"] == f"{item}.done"]
    assert done == final["output"]
    for place, output in enumerate(final["output"]):
        deltas = [
            event["delta"]
            for event in found
            if event["type"].endswith(".delta") and event["output_index"] == place
        ]
        if output["type"] == "function_call":
            assert "".join(deltas) == output["arguments"]
        else:
            assert "".join(deltas) == output["content"][0]["text"]
    assert final["usage"]["output_tokens"] == len(engine.replies[0])


async def test_empty_answer_is_an_empty_message(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.reply_with("")
    [item] = (await post(client))["output"]
    assert item["content"][0]["text"] == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_cut_off_answer_is_incomplete(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    answer = await client.post(ROUTE, json=body(max_output_tokens=2, stream=stream))
    last = events(answer.text)[-1] if stream else {"response": answer.json()}
    assert last.get("type") == ("response.incomplete" if stream else None)
    found = last["response"]
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["output"][0]["status"] == "incomplete"
    assert found["usage"]["output_tokens"] == 2


@pytest.mark.parametrize("after", [0, 2])
async def test_failed_stream_ends_with_response_failed(
    client: httpx.AsyncClient, engine: FakeEngine, after: int
) -> None:
    engine.failure, engine.fail_after = "broken", after
    answer = await client.post(ROUTE, json=body(stream=True))
    found = events(answer.text)
    assert found[0]["type"] == "response.created"
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["status"] == "failed"
    assert "broken" in found[-1]["response"]["error"]["message"]
    assert engine.failure_reason is FinishReason.ERROR


async def test_conversation_is_rendered(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """What a response gave is sent back as it came."""
    engine.reply_with(ANSWER)
    output = (await post(client, tools=[TOOL]))["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    await post(
        client,
        tools=[TOOL],
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            *output,
            {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "rain"},
            {
                "type": "function_call_output",
                "call_id": calls[1]["call_id"],
                "output": [{"type": "input_text", "text": "sun"}],
            },
            {"type": "message", "role": "assistant", "content": "ok"},
        ],
    )
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
    call = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    assert prompt_of(engine).endswith(
        "<|im_start|>user\nhi<|im_end|>\n"
        f"<|im_start|>assistant\nHm.Let me see.{call}{call}<|im_end|>\n"
        "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>tool\nsun<|im_end|>\n"
        "<|im_start|>assistant\nok<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_1", "input": None}, "previous_response_id"),
        ({"input": None}, "input"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"tools": [{"name": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_unsupported_parameters_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = await client.post(ROUTE, json=body(**{"stream": stream, **fields}))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert engine.requests == []


class TestOpenAI:
    async def test_client_creates_a_response(
        self, ai: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        found = await ai.responses.create(model="tgi", input="hi", temperature=0)
        assert found.output_text == "hello world"
        assert found.usage is not None
        assert found.usage.total_tokens > 0
        assert engine.requests[0].sampling.greedy

    async def test_client_loops_with_tools(
        self, ai: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.reply_with(CALL, "It rains.")
        talk: list[Any] = [{"role": "user", "content": "hi"}]
        found = await ai.responses.create(model="tgi", input=talk, tools=[TOOL])
        [call] = found.output
        assert call.type == "function_call"
        talk += found.output
        talk.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
        found = await ai.responses.create(model="tgi", input=talk, tools=[TOOL])
        assert found.output_text == "It rains."
        assert "<|im_start|>tool\nrain" in prompt_of(engine)

    async def test_stream_has_openais_events(
        self, ai: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.reply_with(ANSWER)
        stream = await ai.responses.create(model="tgi", input="hi", tools=[TOOL], stream=True)
        found = [event async for event in stream]
        text = "".join(e.delta for e in found if e.type == "response.output_text.delta")
        assert text == "Let me see."
        assert found[-1].type == "response.completed"
        assert found[-1].response.output_text == "Let me see."

    async def test_stream_helper_accumulates_events(
        self, ai: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.reply_with(ANSWER)
        async with ai.responses.stream(model="tgi", input="hi", tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert "response.function_call_arguments.delta" in kinds
        calls = [item for item in final.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [ARGUMENTS] * 2

    async def test_client_raises_errors(self, ai: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=r"'resp_1' not found\. This server"):
            await ai.responses.create(model="tgi", input="hi", previous_response_id="resp_1")
