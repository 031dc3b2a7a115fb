"""/v1/messages: blocks and events, for text, thinking and tools."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tests.router.test_tools import ANSWER, ARGUMENTS, CALL, bundle, prompt_of
from tgi_cli.engine.messages import FinishReason
from tgi_cli.router.http import sse
from tgi_cli.text.bundle import TextBundle

ROUTE = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
SEARCH = {"name": "ToolSearch", "input_schema": {"type": "object"}}
LATER = {**TOOL, "name": "later", "defer_loading": True}
CALLED = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {}}],
}
FORM = {"type": "json_schema", "schema": SCHEMA}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tgi", "max_tokens": 500, "messages": USER, **fields}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    path: Path = tmp_path_factory.mktemp("messages")
    return bundle(path)


@pytest.fixture
def engine(text: TextBundle) -> FakeEngine:
    engine = FakeEngine(text.tokenizer)
    engine.info = replace(engine.info, max_input_tokens=1999, max_total_tokens=2000)
    return engine


async def post(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(ROUTE, json=body(**fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await client.post(ROUTE, json=body(stream=True, **fields))
    assert answer.headers["content-type"] == "text/event-stream"
    assert "[DONE]" not in answer.text
    return events(answer.text)


async def refusal(client: httpx.AsyncClient, **fields: Any) -> str:
    """The message of a 400."""
    answer = await client.post(ROUTE, json=body(**fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    message: str = error["error"]["message"]
    return message


def accumulated(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream's events; fails if their order is not Anthropic's."""
    start, *between, delta, stop = found
    assert (start["type"], delta["type"]) == ("message_start", "message_delta")
    assert stop == {"type": "message_stop"}
    message = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    names = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    given = None
    for event in between:
        if event["type"] == "content_block_start":
            assert given is None, "blocks do not overlap"
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            given = ""
        elif event["type"] == "content_block_stop":
            block = message["content"][-1]
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = json.loads(given or "{}")
            given = None
        else:
            assert event["type"] == "content_block_delta"
            assert event["index"] == len(message["content"]) - 1
            part = event["delta"]
            if part["type"] == "input_json_delta":
                assert given is not None
                given += part["partial_json"]
            else:
                message["content"][-1][names[part["type"]]] += part[names[part["type"]]]
    assert given is None
    message |= delta["delta"]
    message["usage"] |= delta["usage"]
    return message


