"""Many different requests at once, with a cache that is far too small for all of them:
each gets what it gets alone, to the last bit of its log-probabilities."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import httpx
import pytest

from tests.system.conftest import StartServer
from tests.tools.server_process import ServerProcess, poll

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1800)]

REQUESTS = 120
CACHE_TOKENS = 2048
SAMPLES = 6
SAMPLE_TOKENS = 600
"""Samples of one prompt, which start together and run beside the other requests. Even if one of
them ended before the others had half of its tokens, the cache would be too small for them."""
LONG_TOKENS = 900
SAMPLED, LONG = REQUESTS, REQUESTS + 1
"""Numbers of the requests with so many samples and tokens."""
FORMS = 14
WORDS = (
    *("def", "class", "return", "import", "the", "of", "file", "list", "string", "value"),
    *("open", "read", "write", "for", "in", "if", "else", "function", "module", "object"),
    *("error", "number", "key", "path", "name", "data", "index", "set", "tuple", "byte"),
)
PREFIXES = ("", "", "The following text is about Python.\n" * 12)
"""Some share one, which is computed once, kept, and given up when blocks run out."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def request(number: int) -> tuple[str, dict[str, Any]]:
    """Path and body of one of them, always the same."""
    if number >= REQUESTS:
        hot = {"temperature": 1.5, "seed": number}  # so that drafts do not end it within a moment
        body = {"prompt": "import os", "ignore_eos": True, "logprobs": 0}
        if number == SAMPLED:
            return "/v1/completions", body | hot | {"n": SAMPLES, "max_tokens": SAMPLE_TOKENS}
        return "/v1/completions", body | hot | {"max_tokens": LONG_TOKENS}
    dice = random.Random(number)
    words = " ".join(dice.choices(WORDS, k=dice.choice((4, 20, 60, 150))))
    prompt = dice.choice(PREFIXES) + words
    tokens = dice.choice((4, 12, 24, 80))
    seed = dice.randrange(1 << 32)
    native = {"max_new_tokens": tokens, "details": True}
    text: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 1,
        "seed": seed,
        "logprobs": True,
        "top_logprobs": 2,
    }
    forms: list[tuple[str, dict[str, Any]]] = [
        ("/generate_stream", {"inputs": prompt, "parameters": native}),
        ("/generate", {"inputs": prompt, "parameters": native | {"do_sample": True, "seed": seed}}),
        (
            "/generate",
            {"inputs": prompt, "parameters": native | {"decoder_input_details": True}},
        ),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"n": 3, "stream": True}),
        ("/v1/chat/completions", chat | {"temperature": 0, "stream": True}),
        ("/v1/chat/completions", chat | {"guided_regex": "([a-z]{2,8} ){3}[0-9]{1,4}"}),
        (
            "/v1/chat/completions",
            chat
            | {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": SCHEMA},
                }
            },
        ),
        ("/v1/completions", text | {"logprobs": 3, "stop": [" the", "\n", "("]}),
        ("/v1/completions", text | {"n": 3, "temperature": 0.9, "seed": seed, "stream": True}),
        (
            "/v1/completions",
            text | {"echo": True, "logprobs": 1, "ignore_eos": True, "max_tokens": 250},
        ),
        (
            "/v1/completions",
            text
            | {
                "temperature": 1.3,
                "seed": seed,
                "top_p": 0.9,
                "min_p": 0.01,
                "presence_penalty": 0.5,
                "repetition_penalty": 1.1,
                "bad_words": ["the"],
                "min_tokens": 4,
                "logprobs": 0,
            },
        ),
        (
            "/generate",
            {
                "inputs": prompt,
                "parameters": native
                | {
                    "do_sample": True,
                    "seed": seed,
                    "top_n_tokens": 3,
                    "watermark": True,
                    "frequency_penalty": 0.3,
                    "stop": [".", ";"],
                },
            },
        ),
        ("/v1/completions", text | {"temperature": 1, "seed": seed, "best_of": 2, "logprobs": 1}),
    ]
    assert len(forms) == FORMS
    return forms[number % FORMS]


async def answer(client: httpx.AsyncClient, number: int, **more: Any) -> Any:
    """What the client gets, without ids and times: texts, tokens, log-probabilities, reasons.

    ``more`` are further fields of the body.
    """
    path, body = request(number)
    given = await client.post(path, json=body | more)
    assert given.status_code == 200, given.text
    if path == "/generate":
        return given.json()
    if path.startswith("/v1/") and not body.get("stream"):
        told = given.json()
        return told["choices"], told["usage"]["completion_tokens"]
    events = [
        json.loads(line.removeprefix("data:"))
        for line in given.text.splitlines()
        if line.startswith("data:") and not line.endswith("[DONE]")
    ]
    if path == "/generate_stream":
        return [{**event, "index": 0} for event in events]
    return samples(events)


def samples(events: list[dict[str, Any]]) -> dict[int, list[Any]]:
    """Text, log-probabilities and reason of each choice; where chunks end is a matter of time."""
    found: dict[int, list[Any]] = {}
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            whole = found.setdefault(choice["index"], ["", [], None])
            delta = choice.get("delta") or {}
            whole[0] += choice.get("text") or delta.get("content") or ""
            whole[1] += (choice.get("logprobs") or {}).get("content") or []
            whole[2] = choice["finish_reason"] or whole[2]
    return found


@pytest.fixture(scope="module")
def small(start_server: StartServer) -> ServerProcess:
    flags = ["--max-batch-total-tokens", str(CACHE_TOKENS), "--no-measured-limits"]
    server = start_server(*flags, "--max-concurrent-requests", "1000", "--max-top-n-tokens", "5")
    server.wait_ready()
    return server


async def test_mixed_requests_are_answered_as_each_is_alone(small: ServerProcess) -> None:
    limits = httpx.Limits(max_connections=None)

    def begun() -> bool:
        running = measured(small, "tgi_batch_current_size")
        return running == SAMPLES or measured(small, "tgi_preemptions_total") > 0

    # The time limit of the test is that of each request, too.
    async with httpx.AsyncClient(base_url=small.url, timeout=None, limits=limits) as client:
        order = list(range(REQUESTS))
        random.Random(0).shuffle(order)
        sampled = asyncio.ensure_future(answer(client, SAMPLED))
        await asyncio.to_thread(poll, begun, 1200, "all samples run")
        order = [LONG, *order]
        answers = await asyncio.gather(*(answer(client, number) for number in order))
        together = dict(zip(order, answers, strict=True)) | {SAMPLED: await sampled}
        preempted = measured(small, "tgi_preemptions_total")
        alone = {number: await answer(client, number) for number in sorted(together)}
    wrong = [number for number in alone if together[number] != alone[number]]
    assert not wrong, {n: (request(n), together[n], alone[n]) for n in wrong[:3]}
    assert preempted > 0, "the cache was large enough for all"


def measured(server: ServerProcess, name: str) -> float:
    """A metric of the engine, as it is now."""
    text = httpx.get(f"{server.url}/metrics", timeout=240).text
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])
