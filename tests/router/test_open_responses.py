"""Responses and events have all fields that Open Responses requires (https://openresponses.org)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tests.router.test_response_tools import PATCH, TEAM, WEATHER, called
from tests.router.test_tools import bundle
from tgi_cli.text.bundle import TextBundle

ROUTE = "/v1/responses"

STRING, INTEGER, NUMBER, BOOLEAN = (
    {"type": kind} for kind in ("string", "integer", "number", "boolean")
)


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def listed(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


def typed(kind: str, **properties: Any) -> dict[str, Any]:
    return record(type={"const": kind}, **properties)


STATUS = {"enum": ["in_progress", "completed", "incomplete"]}
TEXT = typed("output_text", text=STRING, annotations=listed({}), logprobs=listed({}))
ITEM = {
    "oneOf": [
        typed(
            "message", id=STRING, status=STATUS, role={"const": "assistant"}, content=listed(TEXT)
        ),
        typed(
            "function_call",
            id=STRING,
            status=STATUS,
            call_id=STRING,
            name=STRING,
            arguments=STRING,
        ),
        typed("custom_tool_call", id=STRING, call_id=STRING, name=STRING, input=STRING),
        typed(
            "reasoning",
            id=STRING,
            summary=listed(typed("summary_text", text=STRING)),
            content=listed(typed("reasoning_text", text=STRING)),
        ),
    ]
}
FUNCTION = typed(
    "function",
    name=STRING,
    description=or_null(STRING),
    parameters=or_null({"type": "object"}),
    strict=or_null(BOOLEAN),
)
TOOL = {"if": {"properties": {"type": {"const": "function"}}}, "then": FUNCTION}
USAGE = record(
    input_tokens=INTEGER,
    output_tokens=INTEGER,
    total_tokens=INTEGER,
    input_tokens_details=record(cached_tokens=INTEGER),
    output_tokens_details=record(reasoning_tokens=INTEGER),
)
RESPONSE = record(
    id=STRING,
    object={"const": "response"},
    created_at=INTEGER,
    completed_at=or_null(INTEGER),
    status=STRING,
    incomplete_details=or_null(record(reason=STRING)),
    model=STRING,
    previous_response_id=or_null(STRING),
    instructions=or_null(STRING),
    output=listed(ITEM),
    error=or_null(record(code=STRING, message=STRING)),
    tools=listed(TOOL),
    tool_choice={"type": ["string", "object"]},
    truncation={"enum": ["auto", "disabled"]},
    parallel_tool_calls=BOOLEAN,
    text=record(format=record(type=STRING), verbosity={"enum": ["low", "medium", "high"]}),
    top_p=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    top_logprobs=INTEGER,
    temperature=NUMBER,
    reasoning=or_null(record(effort=or_null(STRING), summary=or_null(STRING))),
    user=or_null(STRING),
    usage=or_null(USAGE),
    max_output_tokens=or_null(INTEGER),
    max_tool_calls=or_null(INTEGER),
    store=BOOLEAN,
    background=BOOLEAN,
    service_tier=STRING,
    metadata={"type": "object"},
    safety_identifier=or_null(STRING),
    prompt_cache_key=or_null(STRING),
)

PLACE = {"item_id": STRING, "output_index": INTEGER}
CONTENT = {**PLACE, "content_index": INTEGER}
SUMMARY = {**PLACE, "summary_index": INTEGER}
EVENTS: dict[str, dict[str, Any]] = {
    **{
        f"response.{status}": {"response": RESPONSE}
        for status in ("created", "in_progress", "completed", "incomplete", "failed")
    },
    "response.output_item.added": {"output_index": INTEGER, "item": ITEM},
    "response.output_item.done": {"output_index": INTEGER, "item": ITEM},
    "response.content_part.added": {**CONTENT, "part": record(type=STRING)},
    "response.content_part.done": {**CONTENT, "part": record(type=STRING)},
    "response.output_text.delta": {**CONTENT, "delta": STRING, "logprobs": listed({})},
    "response.output_text.done": {**CONTENT, "text": STRING, "logprobs": listed({})},
    "response.reasoning_text.delta": {**CONTENT, "delta": STRING},
    "response.reasoning_text.done": {**CONTENT, "text": STRING},
    "response.reasoning_summary_part.added": {**SUMMARY, "part": record(type=STRING)},
    "response.reasoning_summary_part.done": {**SUMMARY, "part": record(type=STRING)},
    "response.reasoning_summary_text.delta": {**SUMMARY, "delta": STRING},
    "response.reasoning_summary_text.done": {**SUMMARY, "text": STRING},
    "response.function_call_arguments.delta": {**PLACE, "delta": STRING},
    "response.function_call_arguments.done": {**PLACE, "name": STRING, "arguments": STRING},
    "response.custom_tool_call_input.delta": {**PLACE, "delta": STRING},
    "response.custom_tool_call_input.done": {**PLACE, "input": STRING},
}
REPLY = (
    f"<think>Hm.</think>\n\nYes.\n{called('weather', {})}\n{called('patch', {'input': 'x'})}\n"
    f"{called('team__ask', {})}"
)


def check(value: Any, schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema).validate(value)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    return bundle(tmp_path_factory.mktemp("open_responses"))


@pytest.fixture
def engine(text: TextBundle) -> FakeEngine:
    engine = FakeEngine(text.tokenizer, REPLY)
    engine.info = replace(engine.info, max_input_tokens=3999, max_total_tokens=4000)
    return engine


REQUESTS: list[dict[str, Any]] = [
    {},
    {"tools": [WEATHER, PATCH, TEAM]},
    {"reasoning": {"effort": "low", "summary": "auto"}},
    {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
    {"max_output_tokens": 3},
    {
        "instructions": "x",
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "p",
        "max_tool_calls": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "top_logprobs": 2,
        "temperature": 0.5,
        "top_p": 0.75,
        "text": {"verbosity": "low"},
    },
]


@pytest.mark.parametrize("fields", REQUESTS)
async def test_response_has_all_fields(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    answer = await client.post(ROUTE, json={"input": "hi", **fields})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    check(found, RESPONSE)
    for name, value in fields.items():
        if name == "tools":
            assert [tool["name"] for tool in found[name]] == [tool["name"] for tool in value]
        elif isinstance(value, dict):
            assert found[name].items() >= value.items()
        else:
            assert found[name] == value


@pytest.mark.parametrize("fields", REQUESTS)
async def test_events_have_all_fields(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    answer = await client.post(ROUTE, json={"input": "hi", "stream": True, **fields})
    found = events(answer.text)
    for event in found:
        check(event, typed(event["type"], sequence_number=INTEGER, **EVENTS[event["type"]]))
    names = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in found]


async def test_failed_response_has_all_fields(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.failure, engine.fail_after = "broken", 4
    answer = await client.post(ROUTE, json={"input": "hi", "stream": True})
    final = events(answer.text)[-1]
    assert final["type"] == "response.failed"
    check(final["response"], RESPONSE)
    assert final["response"]["error"]["code"] == "server_error"


def test_missing_fields_are_detected() -> None:
    with pytest.raises(jsonschema.ValidationError):
        check({"id": "resp_1"}, RESPONSE)
