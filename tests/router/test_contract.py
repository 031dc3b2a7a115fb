"""Every answer is what TGI's OpenAPI document says, and what our own says.

The fixture holds the schemas of TGI's responses; ``contracts.tgi`` names the few places where
ours differ on purpose: what OpenAI's clients check of /v1 streams, and what TGI's code answers
where its own document is wrong. Errors of /v1 are OpenAI's, not TGI's.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import jsonschema
import pytest

from tests.router import contracts
from tests.router.fakes import FakeEngine
from tgi_cli.engine.messages import FinishReason

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
ALL: dict[str, Any] = {
    "details": True,
    "decoder_input_details": True,
    "top_n_tokens": 2,
    "do_sample": True,
    "best_of": 2,
}
STREAMED: dict[str, Any] = {"details": True, "top_n_tokens": 2, "seed": 3, "do_sample": True}
LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
TENSOR: dict[str, Any] = {"name": "x", "shape": [1], "datatype": "BYTES", "data": ["hi"]}

ANSWERS: list[tuple[str, dict[str, Any] | None]] = [
    ("POST /", {"inputs": "hi"}),
    ("POST /", {"inputs": "hi", "parameters": ALL}),
    ("POST /", {"inputs": "hi", "stream": True}),
    ("POST /generate", {"inputs": "hi"}),
    ("POST /generate", {"inputs": "hi", "parameters": ALL}),
    ("POST /generate_stream", {"inputs": "hi"}),
    ("POST /generate_stream", {"inputs": "hi", "parameters": STREAMED}),
    ("POST /generate_stream", {"inputs": "hi", "parameters": {"full_text": True}}),
    ("POST /tokenize", {"inputs": "hi"}),
    ("POST /chat_tokenize", CHAT),
    ("POST /invocations", {"inputs": "hi"}),
    ("POST /invocations", {"inputs": "hi", "stream": True}),
    ("POST /invocations", CHAT),
    ("POST /invocations", {**CHAT, **USAGE}),
    ("POST /invocations", {"prompt": "hi"}),
    ("POST /invocations", {"prompt": "hi", **USAGE}),
    ("POST /v1/chat/completions", CHAT),
    ("POST /v1/chat/completions", {**CHAT, **LOGPROBS, "n": 2}),
    ("POST /v1/chat/completions", {**CHAT, **USAGE, **LOGPROBS}),
    ("POST /v1/completions", {"prompt": ["hi", "ho"]}),
    ("POST /v1/completions", {"prompt": "hi", **USAGE}),
    ("GET /v1/models", None),
    ("GET /info", None),
    ("GET /health", None),
    ("GET /metrics", None),
]
STORED = [
    "GET {prefix}/responses/{{response_id}}",
    "DELETE {prefix}/responses/{{response_id}}",
    "POST {prefix}/responses/{{response_id}}/cancel",
    "GET {prefix}/responses/{{response_id}}/input_items",
]
OWN_ANSWERS: list[tuple[str, dict[str, Any] | None]] = [
    ("GET /is_sleeping", None),
    ("POST /v1/completions", {"prompt": "hi", "logprobs": 2, "echo": True}),
    ("POST /v1/completions", {"prompt": "hi", "logprobs": 2, "stream": True}),
    ("POST /v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ("POST /v1/responses", {"input": "hi", "stream": True}),
    ("POST /chat/completions", {**CHAT, **USAGE}),
    ("POST /completions", {"prompt": "hi"}),
    ("POST /responses", {"input": "hi"}),
    ("POST /v1/responses/input_tokens", {"input": "hi"}),
    ("POST /responses/input_tokens", {"input": "hi"}),
    *((operation.format(prefix=prefix), None) for prefix in ("/v1", "") for operation in STORED),
    ("POST /v1/messages", {**CHAT, "model": "tgi", "max_tokens": 9}),
    ("POST /v1/messages", {**CHAT, "model": "tgi", "max_tokens": 9, "stream": True}),
    ("POST /messages", {**CHAT, "model": "tgi", "max_tokens": 0}),
    ("POST /v1/messages/count_tokens", {**CHAT, "model": "tgi"}),
    ("POST /messages/count_tokens", {**CHAT, "model": "tgi"}),
    ("GET /models", None),
    ("GET /models/{model}", None),
    ("POST /tokenize", {"prompt": "hi"}),
    ("POST /tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("POST /tokenize", {**CHAT, "return_token_strs": True}),
    ("POST /tokenize", {"content": "hi"}),
    ("POST /tokenize", {"content": "é", "with_pieces": True}),
    ("POST /detokenize", {"tokens": [9, 10]}),
    ("GET /version", None),
    *((f"GET /{name}", None) for name in ("server_info", "get_server_info")),
    *((f"GET /{name}", None) for name in ("model_info", "get_model_info", "v1/loads", "loads")),
    *((f"POST {prefix}/completions/render", {"prompt": "hi"}) for prefix in ("/v1", "")),
    *((f"POST {prefix}/chat/completions/render", CHAT) for prefix in ("/v1", "")),
    ("POST /ping", None),
    ("POST /vertex", {"instances": [{"inputs": "hi"}, CHAT]}),
    ("POST /v2/models/{model}/infer", {"inputs": [TENSOR]}),
    ("POST /v2/models/{model}/versions/{version}/infer", {"id": "1", "inputs": [TENSOR]}),
    ("GET /v2", None),
    ("GET /v2/health/live", None),
    ("GET /v2/health/ready", None),
    ("GET /v2/models/{model}", None),
    ("GET /v2/models/{model}/ready", None),
    ("GET /v2/models/{model}/versions/{version}", None),
    ("GET /v2/models/{model}/versions/{version}/ready", None),
    ("GET /v1/models/{model}", None),
    ("GET /", None),
    ("GET /ping", None),
    ("GET /docs", None),
    ("GET /api-doc/openapi.json", None),
    ("GET /web-ui/{name}", None),
]
NATIVE = ("POST /", "POST /generate", "POST /generate_stream", "POST /invocations")
BODY = {"inputs": "hi"}


@pytest.fixture(scope="module")
def tgi() -> contracts.Contract:
    return contracts.tgi()


@pytest.fixture
async def own(client: httpx.AsyncClient) -> contracts.Contract:
    return contracts.own((await client.get("/api-doc/openapi.json")).json())


async def call(
    client: httpx.AsyncClient, operation: str, body: dict[str, Any] | None
) -> httpx.Response:
    method, _, path = operation.partition(" ")
    names = {"model": "tgi", "version": "1", "name": "app.js"}
    if "{response_id}" in path:
        stored = await client.post("/v1/responses", json={"input": "hi", "background": True})
        names["response_id"] = stored.json()["id"]
    return await client.request(method, path.format(**names), json=body)


@pytest.mark.parametrize(("operation", "body"), ANSWERS)
async def test_answers_match_tgis_schemas(
    client: httpx.AsyncClient,
    tgi: contracts.Contract,
    own: contracts.Contract,
    operation: str,
    body: dict[str, Any] | None,
) -> None:
    answer = await call(client, operation, body)
    assert answer.status_code == 200
    tgi.check(operation, answer)
    own.check(operation, answer)


@pytest.mark.parametrize(("operation", "body"), OWN_ANSWERS)
async def test_answers_match_our_schemas(
    client: httpx.AsyncClient,
    own: contracts.Contract,
    operation: str,
    body: dict[str, Any] | None,
) -> None:
    answer = await call(client, operation, body)
    assert answer.status_code == 200
    own.check(operation, answer)


async def test_every_route_of_tgis_document_is_tested(tgi: contracts.Contract) -> None:
    assert set(tgi.responses) == {operation for operation, _ in ANSWERS}


async def test_every_route_of_our_document_is_tested(own: contracts.Contract) -> None:
    changing = {"POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"}
    refused = {"POST /v1/embeddings", "POST /embeddings"}
    # Of models with its tokens: test_infill.py; of servers that may sleep: test_sleep.py.
    elsewhere = {"POST /infill", "POST /sleep", "POST /wake_up"}
    held = {operation for operation, _ in ANSWERS + OWN_ANSWERS}
    assert set(own.responses) == held | changing | refused | elsewhere


@pytest.mark.parametrize("operation", NATIVE)
@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (FinishReason.ERROR, 424),
        (FinishReason.OVERLOADED, 429),
        (FinishReason.CANCELLED, 500),
        (None, 422),
    ],
)
async def test_errors_match_tgis_schemas(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tgi: contracts.Contract,
    own: contracts.Contract,
    operation: str,
    failure: FinishReason | None,
    status: int,
) -> None:
    body: dict[str, Any] = BODY
    if failure is None:
        body = {**BODY, "parameters": {"top_p": 1.0}}
    else:
        engine.failure, engine.failure_reason = "broken", failure
    answer = await call(client, operation, body)
    streamed = operation == "POST /generate_stream"
    assert answer.status_code == (200 if streamed else status)
    tgi.check(operation, answer)
    own.check(operation, answer)


@pytest.mark.parametrize(
    ("operation", "body"),
    [("POST /v1/chat/completions", CHAT), ("POST /v1/completions", {"prompt": "hi"})],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_v1_have_openais_form(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    own: contracts.Contract,
    operation: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    own.check(operation, await call(client, operation, {**body, "temperature": -1}))
    engine.failure, engine.fail_after = "broken", 1
    answer = await call(client, operation, {**body, "stream": stream})
    assert answer.status_code == (200 if stream else 500)
    own.check(operation, answer)


async def test_unhealthy_answer_matches_tgis(
    client: httpx.AsyncClient, engine: FakeEngine, tgi: contracts.Contract
) -> None:
    engine.is_healthy = False
    answer = await client.get("/health")
    assert answer.status_code == 503
    tgi.check("GET /health", answer)


class TestOverload:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"max_concurrent_requests": 1}

    @pytest.mark.parametrize("operation", NATIVE)
    async def test_overload_answer_matches_tgis(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        tgi: contracts.Contract,
        operation: str,
    ) -> None:
        engine.gate = asyncio.Semaphore(0)
        busy = asyncio.ensure_future(client.post("/generate", json=BODY))
        while not engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
        answer = await call(client, operation, BODY)
        assert answer.status_code == (200 if operation == "POST /generate_stream" else 429)
        tgi.check(operation, answer)
        for _ in range(20):
            engine.gate.release()
        await busy


@pytest.mark.parametrize(
    ("operation", "value"),
    [
        ("POST /generate", {"generated_text": None}),
        ("POST /generate", {"generated_text": "x", "details": {"finish_reason": "stop"}}),
        ("POST /tokenize", [{"id": 1, "text": "x"}]),
        ("POST /v1/chat/completions", {"id": "x", "choices": []}),
    ],
)
def test_contract_detects_violations(tgi: contracts.Contract, operation: str, value: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        tgi.validate(value, tgi.responses[operation]["200"]["application/json"])
