"""Each parameter of another server is honoured by a schema, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tgi_cli.router.api.schemas.openai import ChatRequest, CompletionRequest
from tgi_cli.router.api.schemas.refused import REFUSED, RefusedParameters, refused_names
from tgi_cli.router.api.schemas.responses import ResponsesRequest

REFUSALS = (400, 422)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
KINDS: dict[str, type[RefusedParameters]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
}
EACH = [(route, name) for route, kind in KINDS.items() for name in refused_names(kind)]
ROUTES = pytest.mark.parametrize("route", list(BODIES))


@pytest.mark.parametrize(("route", "name"), EACH)
@pytest.mark.parametrize("value", [7, {"a": [1]}])
async def test_unsupported_parameters_are_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, name: str, value: Any
) -> None:
    answer = await client.post(route, json=BODIES[route] | {name: value})
    assert answer.status_code in REFUSALS
    assert answer.json()["error"]["param"] == name
    assert f"`{name}`" in answer.json()["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize(("route", "name"), EACH)
async def test_null_is_accepted(client: httpx.AsyncClient, route: str, name: str) -> None:
    assert (await client.post(route, json=BODIES[route] | {name: None})).status_code == 200


NEUTRAL = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "modalities": ["text"],
    "mirostat": 0,
    "dry_multiplier": 0.0,
    "xtc_probability": 0,
    "samplers": [],
    "repeat_last_n": -1,
    "id_slot": -1,
    "separate_reasoning": True,
    "reasoning_format": "auto",
    "stop_regex": "",
    "logits_processors": [],
    "kv_transfer_params": {},
    "n_probs": 0,
    "details": False,
}


@ROUTES
@pytest.mark.parametrize("name", list(NEUTRAL))
async def test_neutral_values_are_accepted(
    client: httpx.AsyncClient, route: str, name: str
) -> None:
    answer = await client.post(route, json=BODIES[route] | {name: NEUTRAL[name]})
    assert answer.status_code == 200, answer.text


@ROUTES
@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"separate_reasoning": False},
        {"thinking_token_budget": 0},
        {"modalities": ["text", "audio"]},
        {"modalities": ["audio"], "audio": {"voice": "alloy"}},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"continuous_usage_stats": True}, "stream": True},
    ],
)
async def test_meaningful_empty_values_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, fields: dict[str, Any]
) -> None:
    answer = await client.post(route, json=BODIES[route] | fields)
    assert answer.status_code in REFUSALS
    assert answer.json()["error"]["param"] == next(iter(fields))
    assert engine.requests == []


@ROUTES
async def test_hints_and_unknown_keys_are_ignored(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    hints = {"user": "u", "prediction": {"type": "content", "content": "x"}, "cache_prompt": True,
             "service_tier": "auto", "store": True, "metadata": {"a": "b"}, "marzipan": 1,
             "spaces_between_special_tokens": False, "verbosity": "low"}  # fmt: skip
    assert (await client.post(route, json=BODIES[route] | hints)).status_code == 200
    assert (await client.post(route, json=BODIES[route])).status_code == 200
    first, second = (replace(request.sampling, seed=0) for request in engine.requests)
    assert first == second


def test_bodies_honour_what_they_declare() -> None:
    assert "best_of" in refused_names(ChatRequest)
    assert "best_of" not in refused_names(CompletionRequest)
    assert "documents" not in refused_names(ChatRequest)
    assert "reasoning" not in refused_names(ResponsesRequest)
    assert "allowed_token_ids" not in REFUSED


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role must be one of"),
        ({"role": "", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "has no `content`"),
        ({"role": "user", "content": None}, "has no `content`"),
        ({"role": "system"}, "has no `content`"),
        ({"role": "tool", "tool_call_id": "c"}, "has no `content`"),
        ({"role": "user", "content": [{"type": "audio"}]}, "content of type `audio`"),
        ({"role": "user", "content": [{"type": "text"}]}, "content of type `text`"),
    ],
)
async def test_invalid_messages_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, message: dict[str, Any], words: str
) -> None:
    answer = await client.post("/v1/chat/completions", json={"messages": [message]})
    assert answer.status_code in REFUSALS
    assert words in answer.json()["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
async def test_known_roles_are_accepted(client: httpx.AsyncClient, role: str) -> None:
    messages = [{"role": role, "content": "x", "name": "f", "tool_call_id": "c"}]
    answer = await client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("route", "name"),
    [
        *((route, name) for route in list(BODIES)[:2]
          for name in ("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict")),
        ("/v1/responses", "max_output_tokens"),
    ],
)  # fmt: skip
async def test_lengths_are_reported_under_the_given_name(
    client: httpx.AsyncClient, route: str, name: str
) -> None:
    answer = await client.post(route, json=BODIES[route] | {name: 0})
    assert answer.status_code in REFUSALS
    assert answer.json()["error"]["param"] == name
    assert f"`{name}` must be strictly positive" in answer.json()["error"]["message"]


@ROUTES
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repeat_penalty": -1.0}, "repeat_penalty"),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repeat_penalty"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_tokens": 1, "min_new_tokens": 2}, "min_new_tokens"),
        ({"truncate": 0}, "truncate"),
        ({"truncate": -1}, "truncate"),
        ({"truncate_prompt_tokens": 64}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 3, "truncate": 4}, "truncate"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [400]}, "allowed_token_ids"),
        ({"adapter_id": "none-such"}, "adapter_id"),
        ({"seed": 1 << 64}, "seed"),
        ({"grammar": {"type": "yaml", "value": "x"}}, "grammar"),
        ({"regex": "a", "json_schema": {}}, "regex"),
    ],
)
async def test_invalid_values_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, fields: dict, param: str
) -> None:
    answer = await client.post(route, json=BODIES[route] | fields)
    assert answer.status_code in REFUSALS
    assert answer.json()["error"]["param"] == param
    assert engine.requests == []


@ROUTES
@pytest.mark.parametrize("value", [1 << 31, 1 << 32, (1 << 63) - 1, -(1 << 63), 1 << 64, 10**400])
@pytest.mark.parametrize("name", ["top_k", "seed", "priority", "min_tokens", "top_logprobs"])
async def test_extreme_numbers_are_never_a_500(
    client: httpx.AsyncClient, route: str, name: str, value: int
) -> None:
    assert (await client.post(route, json=BODIES[route] | {name: value})).status_code < 500


@ROUTES
async def test_large_top_k_means_all(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    for value in (1 << 32, -1, 0):
        assert (await client.post(route, json=BODIES[route] | {"top_k": value})).status_code == 200
    kept = [request.sampling.top_k for request in engine.requests]
    assert kept == [engine.info.vocab_size, 0, 0]


@ROUTES
async def test_the_lowest_priority_fits_the_wire(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    await client.post(route, json=BODIES[route] | {"priority": -(1 << 31)})
    assert engine.requests[0].priority == (1 << 31) - 1