class TestText:
    async def test_answer(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        found = await post(client)
        assert found["id"].startswith("msg_")
        assert (found["type"], found["role"], found["model"]) == (
            "message",
            "assistant",
            "acme/tiny",
        )
        assert found["content"] == [{"type": "text", "text": "hello world"}]
        assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)

    async def test_usage_is_split_by_what_was_cached(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        (reply,) = engine.reply_with("hello")
        usage = (await post(client))["usage"]
        assert usage["cache_read_input_tokens"] == 4
        assert usage["cache_creation_input_tokens"] == 0
        assert usage["input_tokens"] == len(engine.requests[0].prompt_ids) - 4
        assert usage["output_tokens"] == len(reply)

    async def test_stream_accumulates_to_the_complete_answer(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        whole = await post(client)
        found = await stream(client)
        assert found[0]["message"]["usage"]["cache_read_input_tokens"] == 4
        streamed = accumulated(found)
        for message in (whole, streamed):
            assert message.pop("id").startswith("msg_")
        assert streamed == whole

    async def test_answer_without_text_has_no_block(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.reply_with("")
        assert (await post(client))["content"] == []
        assert [event["type"] for event in await stream(client)] == [
            "message_start", "message_delta", "message_stop",
        ]  # fmt: skip

    async def test_parameters_reach_the_engine(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await post(client, temperature=0.5, top_p=0.9, top_k=7, max_tokens=11)
        request = engine.requests[0]
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
        assert request.max_new_tokens == 11

    async def test_prefilled_answer_is_continued(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        found = await post(client, messages=[*USER, {"role": "assistant", "content": "Well, "}])
        assert found["content"][0]["text"] == "hello world"
        assert prompt_of(engine).endswith("assistant\nWell, ")

    async def test_betas_and_unknown_fields_are_ignored(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await post(client)
        answer = await client.post(
            f"{ROUTE}?beta=true",
            json=body(
                metadata={"user_id": "u"},
                service_tier="auto",
                context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                cache_control={"type": "ephemeral"},
                inference_geo="eu",
                marzipan=1,
            ),
            headers={"anthropic-beta": "interleaved-thinking-2025-05-14,none-such-2030-01-01"},
        )
        assert answer.status_code == 200
        first, second = engine.requests
        assert first.prompt_ids == second.prompt_ids
        assert replace(first.sampling, seed=0) == replace(second.sampling, seed=0)


class TestStopReasons:
    async def test_stop_sequence_is_reported(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        found = await post(client, stop_sequences=["xyz", "wor", "ld"])
        assert found["content"][0]["text"] == "hello "
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "wor")
        streamed = accumulated(await stream(client, stop_sequences=["wor"]))
        assert (streamed["stop_reason"], streamed["stop_sequence"]) == ("stop_sequence", "wor")

    async def test_max_tokens(self, client: httpx.AsyncClient) -> None:
        found = await post(client, max_tokens=2)
        assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
        assert found["usage"]["output_tokens"] == 2

    async def test_end_of_the_context_is_told_from_max_tokens(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.play([9] * 3000)
        prompt = "x " * 100
        found = await post(
            client, max_tokens=32_000, messages=[{"role": "user", "content": prompt}]
        )
        room = 2000 - len(engine.requests[0].prompt_ids)
        assert found["stop_reason"] == "model_context_window_exceeded"
        assert found["usage"]["output_tokens"] == engine.requests[0].max_new_tokens == room
        assert (await post(client, max_tokens=1500))["stop_reason"] == "max_tokens"

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_max_tokens_0_computes_the_prompt_alone(
        self, client: httpx.AsyncClient, engine: FakeEngine, streamed: bool
    ) -> None:
        if streamed:
            found = accumulated(await stream(client, max_tokens=0))
        else:
            found = await post(client, max_tokens=0)
        assert (found["content"], found["stop_reason"]) == ([], "max_tokens")
        assert found["usage"]["output_tokens"] == 0
        assert engine.requests[0].max_new_tokens == 1


class TestThinking:
    async def test_thinking_is_a_block_with_a_signature(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.reply_with("<think>Hm.</think>\n\nYes.")
        thought, said = (await post(client))["content"]
        assert (thought["type"], thought["thinking"]) == ("thinking", "Hm.")
        assert thought["signature"]
        assert (said["type"], said["text"]) == ("text", "Yes.")
        assert accumulated(await stream(client))["content"] == [thought, said]

    async def test_omitted_thinking_comes_back_in_its_signature(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.reply_with("<think>Hm é.</think>Yes.")
        config = {"type": "adaptive", "display": "omitted"}
        found = (await post(client, thinking=config))["content"]
        assert accumulated(await stream(client, thinking=config))["content"] == found
        assert found[0]["thinking"] == ""
        turns = [*USER, {"role": "assistant", "content": found}, *USER]
        await post(client, messages=turns)
        assert "assistant\nHm é.Yes.<|im_end|>" in prompt_of(engine)

    async def test_disabled_thinking_is_dropped(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.reply_with("<think>Hm.</think>Yes.")
        for found in (
            await post(client, thinking={"type": "disabled"}),
            accumulated(await stream(client, thinking={"type": "disabled"})),
        ):
            assert [block["type"] for block in found["content"]] == ["text"]

    async def test_template_is_told_whether_to_think(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        for config, opened in (
            (None, False),
            ({"type": "adaptive"}, False),
            ({"type": "enabled"}, True),
            ({"type": "disabled"}, False),
        ):
            await post(client, thinking=config)
            assert prompt_of(engine).endswith("<think>\n") is opened

    @pytest.mark.parametrize("signature", ["", "abc", "thought:!", "thought:/w==", None])
    async def test_any_signature_is_accepted(
        self, client: httpx.AsyncClient, engine: FakeEngine, signature: str | None
    ) -> None:
        blocks = [
            {"type": "thinking", "thinking": "", "signature": signature},
            {"type": "redacted_thinking", "data": "opaque"},
            {"type": "thinking", "thinking": "Aha.", "signature": signature},
            {"type": "text", "text": "Yes."},
        ]
        await post(client, messages=[*USER, {"role": "assistant", "content": blocks}, *USER])
        assert "assistant\nAha.Yes.<|im_end|>" in prompt_of(engine)

    async def test_invalid_thinking_is_refused(self, client: httpx.AsyncClient) -> None:
        assert "thinking.type" in await refusal(client, thinking={"type": "hard"})
        config = {"type": "adaptive", "display": "backwards"}
        assert "thinking.display" in await refusal(client, thinking=config)


class TestTools:
    async def test_calls_are_blocks(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.reply_with(ANSWER)
        found = await post(client, tools=[TOOL])
        thought, said, first, second = found["content"]
        assert (thought["thinking"], said["text"]) == ("Hm.", "Let me see.")
        assert first["id"].startswith("toolu_")
        assert first["id"] != second["id"]
        for call in (first, second):
            assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", ARGUMENTS)
        assert found["stop_reason"] == "tool_use"

    @pytest.mark.parametrize("step", [1, 3, 1000])
    async def test_streamed_calls(
        self, client: httpx.AsyncClient, engine: FakeEngine, step: int
    ) -> None:
        engine.reply_with(ANSWER)
        engine.step = step
        found = accumulated(await stream(client, tools=[TOOL]))
        assert [block["type"] for block in found["content"]] == [
            "thinking", "text", "tool_use", "tool_use",
        ]  # fmt: skip
        assert found["content"][3]["input"] == ARGUMENTS
        assert found["stop_reason"] == "tool_use"

    async def test_call_that_is_cut_off_has_no_input(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        (reply,) = engine.reply_with(CALL)
        found = await post(client, tools=[TOOL], max_tokens=len(reply) - 20)
        (call,) = found["content"]
        assert (call["name"], call["input"]) == ("weather", {})
        assert found["stop_reason"] == "max_tokens"

    async def test_one_call_at_a_time(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.reply_with(ANSWER)
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        found = await post(client, tools=[TOOL], tool_choice=choice)
        assert [block["type"] for block in found["content"]].count("tool_use") == 1

    @pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
    async def test_calls_can_be_forced(
        self, client: httpx.AsyncClient, engine: FakeEngine, choice: dict[str, Any]
    ) -> None:
        engine.reply_with(CALL)
        await post(client, tools=[TOOL, {**TOOL, "name": "other"}], tool_choice=choice)
        grammar = engine.requests[0].grammar
        assert grammar is not None
        assert ("other" in grammar) is (choice["type"] == "any")

    async def test_choice_none_offers_no_tools(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await post(client, tools=[TOOL], tool_choice={"type": "none"})
        assert engine.requests[0].grammar is None

    async def test_invalid_choices_are_refused(self, client: httpx.AsyncClient) -> None:
        for choice in ({"type": "tool"}, {"type": "tool", "name": "none-such"}, {"type": "some"}):
            assert await refusal(client, tools=[TOOL], tool_choice=choice)
        assert "tools" in await refusal(client, tool_choice={"type": "any"})

    async def test_results_follow_their_calls(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rom"}}
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        results = [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": parts},
            {"type": "tool_result", "tool_use_id": "toolu_3"},
            {"type": "text", "text": "and now?"},
        ]
        said = [{"type": "text", "text": "Wait."}, call]
        turns = [
            *USER,
            {"role": "assistant", "content": said},
            {"role": "user", "content": results},
        ]
        await post(client, tools=[TOOL], messages=turns)
        assert (
            '<|im_start|>assistant\nWait.<tool_call>{"name": "weather", "arguments": {"city": '
            '"Rom"}}</tool_call><|im_end|>\n'
            "<|im_start|>tool\nsunny<|im_end|>\n"
            "<|im_start|>tool\na\nb<|im_end|>\n"
            "<|im_start|>tool\n<|im_end|>\n"
            "<|im_start|>user\nand now?<|im_end|>\n"
        ) in prompt_of(engine)

    @pytest.mark.parametrize(
        ("content", "shown"), [("no network", "Error: no network"), ("", "Error")]
    )
    async def test_failed_results_say_so(
        self, client: httpx.AsyncClient, engine: FakeEngine, content: str, shown: str
    ) -> None:
        result = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": True}
        await post(client, messages=[{"role": "user", "content": [result]}])
        assert f"<|im_start|>tool\n{shown}<|im_end|>" in prompt_of(engine)

    async def test_anthropics_own_tools_are_left_out(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await post(client, tools=[TOOL])
        own = [
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
            {"type": "bash_20250124", "name": "bash"},
        ]
        await post(client, tools=[own[0], {"type": "custom", **TOOL}, own[1]])
        first, second = engine.requests
        assert first.prompt_ids == second.prompt_ids
        await post(client, tools=own)
        assert "tool_call" not in prompt_of(engine)

    async def test_examples_are_part_of_the_description(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await post(client, tools=[{**TOOL, "input_examples": [{"city": "Rom"}]}])
        assert 'of a city\\n\\nExamples of input:\\n{\\"city\\":\\"Rom\\"}' in prompt_of(engine)


class TestDeferredTools:
    def result(self, content: Any) -> dict[str, Any]:
        block = {"type": "tool_result", "tool_use_id": "t1", "content": content}
        return {"role": "user", "content": [block]}

    async def offered(self, client: httpx.AsyncClient, engine: FakeEngine, **fields: Any) -> bool:
        await post(client, **fields)
        return '"later"' in prompt_of(engine)

    async def test_deferred_tools_are_offered_once_found(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        tools = [SEARCH, LATER]
        assert not await self.offered(client, engine, tools=tools)
        found = self.result([{"type": "tool_reference", "tool_name": "later"}])
        turns = [*USER, CALLED, found]
        assert await self.offered(client, engine, tools=tools, messages=turns)
        assert "Tool later is available from now on." in prompt_of(engine)
        turns = [*turns, {"role": "assistant", "content": "ok"}, *USER]
        assert await self.offered(client, engine, tools=tools, messages=turns)
        other = [*USER, CALLED, self.result([{"type": "tool_reference", "tool_name": "x"}])]
        assert not await self.offered(client, engine, tools=tools, messages=other)

    async def test_tools_that_nothing_could_find_are_offered_at_once(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        own = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
        for tools in ([LATER], [TOOL, LATER], [own, LATER]):
            assert await self.offered(client, engine, tools=tools)

    async def test_called_and_forced_tools_are_offered(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        tools = [SEARCH, LATER]
        call = {"type": "tool_use", "id": "t1", "name": "later", "input": {}}
        turns = [*USER, {"role": "assistant", "content": [call]}, self.result("done")]
        assert await self.offered(client, engine, tools=tools, messages=turns)
        choice = {"type": "tool", "name": "later"}
        engine.reply_with('<tool_call>\n{"name": "later", "arguments": {}}\n</tool_call>')
        assert await self.offered(client, engine, tools=tools, tool_choice=choice)

    async def test_tools_change_within_a_conversation(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        def turn(kind: str, tool: dict[str, Any]) -> dict[str, Any]:
            return {"role": "system", "content": [{"type": kind, "tool": tool}]}

        named = {"type": "tool_reference", "name": "later"}
        tools = [SEARCH, LATER]
        added = [*USER, turn("tool_addition", named), *USER]
        assert await self.offered(client, engine, tools=tools, messages=added)
        removed = [*added, turn("tool_removal", named), *USER]
        assert not await self.offered(client, engine, tools=tools, messages=removed)
        inline = {"type": "tool_definition", "definition": {**TOOL, "name": "later"}}
        defined = [*USER, turn("tool_addition", inline), *USER]
        assert await self.offered(client, engine, tools=[TOOL], messages=defined)
        assert "names no tool" in await refusal(
            client, messages=[*USER, turn("tool_addition", {"type": "tool_reference"})]
        )


class TestConversation:
    async def rendered(self, client: httpx.AsyncClient, engine: FakeEngine, **fields: Any) -> str:
        await post(client, **fields)
        return prompt_of(engine)

    async def test_system_blocks_are_one_message(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        blocks = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
        prompt = await self.rendered(client, engine, system=blocks)
        assert prompt.startswith("<|im_start|>system\nBe brief.\nBe kind.<|im_end|>\n")

    @pytest.mark.parametrize("rest", ["", "\nBe brief."])
    async def test_billing_header_is_dropped(
        self, client: httpx.AsyncClient, engine: FakeEngine, rest: str
    ) -> None:
        header = "x-anthropic-billing-header: cc_version=%s; cc_entrypoint=cli;"
        kind = {"type": "text", "text": "Be kind."}
        prompts = {
            await self.rendered(client, engine, system=system)
            for version in ("2.1.330", "2.1.331; nonce=7")
            for system in (
                [{"type": "text", "text": header % version + rest}, kind],
                header % version + rest + "\nBe kind.",
            )
        }
        assert len(prompts) == 1
        assert prompts.pop().startswith(f"<|im_start|>system{rest}\nBe kind.<|im_end|>\n")
        alone = await self.rendered(client, engine, system=header % "1")
        assert alone.startswith("<|im_start|>user\nhi")

    async def test_text_renders_alike_however_it_is_marked(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        block = {"type": "text", "text": "hi"}
        cached = {**block, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        for role in ("user", "system", "assistant"):
            prompts = {
                await self.rendered(
                    client, engine, messages=[*USER, {"role": role, "content": content}, *USER]
                )
                for content in ("hi", [block], [cached])
            }
            assert len(prompts) == 1

    async def test_system_message_stays_in_its_place(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        turns = [*USER, {"role": "system", "content": "Be brief."}, *USER]
        prompt = await self.rendered(client, engine, messages=turns)
        assert prompt.index("user\nhi") < prompt.index("Be brief.") < prompt.rindex("user\nhi")
        block = {"type": "mid_conv_system", "content": [{"type": "text", "text": "Be brief."}]}
        content = [{"type": "text", "text": "hi"}, block, {"type": "text", "text": "hi"}]
        within = await self.rendered(
            client, engine, messages=[{"role": "user", "content": content}]
        )
        assert within == prompt

    async def test_documents_and_search_results_are_text(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        text = {"type": "text", "media_type": "text/plain", "data": "Once"}
        parts = {"type": "content", "content": [{"type": "text", "text": "upon"}]}
        content = [
            {"type": "document", "title": "A tale", "source": text},
            {"type": "document", "source": parts},
            {"type": "document", "source": {"type": "content", "content": "a"}},
            {
                "type": "search_result",
                "title": "Time",
                "source": "https://x.example",
                "content": [{"type": "text", "text": "time"}],
            },
        ]
        prompt = await self.rendered(
            client, engine, messages=[{"role": "user", "content": content}]
        )
        assert "user\nA tale\nOnce\nupon\na\nTime\nhttps://x.example\ntime<|im_end|>" in prompt

    async def test_results_of_anthropics_own_tools_are_skipped(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        said = [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"error_code": "e"}},
            {"type": "text", "text": "Found."},
        ]
        prompt = await self.rendered(
            client, engine, messages=[*USER, {"role": "assistant", "content": said}, *USER]
        )
        assert "assistant\nFound.<|im_end|>" in prompt

    async def test_later_turns_begin_with_earlier_ones(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        tools, system = [TOOL], [{"type": "text", "text": "Be brief."}]
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b", "c")]},
            {"role": "system", "content": [{"type": "text", "text": "Rules."}]},
        ]
        before = ""
        engine.reply_with(CALL)
        for _ in range(4):
            answer = await post(client, messages=turns, tools=tools, system=system)
            prompt = prompt_of(engine)
            assert prompt.startswith(before)
            before = prompt.removesuffix("<|im_start|>assistant\n")
            (call,) = answer["content"]
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}
            turns[1]["content"] = "Rules."  # Claude Code sends a plain string from turn 2 on
            turns = [
                *turns,
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]},
            ]

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ([{"type": "image", "source": {"type": "url", "url": "x"}}], "type `image`"),
            ([{"type": "document", "source": {"type": "url", "url": "x"}}], "must be text"),
            ([{"type": "container_upload", "file_id": "x"}], "type `container_upload`"),
            ([{"type": "text"}], "type `text`"),
            ([{"type": "tool_result"}], "tool_use_id"),
            ([{"type": "tool_result", "tool_use_id": "t", "content": {}}], "must be text"),
            ([{}], "messages[0].content[0].type"),
            (None, "messages[0].content"),
        ],
    )
    async def test_what_is_no_text_is_refused(
        self, client: httpx.AsyncClient, engine: FakeEngine, content: Any, words: str
    ) -> None:
        assert words in await refusal(client, messages=[{"role": "user", "content": content}])
        assert engine.requests == []

    async def test_invalid_requests_are_refused(self, client: httpx.AsyncClient) -> None:
        assert "role must be one of" in await refusal(
            client, messages=[{"role": "tool", "content": "x"}]
        )
        assert "`messages` cannot be empty" in await refusal(client, messages=[])
        assert "`max_tokens` must be >= 0" in await refusal(client, max_tokens=-1)
        assert "`mcp_servers`" in await refusal(client, mcp_servers=[{"type": "url"}])
        assert "stop_sequences" in await refusal(client, stop_sequences=list("abcdefgh"))
        said = [{"type": "tool_use", "name": "weather", "input": {}}]
        assert "needs an `id`" in await refusal(
            client, messages=[*USER, {"role": "assistant", "content": said}]
        )
        answer = await client.post(ROUTE, json={"model": "x", "messages": USER})
        assert "'max_tokens'" in answer.json()["error"]["message"]


class TestStructuredOutput:
    @pytest.mark.parametrize(
        "fields", [{"output_config": {"format": FORM}}, {"output_format": FORM}]
    )
    async def test_answers_follow_the_schema(
        self, client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
    ) -> None:
        await post(client, **fields)
        assert "city" in (engine.requests[0].grammar or "")

    async def test_invalid_schemas_are_refused_by_anthropics_name(
        self, client: httpx.AsyncClient
    ) -> None:
        form: dict[str, Any] = {"type": "json_schema", "schema": {"type": "nothing"}}
        for format in (form, {"type": "xml"}, {"type": "json_schema"}):
            words = await refusal(client, output_config={"format": format})
            assert "`output_config.format`" in words


class TestCount:
    async def test_count_is_that_of_the_prompt(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        prompt = {"system": "Be brief.", "tools": [TOOL], "thinking": {"type": "adaptive"}}
        await post(client, **prompt)
        answer = await client.post(COUNT, json={"model": "tgi", "messages": USER, **prompt})
        assert answer.json() == {"input_tokens": len(engine.requests[0].prompt_ids)}
        assert len(engine.requests) == 1

    async def test_prompts_beyond_the_context_are_counted(self, client: httpx.AsyncClient) -> None:
        long = [{"role": "user", "content": "hello " * 5000}]
        answer = await client.post(COUNT, json={"model": "tgi", "messages": long})
        assert answer.status_code == 200
        assert answer.json()["input_tokens"] > 2000

    async def test_errors(self, client: httpx.AsyncClient) -> None:
        answer = await client.post(COUNT, json={"model": "tgi", "messages": []})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


class TestErrors:
    async def test_long_prompts_are_refused_in_the_words_that_agents_read(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        long = [{"role": "user", "content": "x" * 1500}]
        counted = await client.post(COUNT, json={"model": "tgi", "messages": long})
        tokens = counted.json()["input_tokens"]
        assert 2000 - 1024 < tokens < 2000
        words = await refusal(client, messages=long, max_tokens=32_000)
        assert words == f"prompt is too long: {tokens} tokens > {2000 - 1024} maximum"
        words = await refusal(client, messages=long, max_tokens=600)
        assert words == f"prompt is too long: {tokens} tokens > 1400 maximum"
        longer = [{"role": "user", "content": "x" * 2500}]
        assert (await refusal(client, messages=longer, max_tokens=1)).endswith("> 1999 maximum")
        assert engine.requests == []

    async def test_long_prompts_are_counted_to_their_end(self, client: httpx.AsyncClient) -> None:
        long = [{"role": "user", "content": "hello world " * 20_000}]
        counted = await client.post(COUNT, json={"model": "tgi", "messages": long})
        tokens = counted.json()["input_tokens"]
        assert tokens > 20_000
        words = await refusal(client, messages=long, max_tokens=1)
        assert words == f"prompt is too long: {tokens} tokens > 1999 maximum"

    async def test_openais_routes_keep_openais_words(self, client: httpx.AsyncClient) -> None:
        long = [{"role": "user", "content": "x" * 2500}]
        error = (await client.post("/v1/chat/completions", json={"messages": long})).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is 2000 tokens")

    @pytest.mark.parametrize(
        ("reason", "status", "kind"),
        [
            (FinishReason.ERROR, 500, "api_error"),
            (FinishReason.OVERLOADED, 529, "overloaded_error"),
            (FinishReason.TIMEOUT, 504, "timeout_error"),
            (FinishReason.CANCELLED, 500, "api_error"),
        ],
    )
    async def test_failures_of_the_engine(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        reason: FinishReason,
        status: int,
        kind: str,
    ) -> None:
        engine.failure, engine.failure_reason, engine.fail_after = "broken", reason, 2
        answer = await client.post(ROUTE, json=body())
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        assert ("retry-after" in answer.headers) is (status == 529)
        streamed = await client.post(ROUTE, json=body(stream=True))
        assert streamed.headers["request-id"] == streamed.headers["x-request-id"]
        first, *_, last = events(streamed.text)
        assert first["type"] == "message_start"
        assert (last["type"], last["error"]["type"]) == ("error", kind)
        assert last["request_id"] == streamed.headers["request-id"]

    async def test_engine_that_is_gone(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.connected = False
        answer = await client.post(ROUTE, json=body())
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "api_error")
        assert answer.headers["retry-after"]

    async def test_statuses_and_types(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.load_names("one")
        named = await client.post(ROUTE, json=body(model="none-such"))
        assert (named.status_code, named.json()["error"]["type"]) == (404, "not_found_error")
        plain = await client.post(ROUTE, content=b"{}", headers={"content-type": "text/plain"})
        assert (plain.status_code, plain.json()["error"]["type"]) == (415, "invalid_request_error")
        broken = await client.post(
            ROUTE, content=b"{", headers={"content-type": "application/json"}
        )
        assert (broken.status_code, broken.json()["error"]["type"]) == (
            400,
            "invalid_request_error",
        )
        path = await client.post("/v1/messages/batches", json={})
        assert (path.status_code, path.json()["error"]["type"]) == (404, "not_found_error")
        method = await client.get(ROUTE)
        assert (method.status_code, method.json()["type"]) == (405, "error")

    class TestSize:
        @pytest.fixture
        def settings(self) -> dict[str, Any]:
            return {"payload_limit": 1000}

        async def test_large_bodies(self, client: httpx.AsyncClient) -> None:
            long = [{"role": "user", "content": "x" * 2000}]
            answer = await client.post(ROUTE, json=body(messages=long))
            assert answer.status_code == 413
            assert answer.json()["error"]["type"] == "request_too_large"

    class TestOverload:
        @pytest.fixture
        def settings(self) -> dict[str, Any]:
            return {"max_concurrent_requests": 1}

        async def test_full_queue(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
            engine.gate = asyncio.Semaphore(0)
            busy = asyncio.ensure_future(client.post(ROUTE, json=body()))
            while not engine.requests:  # noqa: ASYNC110
                await asyncio.sleep(0)
            answer = await client.post(ROUTE, json=body())
            assert (answer.status_code, answer.json()["error"]["type"]) == (529, "overloaded_error")
            assert int(answer.headers["retry-after"]) >= 1
            for _ in range(20):
                engine.gate.release()
            assert (await busy).status_code == 200


class TestKey:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_key": "secret"}

    async def test_missing_key(self, client: httpx.AsyncClient) -> None:
        answer = await client.post(ROUTE, json=body())
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert "x-api-key" in answer.json()["error"]["message"]
        answer = await client.post(ROUTE, json=body(), headers={"x-api-key": "secret"})
        assert answer.status_code == 200


async def test_silent_streams_get_pings_behind_the_first_event(
    url: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.02)
    engine.gate = asyncio.Semaphore(0)
    seen = ""
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("POST", ROUTE, json=body(stream=True)) as answer,
    ):
        async for text in answer.aiter_text():
            if not seen:  # a comment, as no token may come
                engine.gate.release()
            seen += text
            if "event: ping" in seen:
                for _ in range(20):
                    engine.gate.release()
    before, _, behind = seen.partition("event: message_start")
    assert before
    assert before.replace(":\n\n", "") == ""
    found = events("event: message_start" + behind)
    assert {"type": "ping"} in found
    content = accumulated([event for event in found if event["type"] != "ping"])["content"]
    assert content[0]["text"] == "hello world"
