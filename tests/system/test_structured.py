"""A real server and real clients: answers are what they were asked to be."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Literal

import httpx
import openai
import pytest
from huggingface_hub import InferenceClient
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from tests.tools.server_process import ServerProcess

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
MESSAGES: list[Any] = [{"role": "user", "content": "Describe somebody."}]


def check(text: str, schema: dict[str, Any] = PERSON) -> None:
    Draft202012Validator(schema).validate(json.loads(text))


@pytest.fixture
def ai(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=120)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_openai_strict_schema(ai: openai.OpenAI, temperature: float) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": PERSON, "strict": True},
    }
    asked: dict[str, Any] = {
        "model": "tgi",
        "messages": MESSAGES,
        "response_format": form,
        "temperature": temperature,
        "seed": 1,
        "max_tokens": 120,
    }
    whole = ai.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "stop"
    check(whole.message.content or "")
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in ai.chat.completions.create(**asked, stream=True)
        if chunk.choices
    ]
    assert "".join(pieces) == whole.message.content


class Reply(BaseModel):
    verdict: Literal["yes", "no", "perhaps"]
    certain: bool


def test_openai_parse(ai: openai.OpenAI) -> None:
    found = ai.chat.completions.parse(
        model="tgi", messages=MESSAGES, response_format=Reply, max_tokens=60
    )
    assert isinstance(found.choices[0].message.parsed, Reply)


def test_openai_samples(ai: openai.OpenAI) -> None:
    found = ai.completions.create(
        model="tgi",
        prompt=["One:", "Two:"],
        n=2,
        temperature=1,
        max_tokens=30,
        extra_body={"guided_regex": r"[a-z]{3,8}-\d{4}"},
    )
    texts = [choice.text for choice in found.choices]
    assert len(texts) == 4
    assert all(re.fullmatch(r"[a-z]{3,8}-\d{4}", text) for text in texts), texts
    assert {choice.finish_reason for choice in found.choices} == {"stop"}


def test_huggingface_hub(server: ServerProcess) -> None:
    client: Any = InferenceClient(server.url, timeout=120)
    pattern = r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)"
    found = client.text_generation(
        "The address is ",
        grammar={"type": "regex", "value": pattern},
        details=True,
        max_new_tokens=40,
        return_full_text=False,
    )
    assert re.fullmatch(pattern, found.generated_text)
    assert found.details.finish_reason == "eos_token"
    for form in (
        {"type": "json", "value": PERSON},
        {"type": "json_schema", "value": {"name": "person", "schema": PERSON}},
    ):
        check(
            client.text_generation(
                "Somebody: ", grammar=form, max_new_tokens=120, return_full_text=False
            )
        )
    streamed = client.text_generation(
        "Somebody: ",
        grammar={"type": "json", "value": PERSON},
        max_new_tokens=120,
        stream=True,
        details=True,
    )
    check("".join(each.token.text for each in streamed if not each.token.special))
    chat = client.chat_completion(
        MESSAGES, response_format={"type": "json", "value": PERSON}, max_tokens=120
    )
    check(chat.choices[0].message.content)


def test_an_answer_that_is_cut_says_so(server: ServerProcess) -> None:
    body = {
        "inputs": "Somebody: ",
        "parameters": {
            "grammar": {"type": "json", "value": PERSON},
            "max_new_tokens": 5,
            "details": True,
        },
    }
    found = httpx.post(f"{server.url}/generate", json=body, timeout=120).json()
    assert found["details"]["finish_reason"] == "length"
    assert found["generated_text"].startswith("{")


def schema(number: int) -> dict[str, Any]:
    """One that no other request has."""
    return {
        "type": "object",
        "properties": {
            f"field_{number}": {"type": "string", "pattern": f"^[a-z]{{{1 + number % 5}}}$"},
            "value": {"type": "integer", "minimum": number, "maximum": number + 7},
        },
        "required": [f"field_{number}", "value"],
        "additionalProperties": False,
    }


@pytest.mark.tgi_pain(7)
async def test_sixteen_schemas_at_once_among_free_text(server: ServerProcess) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:

        async def ask(number: int, grammar: Any) -> str:
            parameters = {"grammar": grammar, "max_new_tokens": 60, "seed": number, "top_k": 40}
            body = {"inputs": f"Number {number}:", "parameters": parameters}
            answer = await client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            text: str = answer.json()["generated_text"]
            return text

        forms = [{"type": "json", "value": schema(number)} for number in range(16)]
        asked = [*enumerate(forms), *((number, None) for number in range(16, 20))]
        texts = await asyncio.gather(*(ask(*each) for each in asked))
        for number in range(16):
            check(texts[number], schema(number))
        assert await asyncio.gather(*(ask(*each) for each in asked)) == texts


async def test_a_bomb_harms_nobody(server: ServerProcess) -> None:
    bomb = {"type": "string", "allOf": [{"pattern": f".*a{i}.*"} for i in range(30)]}
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:

        async def ask(grammar: Any) -> httpx.Response:
            parameters = {"grammar": grammar, "max_new_tokens": 8}
            return await client.post("/generate", json={"inputs": "A", "parameters": parameters})

        answers = await asyncio.gather(
            ask({"type": "json", "value": bomb}), *(ask(None) for _ in range(8))
        )
    assert answers[0].status_code == 422
    assert re.search(r"it takes more than \d+ (s|MB of memory) to compile", answers[0].text)
    assert {answer.status_code for answer in answers[1:]} == {200}


@pytest.mark.tgi_pain(6)
def test_tools_are_called_for_certain(ai: openai.OpenAI) -> None:
    parameters = {k: v for k, v in PERSON.items() if k != "additionalProperties"}
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name in ("save", "drop")
    ]
    choices: list[tuple[Any, set[str]]] = [
        ("required", {"save", "drop"}),
        ({"type": "function", "function": {"name": "drop"}}, {"drop"}),
    ]
    for choice, names in choices:
        found: Any = ai.chat.completions.create(
            model="tgi",
            messages=MESSAGES,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=200,
        )
        (call,) = found.choices[0].message.tool_calls
        assert found.choices[0].finish_reason == "tool_calls"
        assert call.function.name in names
        check(call.function.arguments)
