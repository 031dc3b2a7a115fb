"""Requests that gateways make of a server, as they send them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

import tgi_cli
from tests.router.fakes import FakeEngine
from tests.router.replicas.conftest import FakeReplica, pool_of
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.text.bundle import TextBundle

MODEL = "acme/tiny"


async def fetched(client: httpx.AsyncClient, path: str) -> Any:
    """As reqwest asks, with nothing but the path."""
    answer = await client.get(path, headers={"accept": "*/*"})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_smg_registers_a_worker(client: httpx.AsyncClient) -> None:
    """Its steps: connection, runtime, metadata (model_gateway/src/workflow/steps/local)."""
    assert (await client.get("/health")).status_code == 200
    (model,) = (await fetched(client, "/v1/models"))["data"]
    assert (model["id"], model["owned_by"]) == (MODEL, MODEL)
    assert await fetched(client, "/version") == {"version": tgi_cli.__version__}
    server = await fetched(client, "/server_info")
    wanted = {
        "model_id": MODEL,
        "model_path": MODEL,
        "served_model_name": MODEL,
        "version": tgi_cli.__version__,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 2,
        "context_length": 64,
        "max_total_tokens": 1024,
        "max_running_requests": 8,
        "is_embedding": False,
    }
    assert server | wanted == server
    found = await fetched(client, "/model_info")
    assert (found["model_path"], found["model_type"]) == (MODEL, "llama")
    assert (found["is_generation"], found["has_image_understanding"]) == (True, False)
    assert await fetched(client, "/get_server_info") == server
    assert await fetched(client, "/get_model_info") == found


async def test_smg_polls_the_load(client: httpx.AsyncClient) -> None:
    found = await fetched(client, "/v1/loads?include=core,disagg,queues,memory")
    assert found["dp_rank_count"] == 1
    assert found["loads"] == [
        {
            "dp_rank": 0,
            "num_running_reqs": 2,
            "num_waiting_reqs": 3,
            "num_total_reqs": 5,
            "num_used_tokens": 80,
            "max_total_num_tokens": 1024,
            "token_usage": 80 / 1024,
            "cache_hit_rate": 0.4,
            "utilization": 0.25,
            "max_running_requests": 8,
        }
    ]
    assert (await fetched(client, "/loads"))["loads"] == found["loads"]


async def test_replicas_are_data_parallel_ranks(text: TextBundle, config: RouterConfig) -> None:
    app = create_app(pool_of([FakeReplica(text.tokenizer) for _ in range(3)]), text, config)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        server = await fetched(client, "/server_info")
        assert (server["dp_size"], server["max_total_tokens"]) == (3, 3 * 1024)
        found = await fetched(client, "/v1/loads")
    assert [load["dp_rank"] for load in found["loads"]] == [0, 1, 2]


async def test_vllm_router_asks_for_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """First at the render endpoint, then at /tokenize in vLLM's form."""
    text = "import os\n"
    ids = engine.tokenizer.encode(text, True)
    (rendered,) = (
        await client.post("/v1/completions/render", json={"model": MODEL, "prompt": text})
    ).json()
    assert rendered["token_ids"] == ids
    assert rendered["model"] == MODEL
    assert rendered["request_id"].startswith("cmpl-")
    found = (await client.post("/tokenize", json={"model": MODEL, "prompt": text})).json()
    assert (found["tokens"], found["count"]) == (ids, len(ids))


async def test_several_prompts_are_rendered_in_order(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for prompts in (["import os", "def read"], [[5, 6, 7], [8]]):
        answer = await client.post("/v1/completions/render", json={"prompt": prompts})
        wanted = [
            engine.tokenizer.encode(prompt, True) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
        assert [each["token_ids"] for each in answer.json()] == wanted
    assert not engine.requests


async def test_a_chat_is_rendered_as_it_would_be_run(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    rendered = (await client.post("/v1/chat/completions/render", json=body)).json()
    assert rendered["request_id"].startswith("chatcmpl-")
    assert not engine.requests
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert rendered["token_ids"] == list(engine.requests[0].prompt_ids)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions/render", {"prompt": ""}, 400),
        ("/v1/completions/render", {"prompt": ["a"] * 5}, 400),
        ("/v1/completions/render", {"prompt": [-1]}, 400),
        ("/v1/completions/render", {"prompt": [400]}, 400),
        ("/v1/completions/render", {"prompt": [1] * 100}, 400),
        ("/v1/chat/completions/render", {"messages": []}, 400),
    ],
)
async def test_what_cannot_run_is_not_rendered(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int
) -> None:
    assert (await client.post(path, json=body)).status_code == status


class TestWithAKey:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_key": "key", "served_model_name": ("tiny",)}

    async def test_all_need_it(self, client: httpx.AsyncClient) -> None:
        for path in ("/server_info", "/get_server_info", "/model_info", "/v1/loads", "/loads"):
            assert (await client.get(path)).status_code == 401
            headers = {"authorization": "Bearer key"}
            assert (await client.get(path, headers=headers)).status_code == 200

    async def test_other_models_are_not_rendered(self, client: httpx.AsyncClient) -> None:
        headers = {"authorization": "Bearer key"}
        body = {"model": "gpt-9", "prompt": "a"}
        for path in ("/v1/completions/render", "/completions/render"):
            assert (await client.post(path, json=body, headers=headers)).status_code == 404
