"""The access log has one line for each request, with its outcome and without its texts."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from tests.router.fakes import FakeEngine
from tgi_cli import logging as logs
from tgi_cli.router.state import RouterState

SECRET = "hello marzipan"
KEY = "sk-nobody-may-read-this"
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The requests' lines as JSON has them; all that was logged is searched for secrets."""
    caplog.set_level(logging.DEBUG, "tgi_cli")
    form = logs._JsonFormatter("router")

    def found() -> list[dict[str, Any]]:
        text = [form.format(record) for record in caplog.records]
        assert not any("marzipan" in line or KEY in line for line in text)
        reported = [json.loads(line) for line in text]
        return [
            line["fields"] | {"level": line["level"]}
            for line in reported
            if line["target"] == "tgi_cli.router.observability.access_log"
        ]

    return found


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate", {"inputs": SECRET}),
        ("/generate_stream", {"inputs": SECRET}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}),
        ("/v1/completions", {"prompt": SECRET, "stream": True}),
    ],
)
async def test_a_request_is_logged_as_one_line(
    client: httpx.AsyncClient, engine: FakeEngine, lines: Lines, route: str, body: dict[str, Any]
) -> None:
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "mine-1"}
    answer = await client.post(f"{route}?api_key={KEY}", json=body, headers=headers)
    assert answer.status_code == 200
    (line,) = lines()
    assert line["message"] == "request"
    assert line["level"] == "INFO"
    assert (line["method"], line["route"], line["status"]) == ("POST", route, 200)
    assert line["request_id"] == answer.headers["x-request-id"] == "mine-1"
    assert line["prompt_tokens"] == len(engine.requests[0].prompt_ids)
    assert line["generated_tokens"] == len(engine.replies[0])
    assert line["finish_reason"] == "eos_token"
    assert line["queue_time"] == pytest.approx(0.002)
    assert 0 < line["validation_time"] < line["time_to_first_token"] <= line["total_time"]
    assert line["time_per_token"] == pytest.approx(
        line["inference_time"] / line["generated_tokens"], abs=2e-6
    )
    assert "adapter" not in line
    assert "error" not in line


async def test_adapter_seed_and_sample_count_are_logged(
    client: httpx.AsyncClient, engine: FakeEngine, lines: Lines
) -> None:
    engine.load_names("law")
    await client.post(
        "/v1/completions", json={"prompt": SECRET, "model": "law", "seed": 7, "max_tokens": 2}
    )
    await client.post("/v1/completions", json={"prompt": [SECRET, SECRET], "n": 2})
    one, four = lines()
    assert (one["adapter"], one["seed"], one["finish_reason"]) == ("law", 7, "length")
    assert four["sequences"] == 4
    assert four["prompt_tokens"] == 2 * len(engine.requests[-1].prompt_ids)
    assert four["generated_tokens"] == 4 * len(engine.replies[0])


