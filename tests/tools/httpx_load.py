"""An independent load generator in few lines: ``python -m tests.tools.httpx_load URL CLIENTS
REQUESTS INPUT_WORDS OUTPUT_TOKENS`` prints what it measured at /v1/completions as JSON."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from itertools import pairwise

import httpx


async def ask(client: httpx.AsyncClient, model: str, words: int, tokens: int) -> list[float]:
    """One streamed request: when it was sent, when each event with text came."""
    prompt = " ".join(random.choices(["one", "two", "tree", "sun", "on", "and"], k=words))
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True}
    times = [time.perf_counter()]
    async with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                times.append(time.perf_counter())
    return times


async def load(url: str, clients: int, requests: int, words: int, tokens: int) -> dict[str, float]:
    """``requests`` from so many clients, each behind its last answer; ms and per second."""
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await asyncio.gather(*(ask(client, model, words, tokens) for _ in range(clients)))
        left, answers = iter(range(requests)), []

        async def one() -> None:
            for _ in left:
                answers.append(await ask(client, model, words, tokens))

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(clients)))
        seconds = time.perf_counter() - began
    gaps = [b - a for times in answers for a, b in pairwise(times[1:])]
    events = sum(len(times) - 1 for times in answers)
    return {
        "requests": len(answers),
        "events": events,
        "ttft_p50": statistics.median(times[1] - times[0] for times in answers) * 1000,
        "itl_p50": statistics.median(gaps) * 1000,
        "e2e_p50": statistics.median(times[-1] - times[0] for times in answers) * 1000,
        "requests_per_second": len(answers) / seconds,
        "events_per_second": events / seconds,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(load(sys.argv[1], *map(int, sys.argv[2:])))))
