"""A real server and real clients: what they get, alone and among others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from tests.tools.server_process import ServerProcess, poll

PROMPTS = [
    "def read_json(path):",
    "The function returns",
    "import os",
    "Return a list of the names of the entries in the directory given by *path*.",
    "class Parser:\n    def __init__(self, source):\n        self.source = source\n",
    "A",
    "Raises :exc:`ValueError` if the value is not present. " * 12,
    "for line in file:\n",
]


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> list[int]:
    """Token ids of a /generate_stream request."""
    tokens = []
    async with client.stream("POST", f"{url}/generate_stream", json=body, timeout=120) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                tokens.append(json.loads(line[5:])["token"]["id"])
    return tokens


async def test_32_streams_at_once_say_what_each_says_alone(server: ServerProcess) -> None:
    bodies = [
        {"inputs": PROMPTS[i % len(PROMPTS)], "parameters": {"max_new_tokens": 1 + 5 * (i % 13)}}
        for i in range(32)
    ]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits) as client:
        alone = [await stream(client, server.url, body) for body in bodies]
        together = await asyncio.gather(*(stream(client, server.url, body) for body in bodies))
    assert [len(tokens) for tokens in alone] == [len(tokens) for tokens in together]
    assert alone == list(together)


async def test_a_seed_says_the_same_alone_and_among_others(server: ServerProcess) -> None:
    parameters = {"max_new_tokens": 30, "temperature": 0.9, "top_p": 0.95, "seed": 42}
    seeded = {"inputs": PROMPTS[0], "parameters": parameters}
    others = [
        {"inputs": PROMPTS[i % 8], "parameters": parameters | {"seed": i, "max_new_tokens": 40}}
        for i in range(20)
    ]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits) as client:
        alone = await stream(client, server.url, seeded)
        together = await asyncio.gather(
            *(stream(client, server.url, body) for body in [seeded, *others])
        )
    assert together[0] == alone
    assert len({tuple(tokens) for tokens in together}) > 10, "other seeds say other things"


async def test_a_client_that_goes_away_frees_its_sequence(server: ServerProcess) -> None:
    body = {"inputs": "import os", "parameters": {"max_new_tokens": 2000}}
    dropped = 'tgi_request_failure{err="dropped"}'
    before = _metric(server, dropped)
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{server.url}/generate_stream", json=body) as answer,
    ):
        async for _ in answer.aiter_lines():
            break
    poll(lambda: _metric(server, dropped) > before, 60, "it was cancelled before its end")
    poll(lambda: _metric(server, "tgi_batch_current_size") == 0, 60, "the sequence is freed")


def _metric(server: ServerProcess, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(name + " ")), 0.0)