@pytest.mark.parametrize(
    ("route", "content", "status", "error"),
    [
        ("/generate", b'{"inputs": "marzipan"', 400, "validation"),
        ("/generate", b'{"inputs": "marzipan", "parameters": {"top_k": 0}}', 422, "validation"),
        ("/generate", b'{"inputs": {"marzipan": 1}}', 422, "validation"),
        ("/v1/completions", b'{"prompt": "marzipan", "model": "marzipan"}', 200, None),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "marzipan"}]}',
         200, None),
        ("/generate_stream", b'{"inputs": "marzipan", "parameters": {"top_k": 0}}', 200,
         "validation"),
    ],
)  # fmt: skip
async def test_refusals_are_logged_by_error_type(
    client: httpx.AsyncClient,
    lines: Lines,
    route: str,
    content: bytes,
    status: int,
    error: str | None,
) -> None:
    answer = await client.post(route, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    (line,) = lines()
    assert (line["status"], line.get("error"), line["level"]) == (status, error, "INFO")


async def test_refusals_name_the_parameter_and_the_code(
    client: httpx.AsyncClient, lines: Lines
) -> None:
    body = {"messages": [{"role": "user", "content": SECRET}]}
    for extra in ({"temperature": SECRET}, {"logit_bias": {SECRET: SECRET}}, {"num_beams": 3}):
        await client.post("/v1/chat/completions", json=body | extra)
    assert [(line["param"], line["code"]) for line in lines()] == [
        ("temperature", "invalid_type"),
        ("logit_bias", "invalid_type"),
        ("num_beams", "unsupported_parameter"),
    ]


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
async def test_server_failures_are_logged_as_errors_with_cause(
    client: httpx.AsyncClient, engine: FakeEngine, lines: Lines, route: str
) -> None:
    engine.failure, engine.fail_after = "the device is lost", 1
    await client.post(route, json={"inputs": SECRET})
    (line,) = lines()
    assert (line["level"], line["error"]) == ("ERROR", "generation")
    assert "the device is lost" in line["cause"]
    assert line["generated_tokens"] == 1


async def test_overload_and_unknown_paths_are_logged(
    client: httpx.AsyncClient, state: RouterState, lines: Lines
) -> None:
    state.admission.limit = 1
    state.admission.enter()
    await client.post("/generate", json={"inputs": SECRET})
    await client.get("/wp-admin/%0d%0aINFO%20forged?x=marzipan")
    overloaded, unknown = lines()
    assert (overloaded["status"], overloaded["error"]) == (429, "overloaded")
    assert (unknown["status"], unknown["route"]) == (404, "/wp-admin/??INFO?forged")


async def test_disconnected_clients_are_logged_as_dropped(
    client: httpx.AsyncClient, engine: FakeEngine, url: str, lines: Lines
) -> None:
    engine.gate = asyncio.Semaphore(1)
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as there,
        there.stream("POST", "/generate_stream", json={"inputs": SECRET}) as answer,
    ):
        await anext(answer.aiter_bytes())
    async with asyncio.timeout(60):
        while not lines():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (line,) = lines()
    assert (line["status"], line["error"], line["generated_tokens"]) == (200, "dropped", 1)


async def test_successful_probes_are_logged_at_debug(
    client: httpx.AsyncClient, engine: FakeEngine, lines: Lines
) -> None:
    for path in ("/health", "/metrics", "/ping", "/"):
        await client.get(path)
    assert {line["level"] for line in lines()} == {"DEBUG"}
    engine.is_healthy = False
    await client.get("/health")
    last = lines()[-1]
    assert (last["level"], last["status"], last["error"]) == ("ERROR", 503, "healthcheck")


async def test_probes_of_a_server_that_shuts_down_are_no_errors(
    app: Starlette, client: httpx.AsyncClient, lines: Lines
) -> None:
    app.state.router.admission.drain()
    for path in ("/health", "/v2/health/ready"):
        answer = await client.get(path)
        assert answer.status_code == 503
    assert [(line["level"], line["status"]) for line in lines()] == [("INFO", 503)] * 2


@pytest.mark.parametrize(
    "given", [None, b"", b"two words", b"x" * 129, b'a"b', b"line\nforged", "schlüssel".encode()]
)
async def test_unsafe_request_ids_are_replaced(
    app: Starlette, lines: Lines, given: bytes | None
) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": "/info", "raw_path": b"/info",
        "query_string": b"", "headers": [] if given is None else [(b"x-request-id", given)],
    }  # fmt: skip
    await app(scope, receive, send)
    answered = dict(sent[0]["headers"])[b"x-request-id"].decode()
    assert len(answered) == 32
    assert answered.isalnum()
    assert lines()[0]["request_id"] == answered


async def test_unexpected_exceptions_are_500_and_logged_with_traceback(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    lines: Lines,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(engine, "submit", broken)
    answer = await client.post(
        "/generate", json={"inputs": SECRET}, headers={"x-request-id": "mine"}
    )
    assert answer.status_code == 500
    assert answer.json()["error_type"] == "internal"
    assert answer.headers["x-request-id"] == "mine"
    (line,) = lines()
    assert (line["level"], line["status"], line["error"]) == ("ERROR", 500, "internal")
    (defect,) = [record for record in caplog.records if record.exc_info]
    assert defect.request_id == "mine"  # type: ignore[attr-defined]
