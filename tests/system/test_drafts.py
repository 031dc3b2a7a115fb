"""Answers with drafts are those without, to the last bit of their log-probabilities."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest

from tests.system.conftest import StartServer
from tests.system.test_mixed import FORMS, answer, request

pytestmark = [pytest.mark.system, pytest.mark.slow]

REQUESTS = 3 * FORMS
FLAGS = ("--max-top-n-tokens", "5", "--no-measured-limits")
COUNTER = r"^tgi_draft_{}_total (\S+)$"
CODE = "".join(f"    self.field_{n} = field_{n}\n" for n in range(24))
REWRITE: dict[str, Any] = {
    "prompt": f"{CODE}\n{CODE[:200]}",
    "max_tokens": 100,
    "temperature": 0,
    "ignore_eos": True,
}
"""Text that goes on as it has begun."""


def predicted(number: int, plain: Any) -> dict[str, Any]:
    """A right prediction of what a request was answered, where its route takes one."""
    path, body = request(number)
    if not path.startswith("/v1/"):
        return {}
    first = plain[0] if body.get("stream") else plain[0][0]
    if body.get("stream"):
        text = first[0]
    else:
        text = first["text"] if "text" in first else first["message"]["content"]
    return {"prediction": {"type": "content", "content": text}}


async def counted(client: httpx.AsyncClient, name: str) -> float:
    found = re.search(COUNTER.format(name), (await client.get("/metrics")).text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=240)


async def rewritten(client: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    answered: dict[str, Any] = (
        (await client.post("/v1/completions", json=REWRITE | more)).raise_for_status().json()
    )
    return answered


async def test_drafts_change_no_answer(start_server: StartServer) -> None:
    numbers = range(REQUESTS)
    server = start_server("--speculate", "0", *FLAGS)
    server.wait_ready()
    async with client_of(server.url) as client:
        plain = await asyncio.gather(*(answer(client, number) for number in numbers))
        text = (await rewritten(client))["choices"][0]["text"]
        assert await counted(client, "tokens") == 0
    server.kill()

    server = start_server("--speculate", "7", *FLAGS)
    server.wait_ready()
    async with client_of(server.url) as client:
        together = await asyncio.gather(*(answer(client, number) for number in numbers))
        before = await counted(client, "accepted_tokens")
        alone = [
            await answer(client, number, **predicted(number, plain[number])) for number in numbers
        ]
        assert await counted(client, "accepted_tokens") > before, "a right prediction was no help"
        found = await rewritten(client)
        guess = {"prediction": {"type": "content", "content": text}}
        guessed = await rewritten(client, cache_salt="another", **guess)
        drafted = await counted(client, "tokens")
        accepted = await counted(client, "accepted_tokens")
    for given in (together, alone):
        wrong = [number for number in numbers if given[number] != plain[number]]
        assert not wrong, {n: (request(n), given[n], plain[n]) for n in wrong[:3]}
    assert found["choices"][0]["text"] == guessed["choices"][0]["text"] == text
    assert 0 < accepted <= drafted
    details = guessed["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0
