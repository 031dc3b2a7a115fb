"""Thinking budgets and the tokens of reasoning, in every API, over scripted answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tests.router.test_tools import TEMPLATE, TOOL, bundle
from tgi_cli.engine.thinking import ThinkingBudget
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.text.bundle import TextBundle

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
"""The template opens the reasoning."""
HARMONY = (
    "{{ tools }}<|channel|><|message|>{{ messages[0].content }}<|start|>assistant",
    *("<|channel|>", "<|message|>", "<|end|>", "<|start|>"),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBundle:
    return bundle(tmp_path_factory.mktemp("thinking"), TEMPLATE, "<think>", "</think>")


@pytest.fixture
def engine(text: TextBundle) -> FakeEngine:
    return fake(text)


def fake(text: TextBundle, reply: str = "hello") -> FakeEngine:
    engine = FakeEngine(text.tokenizer, reply)
    engine.info = replace(
        engine.info,
        max_input_tokens=999,
        max_total_tokens=1000,
        vocab_size=text.tokenizer.vocab_size,
    )
    return engine


def client_of(engine: FakeEngine, text: TextBundle, config: RouterConfig) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(engine, text, config))
    return httpx.AsyncClient(transport=transport, base_url="http://router")


def ids(engine: FakeEngine, text: str) -> tuple[int, ...]:
    return tuple(engine.tokenizer.encode(text, False))


async def submitted(
    client: httpx.AsyncClient, engine: FakeEngine, path: str = CHAT, **fields: Any
) -> ThinkingBudget | None:
    """The budget that the engine gets."""
    prompt: dict[str, Any] = {"input": "hi"} if path == RESPONSES else {"messages": USER}
    more = {"max_tokens": 99} if path == MESSAGES else {}
    answer = await client.post(path, json={"model": "tgi", **prompt, **more, **fields})
    assert answer.status_code == 200, answer.text
    return engine.requests[-1].thinking


# ---------------------------------------------------------------------- what the engine is told


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"thinking_token_budget": 20}),
        (CHAT, {"thinking_budget_tokens": 20}),
        (CHAT, {"thinking_token_budget": 20, "thinking_budget_tokens": 20}),
        (CHAT, {"thinking_token_budget": 20, "reasoning_effort": "none"}),
        (CHAT, {"reasoning": {"max_tokens": 20}}),
        (RESPONSES, {"reasoning": {"max_tokens": 20, "effort": "high"}}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 20}}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_api_sets_the_budget(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any], stream: bool
) -> None:
    budget = await submitted(client, engine, path, stream=stream, **fields)
    assert budget == ThinkingBudget(
        tokens=20,
        open=ids(engine, "<think>"),
        close=ids(engine, "</think>"),
        inside=path == MESSAGES,
    )
    assert len(budget.open) == len(budget.close) == 1


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_without_a_budget_there_is_none(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    assert await submitted(client, engine, path) is None


@pytest.mark.parametrize(
    "fields", [{"thinking_token_budget": -1}, {"reasoning_effort": "high"}, {"reasoning": {}}]
)
async def test_values_that_set_no_budget(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    assert await submitted(client, engine, **fields) is None


async def test_a_template_that_opens_reasoning_starts_the_count(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    budget = await submitted(client, engine, thinking_token_budget=0, **THINKS)
    assert budget is not None
    assert (budget.tokens, budget.inside) == (0, True)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"reasoning": {"effort": "none"}}),
        (CHAT, {"reasoning": {"enabled": False}}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
        (MESSAGES, {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}),
    ],
)
async def test_no_effort_is_a_budget_of_zero(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any]
) -> None:
    budget = await submitted(client, engine, path, **fields)
    assert budget is not None
    assert budget.tokens == 0


async def test_thinking_that_the_template_is_told_to_begin_is_not_closed(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    assert await submitted(client, engine, reasoning_effort="none", **THINKS) is None


async def test_reasoning_enabled_reaches_the_template(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await submitted(client, engine, reasoning={"enabled": True})
    assert engine.requests[-1].prompt_ids[-2:-1] == ids(engine, "<think>")


async def test_huge_budgets_fit_the_wire(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    budget = await submitted(client, engine, thinking_token_budget=1 << 60)
    assert budget is not None
    assert budget.tokens == 1000


async def test_samples_have_the_same_budget(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await submitted(client, engine, thinking_token_budget=7, n=3)
    assert [request.thinking and request.thinking.tokens for request in engine.requests] == [7] * 3


async def test_harmony_forces_the_turn_behind_reasoning(
    config: RouterConfig, tmp_path: Path
) -> None:
    text = bundle(tmp_path, *HARMONY)
    engine = fake(text)
    async with client_of(engine, text, config) as client:
        budget = await submitted(client, engine, thinking_token_budget=5)
    assert budget == ThinkingBudget(
        tokens=5,
        open=ids(engine, "<|channel|>analysis<|message|>"),
        close=ids(engine, "<|end|>"),
        then=ids(engine, "<|start|>assistant"),
        answer=ids(engine, "<|channel|>final<|message|>"),
    )


async def test_budgets_need_no_grammars(
    text: TextBundle, engine: FakeEngine, config: RouterConfig
) -> None:
    engine.info = replace(engine.info, grammar=False)
    disabled = replace(config, disable_grammar_support=True)
    async with client_of(engine, text, disabled) as client:
        assert await submitted(client, engine, thinking_token_budget=5) is not None


# ---------------------------------------------------------------------- what is refused


async def refused(client: httpx.AsyncClient, **fields: Any) -> tuple[str, str]:
    """The parameter and the message of the error."""
    answer = await client.post(CHAT, json={"messages": USER, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    return error["param"], error["message"]


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget_tokens"])
async def test_budgets_below_minus_one_are_refused(client: httpx.AsyncClient, name: str) -> None:
    param, message = await refused(client, **{name: -2})
    assert param == name
    assert f"`{name}` must be >= -1" in message


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 1, "thinking_budget_tokens": 2},
        {"reasoning_effort": "low", "reasoning": {"effort": "high"}},
    ],
)
async def test_contradictions_are_refused(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    assert "mean the same and differ" in (await refused(client, **fields))[1]


@pytest.mark.parametrize(
    ("special", "options", "cause"),
    [
        ((), {}, "plain text"),
        (("<think>", "</think>"), {"reasoning_parser": "none"}, "not marked"),
    ],
)
async def test_a_budget_that_cannot_be_enforced_is_refused_if_asked_for_by_name(
    config: RouterConfig, tmp_path: Path, special: Any, options: dict[str, str], cause: str
) -> None:
    text = bundle(tmp_path, TEMPLATE, *special, **options)
    engine = fake(text)
    async with client_of(engine, text, config) as client:
        param, message = await refused(client, thinking_token_budget=5)
        assert param == "thinking_token_budget"
        assert cause in message
        assert await submitted(client, engine, reasoning={"max_tokens": 5}) is None
        assert await submitted(client, engine, reasoning_effort="none") is None
        enabled = {"type": "enabled", "budget_tokens": 5}
        assert await submitted(client, engine, MESSAGES, thinking=enabled) is None


async def test_markers_that_the_model_cannot_generate_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.info = replace(engine.info, vocab_size=max(ids(engine, "</think>")))
    assert "cannot generate" in (await refused(client, thinking_token_budget=5))[1]


# ---------------------------------------------------------------------- what is counted

ANSWER = "<think>the quick brown fox</think>\n\nHello, world!"


def thought(engine: FakeEngine, text: str = "the quick brown fox") -> int:
    return len(ids(engine, text))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [1, 3, 50])
async def test_chats_count_reasoning(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool, step: int
) -> None:
    engine.reply_with(ANSWER)
    engine.step = step
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await client.post(CHAT, json={"messages": USER, "tools": [TOOL], **options})
    usage = (events(answer.text)[-2] if stream else answer.json())["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == thought(engine)
    assert (
        usage["completion_tokens"]
        == thought(engine) + 2 + len(ids(engine, "\n\nHello, world!")) + 1
    )


async def test_every_chunk_counts_reasoning_so_far(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.reply_with(ANSWER)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": USER, "stream": True, "stream_options": options}
    chunks = events((await client.post(CHAT, json=body)).text)[:-1]
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert {0, 1, thought(engine)} <= set(counts)


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_count_reasoning(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.reply_with(ANSWER)
    answer = await client.post(RESPONSES, json={"input": "hi", "stream": stream})
    response = events(answer.text)[-1]["response"] if stream else answer.json()
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": thought(engine)}


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_count_reasoning(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.reply_with(ANSWER)
    body = {"model": "tgi", "messages": USER, "max_tokens": 99, "stream": stream}
    answer = await client.post(MESSAGES, json=body)
    usage = (events(answer.text)[-2] if stream else answer.json())["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": thought(engine)}


async def test_samples_are_counted_together(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply_with(ANSWER, "no thought", "<think>dog</think>yes")
    answer = await client.post(CHAT, json={"messages": USER, "n": 3})
    details = answer.json()["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == thought(engine) + thought(engine, "dog")


async def test_excluded_reasoning_is_counted(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply_with(ANSWER)
    body = {"messages": USER, "reasoning": {"exclude": True}}
    found = (await client.post(CHAT, json=body)).json()
    assert "reasoning_content" not in found["choices"][0]["message"]
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought(engine)


async def test_reasoning_that_is_cut_off_counts_to_its_end(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.reply_with("the quick brown fox")
    body = {"messages": USER, "max_tokens": 3, **THINKS}
    usage = (await client.post(CHAT, json=body)).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 3


async def test_harmonys_analysis_counts(config: RouterConfig, tmp_path: Path) -> None:
    text = bundle(tmp_path, *HARMONY)
    engine = fake(
        text,
        "<|channel|>analysis<|message|>the quick<|end|><|start|>assistant<|channel|>analysis"
        "<|message|>brown fox<|end|><|start|>assistant<|channel|>final<|message|>Hello",
    )
    async with client_of(engine, text, config) as client:
        usage = (await client.post(CHAT, json={"messages": USER})).json()["usage"]
    count = thought(engine, "the quick") + thought(engine, "brown fox")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == count


async def test_text_completions_have_no_reasoning(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.reply_with(ANSWER)
    usage = (await client.post("/v1/completions", json={"prompt": "hi"})).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
