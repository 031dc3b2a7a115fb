"""With an API key, what makes the server work needs it; what only looks does not."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from tests.router.fakes import FakeEngine

KEY = "s3cret"
BODY: dict[str, Any] = {
    "inputs": "hello",
    "prompt": "hello",
    "messages": [{"role": "user", "content": "hello"}],
}
GUARDED = ("/", "/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions")
OPEN = ("/", "/health", "/ping", "/info", "/metrics", "/v1/models", "/v1/models/tgi")


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"api_key": KEY}


@pytest.mark.parametrize("route", GUARDED)
@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer s3cre",
     f"Bearer {KEY.upper()}", "Bearer sécret"],
)  # fmt: skip
async def test_no_key_no_tokens(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, given: str | None
) -> None:
    headers = {} if given is None else {"authorization": given.encode()}
    answer = await client.post(route, json=BODY, headers=headers)  # type: ignore[arg-type]
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()
    if route.startswith("/v1/"):
        assert error["error"]["code"] == "invalid_api_key"
        assert "Bearer" in error["error"]["message"]
    else:
        assert error["error_type"] == "unauthorized"
    assert engine.requests == []


@pytest.mark.parametrize("route", GUARDED)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_the_key_opens(client: httpx.AsyncClient, route: str, scheme: str) -> None:
    headers = {"authorization": f"{scheme} {KEY}"}
    assert (await client.post(route, json=BODY, headers=headers)).status_code == 200


@pytest.mark.parametrize("route", OPEN)
async def test_looking_is_free(client: httpx.AsyncClient, route: str) -> None:
    assert (await client.get(route)).status_code == 200


async def test_openais_client_brings_it(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        answer = await client.completions.create(model="tgi", prompt="hello", max_tokens=3)
        assert answer.choices[0].text
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="no", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="API key"):
            await client.completions.create(model="tgi", prompt="hello")


async def test_a_large_body_without_a_key_does_not_break_the_connection(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        refused = await client.post("/generate", json={"inputs": "x" * 1_000_000})
        assert refused.status_code == 401
        answer = await client.post(
            "/generate", json=BODY, headers={"authorization": f"Bearer {KEY}"}
        )
        assert answer.status_code == 200


def test_the_key_is_in_no_log(app: Starlette) -> None:
    assert KEY not in repr(app.state.router.config)
