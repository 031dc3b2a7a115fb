"""Anthropic's client: ``Anthropic`` and ``AsyncAnthropic``."""

from __future__ import annotations

import json
from typing import Any

import anthropic

from tests.system.clients.harness import (
    MESSAGES,
    SCHEMA,
    TOOL,
    call,
    fits,
    items,
    main,
    raises,
    whole,
)

Client = Any  # either of the two

ASKED: dict[str, Any] = {"model": "tgi", "messages": MESSAGES, "max_tokens": 20}
TOOLS = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": SCHEMA}]
GREEDY = {"temperature": 0}


async def streamed(client: Client, **fields: Any) -> tuple[list[str], Any]:
    """The types of a stream's events, and the message that they make."""
    manager = client.messages.stream(**{**ASKED, **fields})
    if hasattr(manager, "__aenter__"):
        async with manager as stream:
            return [event.type async for event in stream], await stream.get_final_message()
    with manager as stream:
        return [event.type for event in stream], stream.get_final_message()


@call
async def message(client: Client) -> None:
    answer = await whole(client.messages.create(**ASKED, extra_body=GREEDY))
    (block,) = answer.content
    assert (answer.type, answer.role, block.type) == ("message", "assistant", "text")
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert 0 < answer.usage.output_tokens <= 20
    kinds, final = await streamed(client, extra_body=GREEDY)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert final.content[0].text == block.text
    assert final.usage.output_tokens == answer.usage.output_tokens


@call
async def usage_and_count(client: Client) -> None:
    fields = {"system": "Be brief.", "tools": TOOLS}
    answer = await whole(client.messages.create(**ASKED, **fields))
    usage = answer.usage
    prompt = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    asked = {"model": "tgi", "messages": MESSAGES, **fields}
    assert (await whole(client.messages.count_tokens(**asked))).input_tokens == prompt
    again = await whole(client.messages.create(**ASKED, **fields))
    assert again.usage.cache_read_input_tokens > 0, "of the same prompt"


@call
async def prompt_alone(client: Client) -> None:
    answer = await whole(client.messages.create(**{**ASKED, "max_tokens": 0}))
    assert (answer.content, answer.usage.output_tokens) == ([], 0)


@call
async def tools(client: Client) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200, "extra_body": GREEDY}
    answer = await whole(client.messages.create(**{**ASKED, **fields}))
    used = answer.content[-1]
    assert (answer.stop_reason, used.type, used.name) == ("tool_use", "tool_use", TOOL["name"])
    fits(json.dumps(used.input))
    kinds, final = await streamed(client, **fields)
    assert "input_json" in kinds
    assert final.content[-1].input == used.input
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "It joins paths."}
    turns = [*MESSAGES, {"role": "assistant", "content": answer.content}]
    turns.append({"role": "user", "content": [result]})
    after = await whole(client.messages.create(**{**ASKED, "messages": turns, "tools": TOOLS}))
    assert after.content


@call
async def structured_output(client: Client) -> None:
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    fields: dict[str, Any] = {**ASKED, "max_tokens": 200, "output_config": config}
    fits((await whole(client.messages.create(**fields))).content[0].text)


@call
async def models(client: Client) -> None:
    (model,) = await items(client.models.list())
    assert model.type == "model"
    assert model.max_input_tokens > 0
    assert (await whole(client.models.retrieve(model.id))).display_name == model.display_name
    await raises(anthropic.NotFoundError, "does not exist", lambda: client.models.retrieve("other"))


@call
async def errors(client: Client) -> None:
    long = [{"role": "user", "content": "What is os.path.join? " * 3000}]
    error = await raises(
        anthropic.BadRequestError,
        "prompt is too long",
        lambda: client.messages.create(**{**ASKED, "messages": long}),
    )
    assert error.request_id
    await raises(
        anthropic.BadRequestError,
        "`messages` cannot be empty",
        lambda: client.messages.create(**{**ASKED, "messages": []}),
    )


def _settings(url: str) -> dict[str, Any]:
    return {"base_url": url, "api_key": "-", "max_retries": 0}


main(
    {
        "sync": lambda url: anthropic.Anthropic(**_settings(url)),
        "async": lambda url: anthropic.AsyncAnthropic(**_settings(url)),
    }
)
