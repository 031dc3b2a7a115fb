"""The worst pains of Text Generation Inference's users, and tests that they do not occur here.

Tests over HTTP are in this file, the others are marked ``@pytest.mark.tgi_pain(NUMBER)``: ``pytest
-m tgi_pain`` runs them. Worst pain first; numbers in brackets are those of TGI's issues.

1.  New models come late or never (3199, 3309).
2.  Out of memory after a warm-up that succeeded (2744, 1374).
3.  Hard to install without a container (1788, 1145).
4.  Garbage by prefix caching under load (2871, 3043).
5.  What OpenAI's clients send is refused (2864, 2228, 2869).
6.  Tools: "auto" acts like "required", one call at most (2549).
7.  Grammars hold up everybody while they are compiled (2902).
8.  Tiny contexts without configuration (3181, 3014).
9.  Hardware that is not in a table (3190).
10. Images to text models are silently taken for text (2565).
11. One shard is dead and the server looks alive (1838, 2593).
12. Quantized checkpoints (3158, 3005, 1322) are read whatever wrote them; formats that are not are
    refused by name before anything is loaded.
13. Offline use (3088, 2147).
14. Log-probabilities of the prompt are gone (2973), and others distorted by the filters (1629).
15. Operations: a second port that is taken (3062), no time to first token (2887), slow health
    checks (2348), errors within streams of status 200 (2749), adapters fixed at the start and
    unknown ones ignored (2177, 2505).
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tgi_cli.router.config import RouterConfig

TESTS = Path(__file__).parent.parent

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
IMAGE: dict[str, Any] = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what is this?"},
                {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
            ],
        }
    ]
}


def test_every_pain_has_a_test() -> None:
    marked = {
        int(number)
        for file in TESTS.rglob("test_*.py")
        for numbers in re.findall(r"@pytest\.mark\.tgi_pain\(([\d, ]+)\)", file.read_text())
        for number in numbers.split(",")
    }
    assert marked == set(range(1, 16))


@pytest.mark.tgi_pain(5)
class TestOpenAI:
    """5: what TGI refused, its clients send by default."""

    @pytest.mark.parametrize(
        "fields",
        [
            {"top_p": 1.0},
            {"stop": "x"},
            {"logit_bias": {}},
            {"logit_bias": {"5": -100}},
            {"stream_options": None},
            {"temperature": 0},
            {"response_format": {"type": "text"}},
            {"tools": []},
            {"n": 2},
            {"frequency_penalty": None, "presence_penalty": 0.5, "seed": None, "stop": None},
        ],
    )
    async def test_is_taken(self, client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
        answer = await client.post("/v1/chat/completions", json=CHAT | fields)
        assert answer.status_code == 200, answer.text

    async def test_a_stop_string_says_stop_and_ids_are_ids(self, client: httpx.AsyncClient) -> None:
        answer = (await client.post("/v1/chat/completions", json=CHAT | {"stop": ["wor"]})).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["message"]["content"] == "hello "
        again = (await client.post("/v1/chat/completions", json=CHAT)).json()
        assert answer["id"] != again["id"]
        assert answer["id"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", IMAGE),
        ("/invocations", IMAGE),
        ("/vertex", {"instances": [IMAGE]}),
        ("/chat_tokenize", IMAGE),
    ],
)
@pytest.mark.tgi_pain(10)
async def test_an_image_is_refused_by_a_model_that_sees_none(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict[str, Any]
) -> None:
    answer = await client.post(route, json=body)
    assert answer.status_code == (400 if route.startswith("/v1/") else 422)
    assert "`image_url` is not supported by this model" in answer.text
    assert engine.requests == []


@pytest.mark.parametrize("route", ["/health", "/ping", "/v2/health/ready"])
@pytest.mark.parametrize("attribute", ["connected", "is_healthy"])
@pytest.mark.tgi_pain(11)
async def test_an_engine_that_is_gone_is_not_healthy(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, attribute: str
) -> None:
    assert (await client.get(route)).status_code == 200
    setattr(engine, attribute, False)
    assert (await client.get(route)).status_code == 503


@pytest.mark.tgi_pain(14)
async def test_the_prompts_logprobs_need_no_flag(client: httpx.AsyncClient) -> None:
    parameters = {"decoder_input_details": True}
    body = {"inputs": "the fox", "parameters": parameters}
    prefill = (await client.post("/generate", json=body)).json()["details"]["prefill"]
    assert prefill[0]["logprob"] is None
    assert all(token["logprob"] is not None for token in prefill[1:])
    assert len(prefill) > 1


@pytest.mark.tgi_pain(15)
class TestOperations:
    """15."""

    async def test_time_to_first_token_and_between_tokens(self, client: httpx.AsyncClient) -> None:
        await client.post("/generate", json={"inputs": "hi"})
        metrics = (await client.get("/metrics")).text
        assert "tgi_request_time_to_first_token_seconds_count 1" in metrics
        assert "tgi_request_inter_token_seconds_count" in metrics

    async def test_metrics_are_served_where_the_api_is(self) -> None:
        """There is no second port that another server could hold."""
        names = {name for name in RouterConfig.__dataclass_fields__ if "port" in name.split("_")}
        assert names == {"port"}

    async def test_health_answers_while_the_engine_computes(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.gate = asyncio.Semaphore(0)
        busy = asyncio.ensure_future(client.post("/generate", json={"inputs": "hi"}))
        while not engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (await client.get("/health")).status_code == 200
        assert not busy.done()
        for _ in range(20):
            engine.gate.release()
        assert (await busy).status_code == 200

    @pytest.mark.parametrize("route", ["/v1/chat/completions", "/invocations"])
    async def test_a_stream_that_cannot_begin_is_an_error_of_its_own(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str
    ) -> None:
        engine.connected = False
        answer = await client.post(route, json=CHAT | {"stream": True})
        assert answer.status_code == 503

    async def test_an_error_in_a_stream_says_what_it_is(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.failure, engine.fail_after = "out of memory", 1
        answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        *_, error, done = events(answer.text)
        assert done == "[DONE]"
        assert "out of memory" in error["error"]["message"]
        assert error["error"]["type"] == "server_error"

    async def test_an_unknown_adapter_is_not_the_base_model(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.load_names("fox")
        body = {"inputs": "hi", "parameters": {"adapter_id": "wolf"}}
        assert (await client.post("/generate", json=body)).status_code == 422
        answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "wolf"})
        assert answer.status_code == 404
        assert engine.requests == []
