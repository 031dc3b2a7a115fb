"""GET /v1/models answers the clients of both vendors; --served-model-name."""

from __future__ import annotations

import datetime
import time
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tgi_cli.router.state import RouterState

USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
}


async def test_card_tells_the_context_length_in_every_vendors_words(
    client: httpx.AsyncClient, engine: FakeEngine, state: RouterState
) -> None:
    card = (await client.get("/v1/models/acme/tiny")).json()
    total = engine.info.max_total_tokens
    assert (card["max_model_len"], card["context_length"]) == (total, total)
    assert (card["max_input_tokens"], card["max_tokens"]) == (63, total - 1)
    assert card["architecture"]["input_modalities"] == ["text"]
    assert card["architecture"]["output_modalities"] == ["text"]
    assert abs(card["created"] - time.time()) < 3600
    assert card["created"] == int(state.started)
    read = datetime.datetime.fromisoformat(card["created_at"])
    assert (read.timestamp(), read.tzinfo) == (card["created"], datetime.UTC)


async def test_card_has_the_limits_of_a_restarted_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.connected = False
    engine.restart(max_input_tokens=31, max_total_tokens=32)
    card = (await client.get("/v1/models/acme/tiny")).json()
    assert (card["max_model_len"], card["max_input_tokens"]) == (32, 31)


async def test_clients_of_both_vendors_list_the_models(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as ai:
        (card,) = [model async for model in ai.models.list()]
        assert (card.id, card.object) == ("acme/tiny", "model")
    async with anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as claude:
        (info,) = [model async for model in claude.models.list(limit=1000)]
        assert (info.type, info.display_name, info.max_input_tokens) == ("model", "acme/tiny", 63)
        assert info.created_at.timestamp() == card.created
        found = await claude.models.retrieve("acme/tiny")
        assert found.max_tokens == 63
        with pytest.raises(anthropic.NotFoundError) as caught:
            await claude.models.retrieve("other")
        assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


async def test_errors_have_the_form_of_the_vendor_whose_client_asks(
    client: httpx.AsyncClient,
) -> None:
    for path in ("/v1/models/other", "/v1/models?limit=0"):
        openais = (await client.get(path)).json()
        assert openais["error"]["param"]
        theirs = await client.get(path, headers={"anthropic-version": "2023-06-01"})
        assert theirs.json()["type"] == "error"
        assert theirs.json()["request_id"] == theirs.headers["request-id"]


class TestPages:
    @pytest.fixture
    def engine(self, engine: FakeEngine) -> FakeEngine:
        engine.load_names("one", "two", "three")
        return engine

    @pytest.mark.parametrize(
        ("query", "ids", "more"),
        [
            ("", ["acme/tiny", "one", "two", "three"], False),
            ("?limit=1000", ["acme/tiny", "one", "two", "three"], False),
            ("?limit=2", ["acme/tiny", "one"], True),
            ("?limit=2&after_id=one", ["two", "three"], False),
            ("?limit=1&after_id=acme/tiny", ["one"], True),
            ("?after_id=three", [], False),
            ("?limit=2&before_id=three", ["one", "two"], True),
            ("?before_id=one", ["acme/tiny"], False),
            ("?before_id=three&after_id=acme/tiny", ["one", "two"], False),
            ("?before_id=one&after_id=two", [], False),
        ],
    )
    async def test_pages(
        self, client: httpx.AsyncClient, query: str, ids: list[str], more: bool
    ) -> None:
        page = (await client.get(f"/v1/models{query}")).json()
        assert [card["id"] for card in page["data"]] == ids
        assert page["has_more"] is more
        assert page["first_id"] == (ids[0] if ids else None)
        assert page["last_id"] == (ids[-1] if ids else None)

    @pytest.mark.parametrize(
        "query",
        ["limit=0", "limit=1001", "limit=x", "limit=-1", "limit=" + "9" * 5000, "limit=",
         "after_id=none-such", "before_id=none-such", "limit=two"],
    )  # fmt: skip
    async def test_invalid_pages_are_refused(self, client: httpx.AsyncClient, query: str) -> None:
        answer = await client.get(f"/v1/models?{query}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == query.partition("=")[0]

    async def test_anthropics_client_reads_all_pages(self, url: str) -> None:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="-") as claude:
            found = [model.id async for model in claude.models.list(limit=1)]
        assert found == ["acme/tiny", "one", "two", "three"]


@pytest.mark.parametrize("path", BODIES)
async def test_without_names_any_name_is_accepted_and_repeated(
    client: httpx.AsyncClient, path: str
) -> None:
    answer = await client.post(path, json={**BODIES[path], "model": "gpt-9"})
    assert answer.json()["model"] == "gpt-9"
    answer = await client.post(path, json={**BODIES[path], "model": "tgi"})
    assert answer.json()["model"] == "acme/tiny"


class TestNames:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"served_model_name": ("big", "gpt-9"), "vllm_metrics": True}

    @pytest.mark.parametrize("path", BODIES)
    @pytest.mark.parametrize("name", ["big", "gpt-9", "tgi"])
    async def test_all_names_are_accepted_and_the_first_is_reported(
        self, client: httpx.AsyncClient, path: str, name: str
    ) -> None:
        body = {**BODIES[path], "model": name}
        answer = await client.post(path, json=body)
        assert (answer.status_code, answer.json()["model"]) == (200, "big")
        stream = (await client.post(path, json={**body, "stream": True})).text
        first = events(stream)[0]
        assert (first.get("response") or first.get("message") or first)["model"] == "big"

    @pytest.mark.parametrize("path", BODIES)
    @pytest.mark.parametrize("name", ["other", "acme/tiny"])
    async def test_other_names_are_404(
        self, client: httpx.AsyncClient, engine: FakeEngine, path: str, name: str
    ) -> None:
        answer = await client.post(path, json={**BODIES[path], "model": name})
        assert answer.status_code == 404
        assert "big, gpt-9" in answer.json()["error"]["message"]
        assert engine.requests == []

    async def test_adapters_are_reported_by_their_own_name(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.load_names("one")
        body = {**BODIES["/v1/messages"], "model": "one"}
        assert (await client.post("/v1/messages", json=body)).json()["model"] == "one"
        assert engine.used == ["one"]
        (card,) = (await client.get("/v1/models?after_id=gpt-9")).json()["data"]
        assert (card["id"], card["parent"]) == ("one", "big")

    async def test_all_names_are_listed(self, client: httpx.AsyncClient) -> None:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"]) for card in listed] == [
            ("big", "acme/tiny"),
            ("gpt-9", "acme/tiny"),
        ]
        assert (await client.get("/v1/models/tgi")).json()["id"] == "big"

    async def test_gateways_read_the_first_name(self, client: httpx.AsyncClient) -> None:
        metrics = (await client.get("/metrics")).text
        assert 'vllm:num_requests_running{model_name="big"}' in metrics

    async def test_native_routes_name_the_model_by_its_id(self, client: httpx.AsyncClient) -> None:
        assert (await client.get("/info")).json()["model_id"] == "acme/tiny"
        assert (await client.post("/generate", json={"inputs": "hi"})).status_code == 200


async def test_head_asks_only_whether_the_address_answers(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.is_healthy = False
    assert (await client.head("/")).status_code == 200
    assert (await client.get("/")).status_code == 503
