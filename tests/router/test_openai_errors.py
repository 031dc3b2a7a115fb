"""Errors of OpenAI's routes are what OpenAI's clients catch; TGI's routes keep TGI's.

The client is the real one (https://github.com/openai/openai-python), which chooses the class of
an exception by the status, and fills ``code``, ``param`` and ``type`` from the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.router import contracts
from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tgi_cli.engine.messages import FinishReason
from tgi_cli.router.http.body_errors import describe
from tgi_cli.router.state import RouterState

USER: Any = [{"role": "user", "content": "hi"}]
LONG = "the quick brown fox jumps over the lazy dog " * 10
"""More tokens than the 64 of the engine's context."""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
LONG_BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": LONG}]}, "messages"),
    "/v1/completions": ({"prompt": LONG}, "prompt"),
    "/v1/responses": ({"input": LONG}, "input"),
}
ALIASES = [path for route in BODIES for path in (route, route.removeprefix("/v1"))]


@pytest.fixture
async def ai(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture
async def own(client: httpx.AsyncClient) -> contracts.Contract:
    return contracts.own((await client.get("/api-doc/openapi.json")).json())


def error_of(answer: httpx.Response) -> tuple[int, str, str | None, str | None]:
    """Status, type, parameter and code; and the body has the form."""
    found = answer.json()
    assert set(found) == {"error", "error_type"}
    error = found["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Input validation error" not in error["message"]
    return answer.status_code, error["type"], error["param"], error["code"]


class TestContextLength:
    @pytest.mark.parametrize("route", LONG_BODIES)
    @pytest.mark.parametrize("stream", [False, True])
    async def test_too_long_prompt_is_context_length_exceeded(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str, stream: bool
    ) -> None:
        body, param = LONG_BODIES[route]
        answer = await client.post(route, json={**body, "stream": stream})
        expected = (400, "invalid_request_error", param, "context_length_exceeded")
        assert error_of(answer) == expected
        source = "messages" if param == "input" else param
        words = answer.json()["error"]["message"]
        assert words.startswith(
            f"This model's maximum context length is 64 tokens. However, your {source} resulted in "
        )
        assert words.endswith(f" tokens. Please reduce the length of the {source}.")
        assert engine.requests == []

    async def test_prompt_of_the_whole_context_is_context_length_exceeded(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        text = "x" * 63
        assert len(engine.tokenizer.encode(text)) == 64
        answer = await client.post("/v1/completions", json={"prompt": text})
        assert error_of(answer)[3] == "context_length_exceeded"
        assert answer.json()["error"]["message"] == (
            "This model's maximum context length is 64 tokens, 63 of them for the prompt. However, "
            "your prompt resulted in 64 tokens. Please reduce the length of the prompt."
        )

    async def test_too_long_answer_is_context_length_exceeded(
        self, client: httpx.AsyncClient
    ) -> None:
        answer = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 64})
        assert error_of(answer) == (
            400,
            "invalid_request_error",
            "prompt",
            "context_length_exceeded",
        )
        assert answer.json()["error"]["message"] == (
            "This model's maximum context length is 64 tokens. However, you requested 67 tokens "
            "(3 in the prompt, 64 in the completion). Please reduce the length of the prompt or of "
            "the completion."
        )

    async def test_empty_prompt_is_refused(self, client: httpx.AsyncClient) -> None:
        for prompt in ("", [], ["hi", ""]):
            answer = await client.post("/v1/completions", json={"prompt": prompt})
            assert error_of(answer) == (400, "invalid_request_error", "prompt", "invalid_value")
            assert answer.json()["error"]["message"] == "`prompt` cannot be empty"

    async def test_tgi_routes_have_tgis_messages(self, client: httpx.AsyncClient) -> None:
        for route in ("/generate", "/", "/invocations"):
            answer = await client.post(route, json={"inputs": LONG})
            assert answer.status_code == 422
            assert answer.json()["error_type"] == "validation"
            assert answer.json()["error"].startswith(
                "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 64. Given: "
            )
        long = {"messages": [{"role": "user", "content": LONG}]}
        for route, body in (("/invocations", long), ("/vertex", {"instances": [long]})):
            answer = await client.post(route, json=body)
            assert answer.status_code == 422
            assert set(answer.json()) == {"error", "error_type"}


WRONG = [
    ("/v1/chat/completions", {}, "messages", "missing_required_parameter"),
    ("/v1/completions", {}, "prompt", "missing_required_parameter"),
    ("/v1/responses", {}, "input", "missing_required_parameter"),
    (
        "/v1/chat/completions",
        {"messages": [{"content": "x"}]},
        "messages[0].role",
        "missing_required_parameter",
    ),
    (
        "/v1/chat/completions",
        {"messages": [*USER, {"role": "user", "content": 5}]},
        "messages[1].content",
        "invalid_type",
    ),
    ("/v1/chat/completions", {"messages": USER, "n": "2"}, "n", "invalid_type"),
    ("/v1/completions", {"prompt": 5}, "prompt", "invalid_type"),
    ("/v1/completions", {"prompt": [None]}, "prompt", "invalid_type"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"5": "a"}}, "logit_bias", "invalid_type"),
    ("/v1/completions", {"prompt": "x", "stop": [1]}, "stop[0]", "invalid_type"),
    (
        "/v1/chat/completions",
        {"messages": USER, "stream_options": {"include_usage": "yes"}},
        "stream_options.include_usage",
        "invalid_type",
    ),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix", "unsupported_parameter"),
    (
        "/v1/chat/completions",
        {"messages": USER, "functions": [{"name": "f"}]},
        "functions",
        "unsupported_parameter",
    ),
    (
        "/v1/chat/completions",
        {"messages": USER, "modalities": ["audio"]},
        "modalities",
        "unsupported_value",
    ),
    ("/v1/responses", {"input": "x", "truncation": "auto"}, "truncation", "unsupported_value"),
    ("/v1/responses", {"input": "x", "max_tokens": 5}, "max_tokens", "unsupported_parameter"),
    (
        "/v1/completions",
        {"prompt": "x", "stop": "x" * 1025},
        "stop",
        "string_above_max_length",
    ),
    (
        "/v1/completions",
        {"prompt": "x", "stop_token_ids": [1 << 40]},
        "stop_token_ids[0]",
        "integer_above_max_value",
    ),
    ("/v1/chat/completions", {"messages": USER, "temperature": -1}, "temperature", "invalid_value"),
    ("/v1/chat/completions", {"messages": []}, "messages", "invalid_value"),
    ("/v1/responses", {"input": []}, "input", "invalid_value"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ("/v1/completions", {"prompt": ["x"] * 33}, "prompt", "array_above_max_length"),
]


