"""The length and the cost of stop strings are bounded on every route."""

from __future__ import annotations

import tracemalloc

import httpx
import pytest

ROUTES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, ()),
    ("/v1/completions", {"prompt": "hi"}, ()),
    ("/generate", {"inputs": "hi"}, ("parameters",)),
]


@pytest.mark.parametrize(("route", "body", "within"), ROUTES)
@pytest.mark.parametrize("characters", [1025, 200_000])
async def test_too_long_stop_string_is_refused_quickly(
    client: httpx.AsyncClient, route: str, body: dict, within: tuple[str, ...], characters: int
) -> None:
    asked: dict = {"stop": ["a" * characters]}
    for name in within:
        asked = {name: asked}
    tracemalloc.start()
    try:
        answer = await client.post(route, json=body | asked)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.status_code in (400, 422), answer.text
    assert "stop" in answer.text
    assert taken < 16 << 20


@pytest.mark.parametrize(("route", "body", "within"), ROUTES)
async def test_longest_stop_string_is_accepted(
    client: httpx.AsyncClient, route: str, body: dict, within: tuple[str, ...]
) -> None:
    asked: dict = {"stop": ["a" * 1024]}
    for name in within:
        asked = {name: asked}
    answer = await client.post(route, json=body | asked)
    assert answer.status_code == 200, answer.text
