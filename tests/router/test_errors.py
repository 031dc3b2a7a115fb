"""Bodies, limits and codes of all errors."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tgi_cli.engine.messages import FinishReason
from tgi_cli.router.http.error_styles import OPENAI
from tgi_cli.router.state import RouterState

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
NATIVE = {"inputs": "hi"}
ROUTES = [("/generate", NATIVE), ("/v1/chat/completions", CHAT)]

VALIDATIONS = [
    ({"temperature": 0}, "`temperature` must be strictly positive"),
    ({"temperature": -1.0}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 63. Given: 0"),
    ({"truncate": 64}, "`truncate` must be strictly positive and less than 63. Given: 64"),
    ({"stop": ["a"] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ({"best_of": 0}, "`best_of` must be > 0 and <= 2. Given: 0"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 2, "top_k": 5, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    (
        {"grammar": {"type": "regex", "value": "a["}},
        "grammar is not valid: invalid regex at position 1: unclosed character class",
    ),
    (
        {"adapter_id": "x"},
        "`adapter_id` 'x' is not known: this server has no adapters (see --lora-adapters)",
    ),
    ({"seed": 1 << 64}, "`seed` must be an unsigned 64-bit number"),
    (
        {"max_new_tokens": 64},
        "`inputs` tokens + `max_new_tokens` must be <= 64. "
        "Given: 3 `inputs` tokens and 64 `max_new_tokens`",
    ),
]


@pytest.mark.parametrize(("parameters", "message"), VALIDATIONS)
async def test_invalid_parameters_are_422(
    client: httpx.AsyncClient, engine: FakeEngine, parameters: dict[str, Any], message: str
) -> None:
    body = {"inputs": "hi", "parameters": parameters}
    expected = {"error": f"Input validation error: {message}", "error_type": "validation"}
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 422
    assert answer.json() == expected
    if "best_of" not in parameters and "decoder_input_details" not in parameters:
        streamed = await client.post("/generate_stream", json=body)
        assert streamed.status_code == 200
        assert events(streamed.text) == [expected]
    assert engine.requests == []


async def test_streams_refuse_best_of_and_prefill(client: httpx.AsyncClient) -> None:
    for parameters, message in (
        ({"best_of": 2}, "`best_of` != 1 is not supported when streaming tokens"),
        (
            {"decoder_input_details": True},
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
    ):
        body = {"inputs": "hi", "parameters": parameters}
        found = events((await client.post("/generate_stream", json=body)).text)
        assert found[0]["error"] == f"Input validation error: {message}"


async def test_prompts_beyond_the_limits_are_422(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    answer = await client.post("/generate", json={"inputs": ""})
    assert answer.json()["error"] == "Input validation error: `inputs` cannot be empty"
    text = "x" * 63  # and the begin token: 64
    assert len(engine.tokenizer.encode(text)) == 64
    answer = await client.post("/generate", json={"inputs": text})
    assert answer.json()["error"] == (
        "Input validation error: `inputs` must have less than 63 tokens. Given: 64"
    )
    body = {"inputs": text[1:], "parameters": {"max_new_tokens": 1}}
    assert (await client.post("/generate", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"{", 400, "Failed to parse the request body as JSON"),
        (b'{"inputs": "\xff"}', 400, "Failed to parse"),
        (b'{"x": ' + b"[" * 100_000, 400, "Failed to parse"),
        (b'{"inputs": "\\ud800"}', 400, "Failed to parse"),
        (b"[]", 422, "Failed to deserialize the JSON body into the target type"),
        (b"{}", 422, "missing required field"),
        (b'{"inputs": 5}', 422, "Expected `str"),
        (b'{"inputs": "x", "parameters": null}', 422, "Failed to deserialize"),
        (b'{"inputs": "x", "parameters": {"details": null}}', 422, "Failed to deserialize"),
        (b'{"inputs": "x", "parameters": {"stop": "x"}}', 422, "Expected `array`"),
        (b'{"inputs": "x", "parameters": {"top_k": "5"}}', 422, "Failed to deserialize"),
        (b'{"inputs": "x", "parameters": {"max_new_tokens": -1}}', 422, "Failed to deserialize"),
    ],
)
@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/"])
async def test_wrong_bodies_are_plain_text_errors(
    client: httpx.AsyncClient, route: str, content: bytes, status: int, words: str
) -> None:
    answer = await client.post(route, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith("text/plain")
    assert words in answer.text


@pytest.mark.parametrize(
    ("content", "status"), [(b"{", 400), (b"{}", 400), (b'{"messages": [1]}', 400)]
)
async def test_wrong_bodies_on_v1_have_openais_form(
    client: httpx.AsyncClient, content: bytes, status: int
) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    answer = await client.post("/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("route", "body"), ROUTES)
@pytest.mark.parametrize("content_type", [None, "text/plain", "application/jsonx"])
async def test_other_content_types_are_415(
    client: httpx.AsyncClient, route: str, body: dict, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    answer = await client.post(route, content=b"{}", headers=headers)
    assert answer.status_code == 415
    assert "Content-Type: application/json" in answer.text


class TestPayloadLimit:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"payload_limit": 1000}

    @pytest.mark.parametrize(("route", "body"), ROUTES)
    async def test_large_bodies_are_413(
        self, client: httpx.AsyncClient, route: str, body: dict
    ) -> None:
        for extra in ({"x": "y" * 1000}, {"x": "y"}):
            answer = await client.post(route, json={**body, **extra})
            assert answer.status_code == (413 if len(extra["x"]) > 1 else 200)

    async def test_large_chunked_bodies_are_413(self, client: httpx.AsyncClient) -> None:
        async def chunks() -> Any:
            for _ in range(20):
                yield b" " * 100

        headers = {"content-type": "application/json"}
        answer = await client.post("/generate", content=chunks(), headers=headers)
        assert answer.status_code == 413


async def test_unknown_routes_are_404_and_methods_405(client: httpx.AsyncClient) -> None:
    answer = await client.get("/nothing")
    assert answer.status_code == 404
    assert answer.json() == {"error": "Not Found: GET /nothing", "error_type": "not_found"}
    answer = await client.get("/v1/nothing")
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    answer = await client.get("/generate")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"] == "Method Not Allowed: GET /generate: use POST"
    assert (await client.post("/generate/", json=NATIVE)).status_code == 404


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        # The client's base URL ends with a route, a slash or one /v1 too many.
        ("/v1/v1/chat/completions", "use /v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "use /v1/chat/completions"),
        ("/api/v1/chat/completions", "use /v1/chat/completions"),
        ("/v1/chat/completions/", "use /v1/chat/completions"),
        ("/v1/messages/v1/messages", "use /v1/messages"),
        ("/v1/generate", "use /generate"),
        ("/v1", "as /v1/models"),
        # A letter is missing.
        ("/v1/chat/completion", "use /v1/chat/completions"),
        ("/generate_steam", "use /generate_stream"),
        # Other servers' routes.
        ("/api/chat", "Ollama's API is not served"),
        ("/api/generate", "Ollama's API is not served"),
        ("/completion", "use /v1/completions"),
        ("/v1/rerank", "the model generates text"),
        ("/v1/audio/transcriptions", "the model generates text"),
    ],
)
async def test_unknown_routes_name_what_to_request_instead(
    client: httpx.AsyncClient, path: str, hint: str
) -> None:
    answer = await client.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    message = error["message"] if isinstance(error, dict) else error
    assert message.startswith(f"Not Found: POST {path}: ")
    assert hint in message


async def test_a_long_unknown_path_is_not_searched(client: httpx.AsyncClient) -> None:
    path = "/a" * 5000 + "/generate"
    answer = await client.post(path, json={})
    assert answer.json()["error"] == f"Not Found: POST {path}"


class TestOverload:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"max_concurrent_requests": 2}

    async def test_requests_beyond_the_limit_are_429(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState
    ) -> None:
        engine.gate = asyncio.Semaphore(0)
        busy = [asyncio.ensure_future(client.post("/generate", json=NATIVE)) for _ in range(2)]
        while len(engine.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        answer = await client.post("/generate", json=NATIVE)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
        streamed = await client.post("/generate_stream", json=NATIVE)
        assert events(streamed.text) == [answer.json()]
        for stream in (False, True):
            found = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
            assert found.status_code == 429
            assert found.json()["error"]["code"] == "rate_limit_exceeded"
            assert "retry-after" in found.headers
        for _ in range(40):
            engine.gate.release()
        assert [(await task).status_code for task in busy] == [200, 200]
        engine.gate = None
        assert (await client.post("/generate", json=NATIVE)).status_code == 200
        assert state.admission.in_flight == 0

    @pytest.mark.parametrize(
        ("route", "body"),
        [
            ("/v1/completions", {"prompt": ["a", "b"]}),
            ("/v1/completions", {"prompt": "a", "n": 2}),
            ("/v1/completions", {"prompt": "a", "best_of": 2}),
            ("/v1/chat/completions", CHAT | {"n": 2}),
            ("/generate", NATIVE | {"parameters": {"best_of": 2, "do_sample": True}}),
        ],
    )
    async def test_every_sequence_counts_toward_the_limit(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        state: RouterState,
        route: str,
        body: dict,
    ) -> None:
        state.admission.enter()
        assert (await client.post(route, json=body)).status_code == 429
        assert engine.requests == []
        state.admission.leave()
        assert (await client.post(route, json=body)).status_code == 200
        assert state.admission.in_flight == 0

    async def test_request_larger_than_the_limit_is_422(self, client: httpx.AsyncClient) -> None:
        """Waiting would not help."""
        answer = await client.post("/v1/chat/completions", json=CHAT | {"n": 3})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"
        assert "3 sequences in one request" in answer.json()["error"]["message"]


class TestEngine:
    async def test_lost_engine_is_503_before_generating(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState
    ) -> None:
        engine.connected = False
        text = "the model server is gone"
        answer = await client.post("/generate", json=NATIVE)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert answer.json() == {"error": text, "error_type": "generation"}
        streamed = await client.post("/generate_stream", json=NATIVE)
        assert (streamed.status_code, streamed.json()) == (503, answer.json())
        found = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert found.status_code == 503
        assert int(found.headers["retry-after"]) > 0
        assert found.json()["error"]["message"] == text
        assert (await client.get("/health")).status_code == 503
        assert state.admission.in_flight == 0

    async def test_lost_engine_is_424_while_generating(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState
    ) -> None:
        engine.failure, engine.fail_after = "the model server is gone", 2
        text = "Request failed during generation: the model server is gone"
        assert (await client.post("/generate", json=NATIVE)).status_code == 424
        *tokens, error = events((await client.post("/generate_stream", json=NATIVE)).text)
        assert len(tokens) == 2
        assert error == {"error": text, "error_type": "generation"}
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        *_, error, done = events(answer.text)
        assert done == "[DONE]"
        assert error["error"]["message"] == text
        assert error["error_type"] == "generation"
        assert state.admission.in_flight == 0

    @pytest.mark.parametrize(
        ("reason", "status", "error_type"),
        [
            (FinishReason.OVERLOADED, 429, "overloaded"),
            (FinishReason.TIMEOUT, 504, "timeout"),
            (FinishReason.CANCELLED, 500, "incomplete_generation"),
            (FinishReason.GRAMMAR, 424, "generation"),  # of a request that has none
        ],
    )
    async def test_other_finish_reasons_have_their_errors(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        reason: FinishReason,
        status: int,
        error_type: str,
    ) -> None:
        engine.failure, engine.failure_reason = "no", reason
        answer = await client.post("/generate", json=NATIVE)
        assert (answer.status_code, answer.json()["error_type"]) == (status, error_type)
        assert ("retry-after" in answer.headers) == (status == 429)
        native = events((await client.post("/generate_stream", json=NATIVE)).text)
        assert [event["error_type"] for event in native] == [error_type]
        found = await client.post("/v1/chat/completions", json=CHAT)
        reported = OPENAI.statuses.get(status, status)
        assert (found.status_code, found.json()["error_type"]) == (reported, error_type)
        *_, error, done = events(
            (await client.post("/v1/chat/completions", json={**CHAT, "stream": True})).text
        )
        assert (error["error_type"], done) == (error_type, "[DONE]")

    async def test_missing_finish_is_an_incomplete_generation(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.play([])
        answer = await client.post("/generate", json=NATIVE)
        assert answer.status_code == 500
        assert answer.json() == {
            "error": "Incomplete generation",
            "error_type": "incomplete_generation",
        }


@pytest.mark.parametrize(("route", "body"), [*ROUTES, ("/generate_stream", NATIVE)])
async def test_unexpected_exception_is_a_500_with_a_body(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def broken(self: Any, token_id: int) -> None:
        raise KeyError("defect")

    monkeypatch.setattr("tgi_cli.text.sequence_text.SequenceText.push", broken)
    answer = await client.post(route, json=body)
    if route == "/generate_stream":
        assert events(answer.text) == [{"error": "Internal server error", "error_type": "internal"}]
    else:
        assert answer.status_code == 500
        assert answer.json()["error_type"] == "internal"
        assert "defect" not in answer.text


class TestDraining:
    async def test_draining_router_refuses_with_503(
        self, client: httpx.AsyncClient, state: RouterState
    ) -> None:
        state.admission.drain()
        for route, body in (*ROUTES, ("/generate_stream", NATIVE)):
            answer = await client.post(route, json=body)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/metrics")).status_code == 200

    async def test_requests_in_flight_complete_while_draining(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState
    ) -> None:
        engine.gate = asyncio.Semaphore(0)
        busy = asyncio.ensure_future(client.post("/generate", json=NATIVE))
        while not engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
        state.admission.drain()
        idle = asyncio.ensure_future(state.admission.idle())
        await asyncio.sleep(0)
        assert not idle.done()
        for _ in range(20):
            engine.gate.release()
        assert (await busy).json() == {"generated_text": "hello world"}
        await asyncio.wait_for(idle, 60)

    async def test_aborted_requests_get_an_error(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState
    ) -> None:
        engine.gate = asyncio.Semaphore(1)
        busy = asyncio.ensure_future(client.post("/generate_stream", json=NATIVE))
        while not state.generator.live:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        state.generator.abort("the server is shutting down")
        *_, error = events((await busy).text)
        assert error["error_type"] == "generation"
        assert "shutting down" in error["error"]
        assert state.admission.in_flight == 0
