"""Structured output, from HTTP to the engine's request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from huggingface_hub import AsyncInferenceClient
from llguidance import LLMatcher, LLTokenizer
from starlette.applications import Starlette
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tests.unit.text import tiny
from tgi_cli.engine.messages import FinishReason
from tgi_cli.process.pool_child import PoolChild
from tgi_cli.process.worker_pool import Limits
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.state import RouterState
from tgi_cli.text.bundle import TextBundle
from tgi_cli.text.grammar.checker import GrammarChecker

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
PERSON = '{"name": "x", "age": 3}'
BOMB = {"type": "string", "allOf": [{"pattern": f".*a{i}.*"} for i in range(20)]}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}


@pytest.fixture(autouse=True)
async def closed(state: RouterState) -> AsyncIterator[None]:
    yield
    if state.generator.grammars is not None:
        state.generator.grammars.close()


def allows(engine: FakeEngine, *parts: str) -> bool:
    """Whether the grammar of the last request is all of a text.

    Parts that are a token of the tokenizer's own are that token.
    """
    grammar = engine.requests[-1].grammar
    assert grammar is not None
    backend = engine.tokenizer.backend
    tokenizer = LLTokenizer(backend.to_str())
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    added = {token.content: index for index, token in backend.get_added_tokens_decoder().items()}
    for part in parts:
        ids = [added[part]] if part in added else backend.encode(part, add_special_tokens=False).ids
        if matcher.try_consume_tokens(ids) < len(ids):
            return False
    return matcher.is_accepting()


NATIVE: list[Any] = [
    {"type": "json", "value": SCHEMA},
    {"type": "json", "value": json.dumps(SCHEMA)},
    {"type": "json_schema", "value": {"name": "person", "schema": SCHEMA}},
]
OPENAI: list[dict[str, Any]] = [
    *({"response_format": form} for form in NATIVE),
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
        }
    },
    {"guided_json": SCHEMA},
    {"structured_outputs": {"json": SCHEMA}},
]


@pytest.mark.parametrize("grammar", NATIVE)
@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/"])
async def test_tgis_grammars_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, grammar: Any
) -> None:
    answer = await client.post(route, json={"inputs": "hi", "parameters": {"grammar": grammar}})
    assert answer.status_code == 200
    assert allows(engine, PERSON)
    assert not allows(engine, '{"name": 3}')


@pytest.mark.parametrize("fields", OPENAI, ids=lambda f: str(f)[:50])
@pytest.mark.parametrize("stream", [False, True])
async def test_openais_response_formats_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], stream: bool
) -> None:
    for route, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        answer = await client.post(route, json={**body, "stream": stream, **fields})
        assert answer.status_code == 200
        assert allows(engine, PERSON)
        assert not allows(engine, '{"name": 3}')


async def test_formats_of_responses_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    form = {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}
    answer = await client.post("/v1/responses", json={"input": "hi", "text": {"format": form}})
    assert answer.status_code == 200, answer.text
    assert allows(engine, PERSON)
    assert not allows(engine, '{"name": 3}')


async def test_other_grammar_types_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for fields, right, wrong in (
        ({"response_format": {"type": "json_object"}}, '{"x": [1]}', "[1]"),
        ({"response_format": {"type": "regex", "value": "[0-9]+"}}, "12", "a"),
        ({"guided_regex": "[0-9]+"}, "12", "a"),
        ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
        ({"guided_grammar": 'start: "a" "b"'}, "ab", "a"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "\n*"},
         '{\n"name":"x","age":3\n}', '{"name": "x","age":3}'),
    ):  # fmt: skip
        answer = await client.post("/v1/completions", json={**TEXT, **fields})
        assert answer.status_code == 200, answer.text
        assert allows(engine, right)
        assert not allows(engine, wrong)


async def test_text_format_has_no_grammar(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"response_format": None}):
        await client.post("/v1/chat/completions", json={**CHAT, **fields})
        assert engine.requests[-1].grammar is None
    await client.post("/generate", json={"inputs": "hi", "parameters": {"grammar": None}})
    assert engine.requests[-1].grammar is None


async def test_every_sample_of_every_prompt_has_the_grammar(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "guided_choice": ["yes", "no"]}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    grammars = {request.grammar for request in engine.requests}
    assert len(engine.requests) == 4
    assert len(grammars) == 1
    assert grammars != {None}
    parameters = {"grammar": NATIVE[0], "best_of": 2, "do_sample": True}
    await client.post("/generate", json={"inputs": "hi", "parameters": parameters})
    assert allows(engine, PERSON)


NESTED = {"properties": {"a": {"items": {"type": "array", "uniqueItems": True}}}}
MESSAGE = "JSON schema keyword `uniqueItems` is not supported (at #/properties/a/items)"


async def test_unsupported_keyword_is_named(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    parameters = {"grammar": {"type": "json", "value": NESTED}}
    expected = {
        "error": f"Input validation error: grammar is not valid: {MESSAGE}",
        "error_type": "validation",
    }
    answer = await client.post("/generate", json={"inputs": "hi", "parameters": parameters})
    assert (answer.status_code, answer.json()) == (422, expected)
    body = {"inputs": "hi", "parameters": parameters}
    assert events((await client.post("/generate_stream", json=body)).text) == [expected]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": NESTED}}
    answer = await client.post("/v1/chat/completions", json={**CHAT, "response_format": form})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": f"`response_format` is not valid: {MESSAGE}",
        "type": "invalid_request_error",
        "param": "response_format",
        "code": "invalid_value",
    }
    assert engine.requests == []


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {}}, "response_format", "`type` is missing"),
        ({"response_format": {"type": "xml"}}, "response_format", "Given: xml"),
        ({"guided_regex": "a["}, "guided_regex", "at position 1: unclosed character class"),
        ({"guided_json": {"$ref": "http://127.0.0.1/x"}}, "guided_json", "is not known"),
        ({"guided_choice": []}, "guided_choice", "must be a list of texts"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs", "`xml`"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex",
         "`response_format` and `guided_regex` exclude each other"),
        ({"guided_regex": "a" * 300_000}, "guided_regex", "more than 262144 bytes"),
    ],
)  # fmt: skip
async def test_invalid_grammars_are_refused(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    fields: dict[str, Any],
    param: str,
    message: str,
) -> None:
    answer = await client.post("/v1/completions", json={**TEXT, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]
    assert engine.requests == []


@pytest.mark.tgi_pain(7)
async def test_exploding_grammar_is_refused_without_delaying_others(
    url: str, state: RouterState
) -> None:
    limits = Limits(processes=1, seconds=2.0, megabytes=4096)
    ends = state.client.info.eos_token_ids
    state.generator.grammars = GrammarChecker(state.text.tokenizer, ends, limits)
    done: list[str] = []

    async def bomb(client: httpx.AsyncClient) -> httpx.Response:
        parameters = {"grammar": {"type": "json", "value": BOMB}}
        answer = await client.post("/generate", json={"inputs": "hi", "parameters": parameters})
        done.append("bomb")
        return answer

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        task = asyncio.ensure_future(bomb(client))
        for _ in range(20):
            answer = await client.post("/generate", json={"inputs": "hi"})
            assert answer.status_code == 200
            done.append("other")
        answer = await task
        assert answer.status_code == 422
        assert "it takes more than 2 s to compile" in answer.json()["error"]
        assert "other" in done[: done.index("bomb")]
        good = {"inputs": "hi", "parameters": {"grammar": NATIVE[0]}}
        assert (await client.post("/generate", json=good)).status_code == 200


async def test_too_many_compilations_are_429(client: httpx.AsyncClient, state: RouterState) -> None:
    limits = Limits(processes=1, seconds=2.0, megabytes=4096, wait_seconds=0.1)
    state.generator.grammars = GrammarChecker(state.text.tokenizer, [1], limits)
    bodies = [{**TEXT, "guided_json": schema} for schema in (BOMB, SCHEMA)]
    first, second = await asyncio.gather(
        *(client.post("/v1/completions", json=body) for body in bodies)
    )
    assert first.status_code == 400
    assert second.status_code == 429
    assert int(second.headers["retry-after"]) >= 1
    assert (await client.post("/v1/completions", json=bodies[1])).status_code == 200
    assert state.admission.in_flight == 0


@pytest.mark.parametrize("grammar", [{"type": "regex", "value": ".*" * 200}])
async def test_unsupported_grammar_is_refused_at_once(
    client: httpx.AsyncClient, engine: FakeEngine, grammar: Any
) -> None:
    parameters = {"grammar": grammar}
    answer = await client.post("/generate", json={"inputs": "hi", "parameters": parameters})
    assert answer.status_code == 422
    assert "too many ways to match the same text" in answer.json()["error"]
    assert engine.requests == []


async def test_many_choices_are_accepted(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    choices = [f"w{number}" for number in range(20_000)]
    answer = await client.post("/v1/completions", json={**TEXT, "guided_choice": choices})
    assert answer.status_code == 200
    assert allows(engine, choices[-1])
    choices = [f"a choice, number {number}" for number in range(20_000)]
    answer = await client.post("/v1/completions", json={**TEXT, "guided_choice": choices})
    assert answer.status_code // 100 == 4
    assert "more than 262144 bytes" in answer.json()["error"]["message"]


async def test_grammar_that_the_engine_rejects_is_an_invalid_request(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    cause = "the grammar cannot be followed: it takes too long"
    engine.failure, engine.failure_reason = cause, FinishReason.GRAMMAR
    body = {**TEXT, "guided_regex": "a+"}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code // 100 == 4
    assert answer.status_code != 424
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["param"] == "guided_regex"
    assert cause in answer.json()["error"]["message"]
    engine.fail_after = 1
    *_, reported, _done = events(
        (await client.post("/v1/completions", json={**body, "stream": True})).text
    )
    assert reported["error"]["type"] == "invalid_request_error"
    assert cause in reported["error"]["message"]
    native = {"inputs": "hi", "parameters": {"grammar": NATIVE[0]}}
    *_, reported = events((await client.post("/generate_stream", json=native)).text)
    assert reported["error_type"] == "validation"


async def test_killed_workers_are_not_an_invalid_request(
    client: httpx.AsyncClient, state: RouterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = state.generator.grammars
    assert checker is not None
    body = {**TEXT, "guided_json": SCHEMA}
    with monkeypatch.context() as patched:
        patched.setattr("tgi_cli.process.pool_child.PoolChild.exchange", _killed)
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "server_error"
    assert "grammar compiler process" in answer.json()["error"]["message"]
    assert state.admission.in_flight == 0
    assert (await client.post("/v1/completions", json=body)).status_code == 200


_exchange = PoolChild.exchange


def _killed(child: PoolChild, body: bytes, seconds: float) -> Any:
    """It gets as far as to the job."""
    if body.startswith(b'{"setup"'):
        return _exchange(child, body, seconds)
    os.kill(child.pid, signal.SIGKILL)
    return _exchange(child, body, seconds)


class TestSwitchedOff:
    @pytest.fixture(params=["flag", "engine"])
    def app(
        self,
        request: pytest.FixtureRequest,
        engine: FakeEngine,
        text: TextBundle,
        config: RouterConfig,
    ) -> Starlette:
        if request.param == "flag":
            config = replace(config, disable_grammar_support=True)
        else:
            engine.info = replace(engine.info, grammar=False)
        return create_app(engine, text, config)

    async def test_errors_have_tgis_form(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        body = {"inputs": "hi", "parameters": {"grammar": NATIVE[0]}}
        answer = await client.post("/generate", json=body)
        assert answer.status_code == 422
        assert answer.json() == {
            "error": "Input validation error: grammar is not supported",
            "error_type": "validation",
        }
        answer = await client.post("/v1/completions", json={**TEXT, "guided_choice": ["a"]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "guided_choice"
        assert engine.requests == []
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


def template(reasoning: bool) -> str:
    """Knows tools; the second reasons, and the answer begins within."""
    end = "<|im_start|>assistant\n" + ("<think>\n" if reasoning else "")
    return (
        "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}" + end
    )


class TestTools:
    @pytest.fixture(params=[False, True], ids=["plain", "reasoning"])
    def text(self, request: pytest.FixtureRequest, tmp_path: Path) -> TextBundle:
        tiny.write_model(tmp_path, template(request.param))
        backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
        marks = ["<tool_call>", "</tool_call>", *(["<think>", "</think>"] if request.param else [])]
        backend.add_tokens([AddedToken(mark, special=False) for mark in marks])
        backend.save(str(tmp_path / "tokenizer.json"))
        return TextBundle.load(tmp_path, tool_call_parser="auto", reasoning_parser="auto")

    @pytest.fixture
    def engine(self, text: TextBundle) -> FakeEngine:
        engine = FakeEngine(text.tokenizer)
        engine.info = replace(engine.info, max_input_tokens=1999, max_total_tokens=2000)
        return engine

    @pytest.fixture
    def before(self, text: TextBundle) -> tuple[str, ...]:
        assert text.response_format is not None
        return ("Hm.", "</think>", "\n\n") if text.response_format.knows_reasoning else ()

    async def ask(self, client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
        return await client.post(
            "/v1/chat/completions", json={**CHAT, "tools": [TOOL, TIME], **fields}
        )

    @pytest.mark.tgi_pain(6)
    async def test_auto_constrains_calls_only(
        self, client: httpx.AsyncClient, engine: FakeEngine, before: tuple[str, ...]
    ) -> None:
        assert (await self.ask(client)).status_code == 200
        for parts in ((), ("No.",), ("So:\n", CALL), (CALL, "\n", OTHER, " Done.")):
            assert allows(engine, *before, *parts), parts
        assert not allows(engine, *before, "So:", WRONG)
        await self.ask(client, parallel_tool_calls=False)
        assert allows(engine, *before, "So:", CALL)
        assert not allows(engine, *before, CALL, OTHER)

    async def test_required_forces_a_call(
        self, client: httpx.AsyncClient, engine: FakeEngine, before: tuple[str, ...]
    ) -> None:
        assert (await self.ask(client, tool_choice="required")).status_code == 200
        assert allows(engine, *before, CALL)
        assert allows(engine, *before, OTHER, "\n", CALL)
        for parts in ((), ("No.",), (WRONG,), (CALL, "text")):
            assert not allows(engine, *before, *parts), parts

    @pytest.mark.parametrize("choice", ["time", {"type": "function", "function": {"name": "time"}}])
    async def test_named_tool_forces_its_call(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        before: tuple[str, ...],
        choice: Any,
    ) -> None:
        assert (await self.ask(client, tool_choice=choice)).status_code == 200
        assert allows(engine, *before, OTHER)
        assert not allows(engine, *before, CALL)
        assert not allows(engine, *before, OTHER, "\n", OTHER)

    async def test_response_format_and_tools_combine(
        self, client: httpx.AsyncClient, engine: FakeEngine, before: tuple[str, ...]
    ) -> None:
        form = {"type": "json_object", "value": SCHEMA}
        assert (await self.ask(client, response_format=form)).status_code == 200
        assert allows(engine, *before, CALL)
        assert allows(engine, *before, PERSON)
        assert not allows(engine, *before, "text")
        assert (await self.ask(client, response_format=form, tools=None)).status_code == 200
        assert allows(engine, *before, PERSON)
        assert not allows(engine, *before, CALL)

    async def test_strict_tools_constrain_arguments(
        self, client: httpx.AsyncClient, engine: FakeEngine, before: tuple[str, ...]
    ) -> None:
        function = {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}
        tools: list[Any] = [{"type": "function", "function": function}]
        assert (await self.ask(client, tools=tools, tool_choice="required")).status_code == 200
        call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
        assert allows(engine, *before, call)
        tools = [{"type": "function", "function": {**function, "strict": True}}]
        answer = await self.ask(client, tools=tools)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"
        assert (
            "schema of `f`: JSON schema keyword `not` is not supported (at #/properties/a)"
            in (answer.json()["error"]["message"])
        )

    async def test_disabled_grammar_support_refuses_grammars(
        self, engine: FakeEngine, text: TextBundle, config: RouterConfig
    ) -> None:
        """Calls are left to the model then; none can be made sure of."""
        app = create_app(engine, text, replace(config, disable_grammar_support=True))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            assert (await self.ask(client)).status_code == 200
            assert engine.requests[-1].grammar is None
            answer = await self.ask(client, tool_choice="required")
            assert answer.status_code == 400
            assert "grammar is not supported" in answer.json()["error"]["message"]


async def test_clients_can_constrain_answers(url: str, engine: FakeEngine) -> None:
    engine.reply_with('{"a": 1}')
    ai: Any = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60)
    whole = await ai.chat.completions.create(
        model="tgi",
        messages=[{"role": "user", "content": "hi"}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "p", "schema": SCHEMA, "strict": True},
        },
    )
    assert whole.choices[0].message.content == '{"a": 1}'
    assert allows(engine, PERSON)
    hub: Any = AsyncInferenceClient(url, timeout=60)
    await hub.text_generation("hi", grammar={"type": "regex", "value": "[0-9]+"})
    assert allows(engine, "12")
    await hub.chat_completion(
        [{"role": "user", "content": "hi"}],
        response_format={"type": "json", "value": SCHEMA},
    )
    assert allows(engine, PERSON)
