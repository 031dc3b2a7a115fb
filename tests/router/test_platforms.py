"""The routes of hosting platforms: SageMaker, Vertex AI, KServe."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

import tgi_cli
from tests.router.fakes import FakeEngine
from tests.router.sse import events
from tests.router.test_tgi import HEADERS_WHOLE
from tgi_cli.errors import ConfigError
from tgi_cli.router.api.vertex import environment_routes
from tgi_cli.router.app import create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.state import RouterState
from tgi_cli.text.bundle import TextBundle

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


def tensor(*data: Any, name: str = "text_input") -> dict[str, Any]:
    return {"name": name, "shape": [len(data)], "datatype": "BYTES", "data": [*data]}


class TestSageMaker:
    async def test_prompt_is_answered_as_by_the_root(self, client: httpx.AsyncClient) -> None:
        answer = await client.post("/invocations", json={"inputs": "Say: "})
        assert answer.json() == [{"generated_text": "Say: hello world"}]
        assert set(answer.headers) >= HEADERS_WHOLE

    async def test_prompt_can_be_streamed(self, client: httpx.AsyncClient) -> None:
        answer = await client.post("/invocations", json={"inputs": "hi", "stream": True})
        assert answer.headers["content-type"] == "text/event-stream"
        assert events(answer.text)[-1]["generated_text"] == "hihello world"

    @pytest.mark.parametrize(
        ("body", "kind"),
        [(CHAT, "chat.completion"), ({"prompt": "hi"}, "text_completion")],
    )
    async def test_openais_bodies_are_answered(
        self, client: httpx.AsyncClient, body: dict[str, Any], kind: str
    ) -> None:
        assert (await client.post("/invocations", json=body)).json()["object"] == kind
        streamed = await client.post("/invocations", json={**body, "stream": True})
        *chunks, done = events(streamed.text)
        assert done == "[DONE]"
        assert all(chunk["object"].startswith(kind) for chunk in chunks)

    async def test_inputs_precedes_messages_and_messages_precedes_prompt(
        self, client: httpx.AsyncClient
    ) -> None:
        answer = await client.post("/invocations", json={"prompt": "x", "inputs": "y", **CHAT})
        assert isinstance(answer.json(), list)
        answer = await client.post("/invocations", json={"prompt": "x", **CHAT})
        assert answer.json()["object"] == "chat.completion"

    @pytest.mark.parametrize(
        ("content", "status", "words"),
        [
            (b"{", 400, "Failed to parse"),
            (b"{}", 422, "misses `inputs`, `messages` and `prompt`"),
            (b'{"inputs": 5}', 422, "Expected `str"),
            (b'{"messages": 5}', 422, "Expected `array`"),
        ],
    )
    async def test_other_bodies_are_refused(
        self, client: httpx.AsyncClient, content: bytes, status: int, words: str
    ) -> None:
        headers = {"content-type": "application/json"}
        answer = await client.post("/invocations", content=content, headers=headers)
        assert answer.status_code == status
        assert words in answer.text

    async def test_errors_have_tgis_form(self, client: httpx.AsyncClient) -> None:
        answer = await client.post("/invocations", json={**CHAT, "max_tokens": 0})
        assert answer.status_code == 422
        assert set(answer.json()) == {"error", "error_type"}

    async def test_body_is_bounded(self, client: httpx.AsyncClient) -> None:
        answer = await client.post("/invocations", json={"inputs": "x" * 2_000_001})
        assert answer.status_code == 413


class TestVertex:
    async def test_prompts_and_conversations_together(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.reply_with("one", "two", "three")
        body = {"instances": [{"inputs": "a"}, CHAT, {"inputs": "b", "parameters": None}]}
        answer = await client.post("/vertex", json=body)
        assert answer.json() == {"predictions": ["one", "two", "three"]}
        assert answer.headers["x-generated-tokens"].isdigit()
        prompt = engine.tokenizer.encode("a")
        assert list(engine.requests[0].prompt_ids) == prompt
        assert len(engine.requests[1].prompt_ids) > len(prompt)

    async def test_parameters_are_tgis_and_sample_by_default(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """Samples by default, as TGI on Vertex."""
        parameters = [
            {},
            {"max_new_tokens": 2, "seed": 9},
            {"do_sample": False, "return_full_text": True},
            {"best_of": 2},
        ]
        body = {"instances": [{"inputs": "x", "parameters": given} for given in parameters]}
        answer = await client.post("/vertex", json=body)
        assert len(answer.json()["predictions"]) == 4
        assert answer.json()["predictions"][2] == "xhello world"
        assert [request.sampling.greedy for request in engine.requests] == [
            False, False, True, False, False,
        ]  # fmt: skip
        assert engine.requests[1].max_new_tokens == 2
        assert engine.requests[1].sampling.seed == 9

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ({"instances": []}, "`instances` cannot be empty"),
            ({}, "missing required field `instances`"),
            ({"instances": [{"inputs": "x"}, {"x": 1}]}, "in instances[1]"),
            ({"instances": [{"inputs": 5}]}, "instances[0]"),
            ({"instances": ["x"]}, "instances[0]"),
            ({"instances": [{"inputs": "x", "parameters": {"top_p": 2}}]}, "`top_p`"),
            ({"instances": [CHAT, IMAGE]}, "content of type `image_url` is not supported"),
        ],
    )
    async def test_invalid_requests_are_refused(
        self, client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], words: str
    ) -> None:
        answer = await client.post("/vertex", json=body)
        assert answer.status_code == 422
        assert words in answer.text
        assert engine.requests == []

    async def test_one_that_fails_ends_all(
        self, client: httpx.AsyncClient, engine: FakeEngine, state: RouterState
    ) -> None:
        engine.failure, engine.fails = "broken", {2}
        body = {"instances": [{"inputs": "a"}, {"inputs": "b"}]}
        answer = await client.post("/vertex", json=body)
        assert answer.status_code == 424
        assert answer.json()["error_type"] == "generation"
        assert state.admission.in_flight == 0

    async def test_invalid_timeout_is_counted_as_a_failure(
        self, client: httpx.AsyncClient, state: RouterState
    ) -> None:
        headers = {"x-request-timeout": "soon"}
        body = {"instances": [{"inputs": "a"}]}
        assert (await client.post("/vertex", json=body, headers=headers)).status_code == 422
        assert state.metrics.failures.counts["validation"] == 1


class TestVertexEnvironment:
    @pytest.fixture
    async def client(
        self,
        engine: FakeEngine,
        text: TextBundle,
        config: RouterConfig,
        monkeypatch: pytest.MonkeyPatch,
    ) -> AsyncIterator[httpx.AsyncClient]:
        predict = "/v1/endpoints/1/deployedModels/2:predict"
        monkeypatch.setenv("AIP_PREDICT_ROUTE", predict)
        monkeypatch.setenv("AIP_HEALTH_ROUTE", "/v1/endpoints/1/deployedModels/2")
        app = create_app(engine, text, replace(config))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            yield client

    async def test_routes_of_the_environment_answer(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        path = "/v1/endpoints/1/deployedModels/2"
        answer = await client.post(f"{path}:predict", json={"instances": [{"inputs": "x"}]})
        assert answer.json() == {"predictions": ["hello world"]}
        assert (await client.get(path)).status_code == 200
        engine.is_healthy = False
        assert (await client.get(path)).status_code == 503
        assert (await client.post("/vertex", json={"instances": []})).status_code == 422
        document = (await client.get("/api-doc/openapi.json")).json()
        assert "requestBody" in document["paths"][f"{path}:predict"]["post"]

    def test_route_that_is_not_a_path_is_a_config_error(self) -> None:
        assert environment_routes({}) == []
        with pytest.raises(ConfigError, match="AIP_PREDICT_ROUTE=predict is no path"):
            environment_routes({"AIP_PREDICT_ROUTE": "predict"})


class TestKServe:
    async def test_health_is_live_and_ready(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        assert (await client.get("/v2/health/live")).json() == {"live": True}
        ready = ("/v2/health/ready", "/v2/models/m/ready", "/v2/models/m/versions/1/ready")
        for route in ready:
            assert (await client.get(route)).json() == {"live": True, "ready": True}
        engine.is_healthy = False
        assert (await client.get("/v2/health/live")).status_code == 200
        for route in ready:
            answer = await client.get(route)
            assert answer.status_code == 503
            assert answer.json()["error_type"] == "healthcheck"

    async def test_metadata_describes_server_and_model(self, client: httpx.AsyncClient) -> None:
        assert (await client.get("/v2")).json() == {
            "name": "text-generation-inference",
            "version": tgi_cli.__version__,
            "extensions": ["health", "models", "metrics"],
        }
        found = (await client.get("/v2/models/acme/tiny/versions/7")).json()
        assert (found["name"], found["version"]) == ("acme/tiny", "7")
        assert found["extensions"] == ["infer", "ready"]
        assert (await client.get("/v2/models/tiny")).json()["name"] == "tiny"

    @pytest.mark.parametrize("route", ["/v2/models/m/infer", "/v2/models/m/versions/1/infer"])
    async def test_bytes_are_accepted_as_numbers(
        self, client: httpx.AsyncClient, route: str
    ) -> None:
        body = {
            "id": "7",
            "inputs": [tensor(*"é".encode(), name="a"), tensor(*b"hi", name="b")],
            "outputs": [{"name": "p"}, {"name": "q"}],
        }
        answer = (await client.post(route, json=body)).json()
        assert answer["id"] == "7"
        text = list(b"hello world")
        assert answer["outputs"] == [
            {"name": name, "shape": [1, len(text)], "datatype": "BYTES", "data": text}
            for name in ("p", "q")
        ]

    async def test_texts_are_accepted_as_strings(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.reply_with("one", "two")
        body = {"inputs": [tensor("a", "b")], "parameters": {"return_full_text": True}}
        answer = (await client.post("/v2/models/m/infer", json=body)).json()
        assert answer == {
            "model_name": "m",
            "model_version": "1",
            "outputs": [
                {
                    "name": "text_output",
                    "shape": [2],
                    "datatype": "BYTES",
                    "data": ["aone", "btwo"],
                }
            ],
        }

    async def test_without_parameters_it_samples(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        for more in ({}, {"parameters": {}}):
            await client.post("/v2/models/m/infer", json={"inputs": [tensor("a")], **more})
        assert [request.sampling.greedy for request in engine.requests] == [False, True]

    @pytest.mark.parametrize(
        ("body", "error_type"),
        [
            ({"inputs": [tensor(0xFF)]}, "utf8"),
            ({"inputs": [tensor("a")], "outputs": []}, "length mismatch"),
            ({"inputs": [tensor("a", 1)]}, "validation"),
            ({"inputs": []}, "validation"),
            ({"inputs": [tensor()]}, "validation"),
            ({"inputs": [tensor("")]}, "validation"),
        ],
    )
    async def test_invalid_requests_are_refused(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        state: RouterState,
        body: dict[str, Any],
        error_type: str,
    ) -> None:
        answer = await client.post("/v2/models/m/infer", json=body)
        assert answer.status_code == 422
        assert answer.json()["error_type"] == error_type
        assert engine.requests == []
        assert state.metrics.failures.counts["validation"] == 1

    async def test_numbers_beyond_a_byte_are_refused(self, client: httpx.AsyncClient) -> None:
        answer = await client.post("/v2/models/m/infer", json={"inputs": [tensor(256)]})
        assert answer.status_code == 422
        assert "the bytes of one" in answer.text