@pytest.mark.parametrize(("route", "body", "param", "code"), WRONG)
@pytest.mark.parametrize("alias", [False, True])
async def test_errors_name_the_parameter_and_code(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    own: contracts.Contract,
    route: str,
    body: dict[str, Any],
    param: str,
    code: str,
    alias: bool,
) -> None:
    route = route.removeprefix("/v1") if alias else route
    answer = await client.post(route, json=body)
    assert error_of(answer) == (400, "invalid_request_error", param, code)
    assert answer.headers["content-type"] == "application/json"
    own.check(f"POST {route}", answer)
    assert engine.requests == []


async def test_no_route_of_openai_answers_422_or_424(client: httpx.AsyncClient) -> None:
    """The document, which answers are compared with, has TGI's statuses for TGI's routes alone."""
    paths = (await client.get("/api-doc/openapi.json")).json()["paths"]
    found = {
        path: {"422", "424"} & responses.keys()
        for path, methods in paths.items()
        for method, operation in methods.items()
        if method == "post" and (responses := operation["responses"]).keys() & {"400", "422"}
    }
    own = {path for path in found if path.startswith("/v1/") or f"/v1{path}" in paths}
    assert set(ALIASES) < own | {"/detokenize", "/infill"} <= found.keys()
    assert not [path for path in own | {"/detokenize", "/infill"} if found[path]]
    assert found["/generate"] == found["/"] == {"422", "424"}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"),
    ],
)
@pytest.mark.parametrize("route", ["/v1/responses", "/responses"])
async def test_errors_use_the_names_of_the_route(
    client: httpx.AsyncClient, route: str, body: dict[str, Any], name: str
) -> None:
    """A response is read as a chat, whose parameters have other names."""
    answer = await client.post(route, json=body)
    assert error_of(answer)[2] == name
    assert f"`{name}`" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ("Expected `object`, got `array`", (None, "invalid_type")),
        ("Expected `str` of length <= 5 - at `$.stop[0]`", ("stop[0]", "string_above_max_length")),
        ("Expected `array` of length <= 5 - at `$.stop`", ("stop", "array_above_max_length")),
        ("Expected `array` of length >= 1 - at `$.a`", ("a", "array_below_min_length")),
        ("Expected `object` of length <= 2 - at `$.a[...]`", ("a", "object_above_max_properties")),
        ("Expected `int` <= 20 - at `$.n`", ("n", "integer_above_max_value")),
        ("Expected `int` >= 0 - at `$.n`", ("n", "integer_below_min_value")),
        ("Expected `float` < 2.0 - at `$.n`", ("n", "decimal_above_max_value")),
        ("Expected `float` > 0.0 - at `$.n`", ("n", "decimal_below_min_value")),
        ("Invalid enum value 'x' - at `$.a`", ("a", "invalid_value")),
        ("Number out of range - at `$.a.b`", ("a.b", "invalid_value")),
        ("Expected `int`, got `str` - at `key` in `$.m`", ("m", "invalid_type")),
        ("Expected `int`, got `str` - at `$[0]`", ("[0]", "invalid_type")),
    ],
)
def test_messages_of_msgspec_are_translated(cause: str, expected: tuple[str | None, str]) -> None:
    message, *found = describe(cause)
    assert tuple(found) == expected
    assert "$" not in message


