"""/health, /info, /v1/models."""

from __future__ import annotations

import httpx
import pytest

import tgi_cli
from tests.router.fakes import FakeEngine


@pytest.mark.parametrize("route", ["/health", "/ping", "/"])
async def test_health_follows_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    answer = await client.get(route)
    assert (answer.status_code, answer.content) == (200, b"")
    engine.is_healthy = False
    answer = await client.get(route)
    assert answer.status_code == 503
    assert answer.json() == {"error": "unhealthy", "error_type": "healthcheck"}
    assert "retry-after" in answer.headers


async def test_info_has_tgis_fields(client: httpx.AsyncClient) -> None:
    assert (await client.get("/info")).json() == {
        "model_id": "acme/tiny",
        "model_sha": None,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": 128,
        "max_best_of": 2,
        "max_stop_sequences": 4,
        "max_input_tokens": 63,
        "max_total_tokens": 64,
        "validation_workers": 2,
        "max_client_batch_size": 4,
        "router": "text-generation-router",
        "version": tgi_cli.__version__,
        "sha": None,
        "docker_label": None,
    }


async def test_models_lists_the_served_model(client: httpx.AsyncClient) -> None:
    model = (await client.get("/v1/models/acme/tiny")).json()
    assert model | {"id": "acme/tiny", "object": "model", "owned_by": "acme/tiny"} == model
    listed = (await client.get("/v1/models")).json()
    assert (listed["object"], listed["data"]) == ("list", [model])
    assert (await client.get("/v1/models/tgi")).json() == model
    answer = await client.get("/v1/models/gpt-9")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
