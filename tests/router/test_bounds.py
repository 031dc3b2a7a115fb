"""Limits of the router below its engine's: --max-input-tokens, --max-total-tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from tgi_cli.router.engine_restart import bounded
from tgi_cli.router.state import RouterState


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"max_input_tokens": 5, "max_total_tokens": 30}


async def test_lower_limits_of_the_router_apply(client: httpx.AsyncClient) -> None:
    reported = (await client.get("/info")).json()
    assert (reported["max_input_tokens"], reported["max_total_tokens"]) == (5, 30)
    short = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
    assert (await client.post("/generate", json=short)).status_code == 200
    long = {"inputs": "a b c d e f g h", "parameters": {"max_new_tokens": 1}}
    answer = await client.post("/generate", json=long)
    assert answer.status_code == 422
    assert "must have less than 5 tokens" in answer.json()["error"]
    greedy = {"inputs": "a", "parameters": {"max_new_tokens": 50}}
    answer = await client.post("/generate", json=greedy)
    assert answer.status_code == 422
    assert "must be <= 30" in answer.json()["error"]
    cut = {"inputs": "a b", "parameters": {"truncate": 6, "max_new_tokens": 1}}
    answer = await client.post("/generate", json=cut)
    assert "less than 5" in answer.json()["error"]


def test_higher_limits_do_not_exceed_the_engines(state: RouterState) -> None:
    info = state.client.info
    for limit in (10**6, None):
        config = replace(state.config, max_input_tokens=limit, max_total_tokens=limit)
        assert bounded(info, config) == info
