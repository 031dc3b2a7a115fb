"""Anthropic's own client, on a real socket."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pydantic
import pytest

from tests.router.fakes import FakeEngine
from tests.router.test_tools import ANSWER, ARGUMENTS, bundle, prompt_of
from tgi_cli.engine.messages import FinishReason
from tgi_cli.text.bundle import TextBundle

USER: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {
        "name": "weather",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
ASKED: dict[str, Any] = {"model": "tgi", "max_tokens": 500, "messages": USER}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    path: Path = tmp_path_factory.mktemp("anthropic")
    return bundle(path)


@pytest.fixture
def engine(text: TextBundle) -> FakeEngine:
    engine = FakeEngine(text.tokenizer)
    engine.info = replace(engine.info, max_input_tokens=1999, max_total_tokens=2000)
    return engine


@pytest.fixture
def claude(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0, timeout=60)


async def test_create(claude: anthropic.AsyncAnthropic) -> None:
    message = await claude.messages.create(**ASKED, system="Be brief.")
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "hello world"
    assert message.stop_reason == "end_turn"
    assert message.usage.cache_read_input_tokens == 4
    assert message._request_id


async def test_stream_with_thinking_and_tools(
    claude: anthropic.AsyncAnthropic, engine: FakeEngine
) -> None:
    engine.reply_with(ANSWER)
    thinking: Any = {"type": "adaptive"}
    async with claude.messages.stream(**ASKED, tools=TOOLS, thinking=thinking) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    thought, said, call, other = final.content
    assert thought.type == "thinking"
    assert (thought.thinking, bool(thought.signature)) == ("Hm.", True)
    assert said.type == "text"
    assert said.text == "Let me see."
    assert call.type == other.type == "tool_use"
    assert call.input == other.input == ARGUMENTS
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == len(engine.replies[0])


async def test_tool_loop(claude: anthropic.AsyncAnthropic, engine: FakeEngine) -> None:
    """The client sends back the blocks that it got."""
    engine.reply_with(ANSWER)
    first = await claude.messages.create(**ASKED, tools=TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
        for block in first.content
        if block.type == "tool_use"
    ]
    engine.reply_with("Sunny.")
    turns: Any = [*USER, first.to_param(), {"role": "user", "content": results}]
    second = await claude.messages.create(**{**ASKED, "messages": turns}, tools=TOOLS)
    assert second.content[0].type == "text"
    assert second.content[0].text == "Sunny."
    assert prompt_of(engine).count("sunny<|im_end|>") == 2
    assert "Hm.Let me see." in prompt_of(engine)


async def test_stop_sequences(claude: anthropic.AsyncAnthropic) -> None:
    async with claude.messages.stream(**ASKED, stop_sequences=["wor"]) as stream:
        assert "".join([text async for text in stream.text_stream]) == "hello "
        final = await stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "wor")


async def test_count_tokens(claude: anthropic.AsyncAnthropic, engine: FakeEngine) -> None:
    await claude.messages.create(**ASKED, tools=TOOLS)
    count = await claude.messages.count_tokens(model="tgi", messages=USER, tools=TOOLS)
    assert count.input_tokens == len(engine.requests[0].prompt_ids)


async def test_parse(claude: anthropic.AsyncAnthropic, engine: FakeEngine) -> None:
    class Place(pydantic.BaseModel):
        city: str

    engine.reply_with('{"city": "Rom"}')
    parsed = await claude.messages.parse(**ASKED, output_format=Place)
    assert parsed.parsed_output == Place(city="Rom")
    assert "city" in (engine.requests[0].grammar or "")


async def test_betas(claude: anthropic.AsyncAnthropic) -> None:
    message = await claude.beta.messages.create(**ASKED, betas=["none-such-2030-01-01"])
    assert message.content[0].type == "text"
    count = await claude.beta.messages.count_tokens(model="tgi", messages=USER)
    assert count.input_tokens > 0


async def test_errors(claude: anthropic.AsyncAnthropic, engine: FakeEngine) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await claude.messages.create(**{**ASKED, "messages": []})
    assert caught.value.request_id
    assert caught.value.type == "invalid_request_error"
    long: Any = [{"role": "user", "content": "x" * 2500}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1500 m"):
        await claude.messages.create(**{**ASKED, "messages": long})
    failures: list[tuple[FinishReason, type[Exception]]] = [
        (FinishReason.OVERLOADED, anthropic._exceptions.OverloadedError),
        (FinishReason.TIMEOUT, anthropic._exceptions.GatewayTimeoutError),
        (FinishReason.ERROR, anthropic.InternalServerError),
    ]
    engine.failure, engine.fail_after = "broken", 2
    for engine.failure_reason, expected in failures:
        with pytest.raises(expected):
            await claude.messages.create(**ASKED)
        with pytest.raises(anthropic.APIStatusError):
            async with claude.messages.stream(**ASKED) as stream:
                await stream.get_final_message()


async def test_overloaded_server_is_tried_again(url: str, engine: FakeEngine) -> None:
    engine.failure, engine.failure_reason, engine.fails = "full", FinishReason.OVERLOADED, {1}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=1) as claude:
        message = await claude.messages.create(**ASKED)
    assert message.stop_reason == "end_turn"
    assert len(engine.requests) == 2


class TestKey:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_key": "secret"}

    async def test_key_and_token(self, url: str) -> None:
        for given in ({"api_key": "secret"}, {"auth_token": "secret"}):
            async with anthropic.AsyncAnthropic(base_url=url, max_retries=0, **given) as claude:
                assert (await claude.messages.create(**ASKED)).content
        async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as claude:
            with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
                await claude.messages.create(**ASKED)
