"""Requests select a LoRA adapter by name; unknown names are errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tgi_cli.errors import ShardError
from tgi_cli.router import adapter_names as module
from tgi_cli.rpc.interface import Adapter, AdapterError, AdapterFault, Adapters

MESSAGES = [{"role": "user", "content": "hello"}]
BASE = ("tgi", "acme/tiny", "", None)


class Clock:
    """Time as the router's list of adapters sees it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def native(adapter_id: str | None) -> dict[str, Any]:
    return {"inputs": "hello", "parameters": {"max_new_tokens": 3, "adapter_id": adapter_id}}


def chat(model: str | None, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": MESSAGES, "max_tokens": 3, **more}


@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/"])
async def test_tgi_routes_select_an_adapter_by_adapter_id(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    engine.load_names("one", "org/two")
    for name in ("one", "org/two", *BASE):
        assert (await client.post(route, json=native(name))).status_code == 200
    assert engine.used == ["one", "org/two", "", "", "", ""]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_v1_routes_select_an_adapter_by_model(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, stream: bool
) -> None:
    engine.load_names("one")
    for name in ("one", *BASE):
        body = chat(name, stream=stream, n=2) | {"prompt": "hello"}
        answer = await client.post(route, json=body)
        assert answer.status_code == 200
        message = events(answer.text)[0] if stream else answer.json()
        assert message["model"] == ("one" if name == "one" else "acme/tiny")
    assert engine.used == ["one"] * 2 + [""] * 8


async def test_every_prompt_of_a_request_uses_its_adapter(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.load_names("one")
    body = {"model": "one", "prompt": ["hello", "world"], "max_tokens": 2}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert engine.used == ["one", "one"]


@pytest.mark.tgi_pain(15)
async def test_unknown_adapter_id_is_422_and_lists_the_loaded(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.load_names("two", "one")
    for route in ("/generate", "/"):
        answer = await client.post(route, json=native("three"))
        assert answer.status_code == 422
        assert answer.json() == {
            "error": "Input validation error: `adapter_id` 'three' does not exist; "
            "adapters: one, two",
            "error_type": "validation",
        }
    answer = await client.post("/generate_stream", json=native("three"))
    (event,) = events(answer.text)
    assert event["error_type"] == "validation"
    assert "'three' does not exist" in event["error"]
    assert engine.requests == []


async def test_an_unknown_model_is_a_404(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.load_names("one")
    for route in ("/v1/chat/completions", "/v1/completions"):
        answer = await client.post(route, json=chat("gpt-9") | {"prompt": "hello"})
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
        assert error["type"] == "invalid_request_error"
        assert error["message"] == "The model `gpt-9` does not exist; adapters: one"
    assert engine.requests == []


async def test_server_without_adapters_accepts_any_model(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    answer = await client.post("/v1/chat/completions", json=chat("gpt-9"))
    assert answer.json()["model"] == "gpt-9"
    assert engine.used == [""]
    answer = await client.post("/generate", json=native("one"))
    assert answer.status_code == 422
    assert "no adapters" in answer.json()["error"]
    assert "--lora-adapters" in answer.json()["error"]
    assert engine.asked == 0


async def test_adapter_loaded_by_another_router_is_found_with_one_list(
    clock: Clock, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.load_names("one")
    engine.there = Adapters(4, (*engine.there.loaded, Adapter("two", "/adapters/two")))
    clock.now += 1
    assert (await client.post("/generate", json=native("two"))).status_code == 200
    assert engine.asked == 1
    for _ in range(5):  # a client that is wrong does not make us ask for ever
        assert (await client.post("/generate", json=native("three"))).status_code == 422
    assert engine.asked == 1
    clock.now += 1
    assert (await client.post("/generate", json=native("three"))).status_code == 422
    assert engine.asked == 2


async def test_adapter_unloaded_by_another_router_is_unknown(
    clock: Clock, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.load_names("one")
    clock.now += 60
    assert (await client.post("/generate", json=native("one"))).status_code == 200
    assert engine.asked == 1
    engine.there = Adapters(4)
    clock.now += 1
    assert (await client.post("/generate", json=native("one"))).status_code == 200
    clock.now += 60
    assert (await client.post("/generate", json=native("one"))).status_code == 422


async def test_request_reports_a_lost_engine(
    clock: Clock, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.load_names("one")
    engine.connected = False
    clock.now += 60
    assert (await client.post("/generate", json=native("one"))).status_code == 503


async def test_models_and_info_list_adapters(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.load_names("org/one")
    base, one = (await client.get("/v1/models")).json()["data"]
    assert base["id"] == "acme/tiny"
    named = {"id": "org/one", "display_name": "org/one", "owned_by": "org/one"}
    assert one == {**base, **named, "root": "/adapters/org/one", "parent": "acme/tiny"}
    assert (await client.get("/v1/models/org/one")).json() == one
    assert (await client.get("/v1/models/tgi")).json() == base
    assert (await client.get("/v1/models/two")).status_code == 404
    assert (await client.get("/info")).json()["lora_adapters"] == ["org/one"]
    assert "\ntgi_lora_adapters 1\n" in (await client.get("/metrics")).text


class TestAtRunTime:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_key": "secret"}

    @pytest.fixture
    def key(self, client: httpx.AsyncClient) -> None:
        client.headers["authorization"] = "Bearer secret"

    @pytest.mark.tgi_pain(15)
    @pytest.mark.usefixtures("key")
    async def test_adapter_can_be_loaded_used_and_unloaded(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.load_names()
        body = {"lora_name": "one", "lora_path": "/data/one"}
        answer = await client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200
        assert answer.text == "Success: LoRA adapter 'one' added successfully."
        assert (await client.post("/generate", json=native("one"))).status_code == 200
        assert engine.used == ["one"]
        answer = await client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400
        assert "loaded already" in answer.json()["error"]["message"]
        again = body | {"load_inplace": True, "lora_path": "org/one@v2"}
        assert (await client.post("/v1/load_lora_adapter", json=again)).status_code == 200
        assert engine.there.loaded[0].path == "org/one@v2"
        answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "one"})
        assert answer.text == "Success: LoRA adapter 'one' removed successfully."
        assert (await client.post("/generate", json=native("one"))).status_code == 422
        answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "one"})
        assert answer.status_code == 404

    @pytest.mark.usefixtures("key")
    @pytest.mark.parametrize(
        ("fault", "status"),
        [
            (AdapterError("too large a rank", ""), 400),
            (AdapterError("no folder", "", AdapterFault.UNKNOWN), 404),
            (AdapterError("4 are being loaded", "", AdapterFault.BUSY), 429),
            (ShardError("the model server is gone"), 503),
        ],
    )
    async def test_engine_refusals_have_vllms_statuses(
        self, client: httpx.AsyncClient, engine: FakeEngine, fault: Any, status: int
    ) -> None:
        engine.load_names("one")
        engine.fault = fault
        load = {"lora_name": "two", "lora_path": "/data/two"}
        for route, body in (("load", load), ("unload", {"lora_name": "one"})):
            answer = await client.post(f"/v1/{route}_lora_adapter", json=body)
            assert answer.status_code == status
            assert answer.json()["error"]["message"] == fault.cause

    @pytest.mark.usefixtures("key")
    @pytest.mark.parametrize("body", [{}, {"lora_name": "one"}, {"lora_path": "/x"}])
    async def test_name_and_path_are_required(
        self, client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, str]
    ) -> None:
        engine.load_names()
        answer = await client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400
        assert "must be provided" in answer.json()["error"]["message"]
        answer = await client.post("/v1/unload_lora_adapter", json={})
        assert answer.status_code == 400

    @pytest.mark.usefixtures("key")
    async def test_loading_is_forbidden_without_adapter_support(
        self, client: httpx.AsyncClient
    ) -> None:
        body = {"lora_name": "one", "lora_path": "/data/one"}
        answer = await client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 403
        assert "--max-loras" in answer.json()["error"]["message"]

    @pytest.mark.usefixtures("key")
    async def test_long_names_are_refused(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.load_names("one")
        name = "a" * 100_000
        for route, body, param in (
            ("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "/a"}, "lora_name"),
            ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": name}, "lora_path"),
            ("/v1/unload_lora_adapter", {"lora_name": name}, "lora_name"),
            ("/v1/chat/completions", chat(name), "model"),
            ("/v1/completions", {"prompt": "a", "adapter_id": name}, "adapter_id"),
            ("/v1/responses", {"input": "a", "model": name}, "model"),
        ):
            answer = await client.post(route, json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == (param, "string_above_max_length")
            assert len(answer.content) < 1000
        assert (await client.post("/generate", json=native(name))).status_code == 422
        assert engine.there.names == ["one"]
        assert engine.requests == []

    async def test_loading_requires_the_api_key(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.load_names("one")
        for route in ("load", "unload"):
            body = {"lora_name": "one", "lora_path": "/data/one", "load_inplace": True}
            answer = await client.post(f"/v1/{route}_lora_adapter", json=body)
            assert answer.status_code == 401
        assert engine.there.names == ["one"]


async def test_without_an_api_key_adapters_cannot_be_changed(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.load_names("one")
    for route in ("load", "unload"):
        body = {"lora_name": "one", "lora_path": "/data/one", "load_inplace": True}
        answer = await client.post(
            f"/v1/{route}_lora_adapter", content=json.dumps(body), headers={"authorization": "x"}
        )
        assert answer.status_code == 403
        assert "API_KEY" in answer.json()["error"]["message"]
    assert engine.there.names == ["one"]
