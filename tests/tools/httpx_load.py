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

WORDS = "one two tree sun on and red green he she came went house light time way day old new"


async def ask(
    client: httpx.AsyncClient, model: str, words: int, tokens: int
) -> tuple[list[float], int]:
    """One streamed request: when it was sent and each event came; its tokens, says the server."""
    prompt = " ".join(random.choices(WORDS.split(), k=words))
    body = {"model": model, "prompt": prompt, "stream": True}
    body |= {"max_tokens": tokens, "ignore_eos": True, "stream_options": {"include_usage": True}}
    times, counted = [time.perf_counter()], 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {}
            if event.get("choices"):
                times.append(time.perf_counter())
            elif event:
                counted = event["usage"]["completion_tokens"]
    return times, counted


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
    gaps = [b - a for times, _ in answers for a, b in pairwise(times[1:])]
    per_token = [(times[-1] - times[1]) / max(count - 1, 1) for times, count in answers]
    produced = sum(count for _, count in answers)
    return {
        "requests": len(answers),
        "tokens": produced,
        "ttft_p50": statistics.median(times[1] - times[0] for times, _ in answers) * 1000,
        "itl_p50": statistics.median(gaps) * 1000,
        "tpot_p50": statistics.median(per_token) * 1000,
        "e2e_p50": statistics.median(times[-1] - times[0] for times, _ in answers) * 1000,
        "requests_per_second": len(answers) / seconds,
        "tokens_per_second": produced / seconds,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(load(sys.argv[1], *map(int, sys.argv[2:])))))
