"""Cross-origin requests."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

PAGE = "https://page.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST"}


async def test_all_origins_are_allowed_by_default(client: httpx.AsyncClient) -> None:
    answer = await client.get("/info", headers={"origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    "names", ["content-type", "content-type,authorization", "authorization,x-stainless-lang"]
)
async def test_pages_may_send_a_body_and_a_key(client: httpx.AsyncClient, names: str) -> None:
    headers = PREFLIGHT | {"access-control-request-headers": names}
    answer = await client.options("/generate", headers=headers)
    assert answer.status_code == 200
    allowed = answer.headers["access-control-allow-headers"].lower().split(", ")
    assert set(names.split(",")) <= set(allowed)
    assert set(answer.headers["access-control-allow-methods"].split(", ")) == {"GET", "POST"}


class TestSomeOrigins:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"cors_allow_origin": (PAGE, "http://localhost:8000"), "api_key": "k"}

    async def test_allowed_origins_need_no_key_in_preflights(
        self, client: httpx.AsyncClient
    ) -> None:
        answer = await client.options("/generate", headers=PREFLIGHT)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        refused = await client.post("/generate", json={}, headers={"origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE, "the page may read why"

    async def test_other_origins_are_refused(self, client: httpx.AsyncClient) -> None:
        other = "https://page.example.org"
        assert (
            await client.options("/generate", headers=PREFLIGHT | {"origin": other})
        ).status_code == 400
        answer = await client.get("/health", headers={"origin": other})
        assert "access-control-allow-origin" not in answer.headers