@pytest.mark.parametrize("route", ALIASES)
async def test_invalid_json_is_400(
    client: httpx.AsyncClient, own: contracts.Contract, route: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = await client.post(route, content=b"{", headers=headers)
    assert error_of(answer) == (400, "invalid_request_error", None, None)
    answer = await client.post(route, content=b"[]", headers=headers)
    assert error_of(answer) == (400, "invalid_request_error", None, "invalid_type")
    answer = await client.post(route, content=b"{}", headers={"content-type": "text/plain"})
    assert error_of(answer) == (415, "invalid_request_error", None, None)
    own.check(f"POST {route}", answer)


async def test_unknown_paths_and_methods_have_openais_form(client: httpx.AsyncClient) -> None:
    for path in ("/v1", "/v1/", "/v1/nothing", "/v1/chat/completion", "/v1/completions/"):
        assert error_of(await client.post(path, json={})) == (
            404, "invalid_request_error", None, "unknown_url",
        )  # fmt: skip
    for path in (*ALIASES, "/detokenize", "/embeddings"):
        answer = await client.get(path)
        assert error_of(answer) == (405, "invalid_request_error", None, "method_not_supported")
        assert answer.headers["allow"] == "POST"
    for path in ("/v1/models/other", "/models/other"):
        answer = await client.get(path)
        assert error_of(answer) == (404, "invalid_request_error", "model", "model_not_found")
    for path in ("/nothing", "/chat", "/v2/nothing", "/v10"):
        answer = await client.post(path, json={})
        assert (answer.status_code, answer.json()["error_type"]) == (404, "not_found")
        assert set(answer.json()) == {"error", "error_type"}


class TestGeneration:
    """What is the server's fault is tried again by the clients; what is the request's is not."""

    @pytest.mark.parametrize("route", ALIASES)
    @pytest.mark.parametrize(
        ("reason", "expected"),
        [
            (FinishReason.ERROR, (500, "server_error", None, None)),
            (FinishReason.CANCELLED, (500, "server_error", None, None)),
            (FinishReason.TIMEOUT, (504, "server_error", None, "timeout")),
            (FinishReason.OVERLOADED, (429, "requests", None, "rate_limit_exceeded")),
        ],
    )
    async def test_engine_failures_are_500(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        own: contracts.Contract,
        route: str,
        reason: FinishReason,
        expected: tuple[int, str, str | None, str | None],
    ) -> None:
        engine.failure, engine.failure_reason = "broken", reason
        body = BODIES[route if route in BODIES else f"/v1{route}"]
        answer = await client.post(route, json=body)
        assert error_of(answer) == expected
        own.check(f"POST {route}", answer)
        if answer.status_code == 429:
            seconds = answer.headers["retry-after"]
            assert f"try again in {seconds}s" in answer.json()["error"]["message"]
        streamed = events((await client.post(route, json={**body, "stream": True})).text)
        if "responses" in route:
            error = streamed[-1]["response"]["error"]
            assert streamed[-1]["type"] == "response.failed"
            limited = reason is FinishReason.OVERLOADED
            assert error["code"] == ("rate_limit_exceeded" if limited else "server_error")
            assert error["message"] == answer.json()["error"]["message"]
        else:
            assert streamed[-1] == "[DONE]"
            assert streamed[-2] == answer.json()

    async def test_engine_failures_are_424_on_tgi_routes(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.failure = "broken"
        for route, body in (
            ("/generate", {"inputs": "hi"}),
            ("/invocations", {"messages": USER}),
            ("/vertex", {"instances": [{"inputs": "hi"}]}),
        ):
            answer = await client.post(route, json=body)
            assert answer.status_code == 424
            assert answer.json() == {
                "error": "Request failed during generation: broken",
                "error_type": "generation",
            }

    async def test_lost_engine_is_503(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.connected = False
        for route in ALIASES:
            body = BODIES[route if route in BODIES else f"/v1{route}"]
            for stream in (False, True):
                answer = await client.post(route, json={**body, "stream": stream})
                assert error_of(answer) == (503, "server_error", None, "service_unavailable")
                assert int(answer.headers["retry-after"]) > 0

    async def test_draining_is_503(self, client: httpx.AsyncClient, state: RouterState) -> None:
        state.admission.drain()
        answer = await client.post("/v1/completions", json=BODIES["/v1/completions"])
        assert error_of(answer) == (503, "server_error", None, "service_unavailable")


class TestSmallPayload:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"payload_limit": 100}

    @pytest.mark.parametrize("route", ALIASES)
    async def test_large_bodies_are_413(self, client: httpx.AsyncClient, route: str) -> None:
        answer = await client.post(route, json={"x": "y" * 200})
        assert error_of(answer) == (413, "invalid_request_error", None, None)


class TestKey:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_key": "s3cret"}

    @pytest.mark.parametrize(
        "path", [*ALIASES, "/v1/nothing", "/v1/models", "/models", "/embeddings", "/detokenize"]
    )
    async def test_missing_key_is_401(self, client: httpx.AsyncClient, path: str) -> None:
        answer = await client.post(path, json={})
        assert error_of(answer) == (401, "invalid_request_error", None, "invalid_api_key")

    async def test_tgi_routes_have_tgis_form(self, client: httpx.AsyncClient) -> None:
        for path in ("/generate", "/tokenize", "/nothing", "/invocations"):
            assert set((await client.post(path, json={})).json()) == {"error", "error_type"}


class TestVertexUnderV1:
    """Vertex AI's own choice of paths begins with /v1, and its errors are TGI's."""

    PREDICT = "/v1/endpoints/1/deployedModels/2:predict"

    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AIP_PREDICT_ROUTE", self.PREDICT)
        monkeypatch.setenv("AIP_HEALTH_ROUTE", "/v1/endpoints/1/deployedModels/2")

    @pytest.fixture(params=[None, "s3cret"])
    def settings(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        return {"api_key": request.param} if request.param else {}

    async def test_vertex_routes_have_tgis_form(
        self, client: httpx.AsyncClient, engine: FakeEngine, settings: dict[str, Any]
    ) -> None:
        answer = await client.post(self.PREDICT, json={"instances": []})
        assert answer.status_code == (401 if settings else 422)
        assert set(answer.json()) == {"error", "error_type"}
        headers = {"authorization": "Bearer s3cret"} if settings else {}
        document = (await client.get("/api-doc/openapi.json", headers=headers)).json()
        reported = document["paths"][self.PREDICT]["post"]["responses"]
        assert {"422", "424"} <= set(reported)
        engine.is_healthy = False
        answer = await client.get("/v1/endpoints/1/deployedModels/2")
        assert (answer.status_code, answer.json()["error_type"]) == (503, "healthcheck")


class TestClient:
    """The class that is raised, and what it holds."""

    async def test_client_raises_bad_request_for_context_length(
        self, ai: openai.AsyncOpenAI
    ) -> None:
        long: Any = [{"role": "user", "content": LONG}]
        calls = [
            ai.chat.completions.create(model="tgi", messages=long),
            ai.chat.completions.create(model="tgi", messages=long, stream=True),
            ai.completions.create(model="tgi", prompt=LONG),
            ai.responses.create(model="tgi", input=LONG),
            ai.responses.create(model="tgi", input=LONG, stream=True),
        ]
        for call in calls:
            with pytest.raises(openai.BadRequestError, match="maximum context length is") as caught:
                await call
            assert caught.value.code == "context_length_exceeded"
            assert caught.value.type == "invalid_request_error"
            assert caught.value.param in ("messages", "prompt", "input")

    async def test_client_raises_bad_request_for_parameters(self, ai: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await ai.chat.completions.create(model="tgi", messages=USER, temperature=-1)
        assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.BadRequestError) as caught:
            await ai.completions.create(model="tgi", prompt="x", suffix="y")
        assert (caught.value.param, caught.value.code) == ("suffix", "unsupported_parameter")

    async def test_client_raises_bad_request_for_embeddings(self, ai: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="makes no embeddings") as caught:
            await ai.embeddings.create(model="tgi", input="x")
        assert caught.value.param == "model"

    async def test_client_raises_not_found_for_models(self, ai: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            await ai.models.retrieve("other")
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")

    async def test_client_retries_failed_generations(self, url: str, engine: FakeEngine) -> None:
        engine.failure, engine.fails = "broken", {1}
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=1) as client:
            answer = await client.completions.create(model="tgi", prompt="x")
        assert answer.choices[0].text == "hello world"
        assert len(engine.requests) == 2
        engine.fails = set()
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(model="tgi", prompt="x")
        assert (caught.value.status_code, caught.value.type) == (500, "server_error")

    async def test_client_raises_rate_limit_error(
        self, ai: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.failure, engine.failure_reason = "no", FinishReason.OVERLOADED
        with pytest.raises(openai.RateLimitError) as caught:
            await ai.completions.create(model="tgi", prompt="x")
        assert (caught.value.type, caught.value.code) == ("requests", "rate_limit_exceeded")

    async def test_client_raises_errors_within_a_stream(
        self, ai: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.failure, engine.fail_after = "broken", 2
        stream = await ai.chat.completions.create(model="tgi", messages=USER, stream=True)
        with pytest.raises(openai.APIError) as caught:
            _ = [chunk async for chunk in stream]
        assert caught.value.type == "server_error"
        answer = await ai.responses.create(model="tgi", input="hi", stream=True)
        *_, last = [event async for event in answer]
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.code == "server_error"

    async def test_errors_without_v1_have_openais_form(self, url: str) -> None:
        """A base URL that lacks /v1 is a common mistake, and works."""
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            chat = await client.chat.completions.create(model="tgi", messages=USER)
            assert chat.choices[0].message.content == "hello world"
            assert (await client.completions.create(model="tgi", prompt="x")).choices[0].text
            assert (await client.responses.create(model="tgi", input="x")).output_text
            assert [model.id async for model in client.models.list()] == ["acme/tiny"]
            assert (await client.models.retrieve("acme/tiny")).id == "acme/tiny"
            with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
                await client.embeddings.create(model="tgi", input="x")
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="tgi", prompt=LONG)
            assert caught.value.code == "context_length_exceeded"


async def test_missing_body_is_408(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tgi_cli.router.http.bodies.body_seconds", lambda limit: 0.01)

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)

    headers = {"content-type": "application/json"}
    for route in ALIASES:
        answer = await client.post(route, content=slow(), headers=headers)
        assert error_of(answer) == (408, "invalid_request_error", None, None)
