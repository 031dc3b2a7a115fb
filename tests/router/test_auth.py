"""With an API key, every route but health checks and metrics requires it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from tests.router.fakes import FakeEngine
from tgi_cli.router.api.openapi import endpoints_of
from tgi_cli.router.app import ROUTES, create_app
from tgi_cli.router.config import RouterConfig
from tgi_cli.router.http.auth import TENANT_BYTES
from tgi_cli.text.bundle import TextBundle

ENDPOINTS = endpoints_of(ROUTES)
KEY = "s3cret"
BODY: dict[str, Any] = {
    "inputs": "hello",
    "prompt": "hello",
    "messages": [{"role": "user", "content": "hello"}],
}
GUARDED = ("/", "/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions")
OPEN = {
    ("GET", path)
    for path in (
        "/", "/health", "/ping", "/metrics", "/v2/health/live", "/v2/health/ready",
        "/v2/models/{model}/ready", "/v2/models/{model}/versions/{version}/ready",
        "/web-ui/{name}",
    )
}  # fmt: skip
OTHERS = [
    ("GET", "/nothing"),
    ("POST", "/health"),
    ("DELETE", "/metrics"),
    ("OPTIONS", "/generate"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/%68ealth"),
    ("GET", "/health%2F..%2Finfo"),
    ("GET", "/v2/models/a/versions/ready"),
    ("GET", "/v1/models%2Ftgi"),
    ("GET", "/info?x=/health"),
    ("GET", "/info#/health"),
]


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"api_key": KEY}


@pytest.mark.parametrize("route", GUARDED)
@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer s3cre",
     f"Bearer {KEY.upper()}", "Bearer sécret"],
)  # fmt: skip
async def test_requests_without_the_key_are_401(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, given: str | None
) -> None:
    headers = {} if given is None else {"authorization": given.encode()}
    answer = await client.post(route, json=BODY, headers=headers)  # type: ignore[arg-type]
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()
    if route.startswith("/v1/"):
        assert error["error"]["code"] == "invalid_api_key"
        assert "Bearer" in error["error"]["message"]
    else:
        assert error["error_type"] == "unauthorized"
    assert engine.requests == []


@pytest.mark.parametrize("route", GUARDED)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_requests_with_the_key_are_answered(
    client: httpx.AsyncClient, route: str, scheme: str
) -> None:
    headers = {"authorization": f"{scheme} {KEY}"}
    assert (await client.post(route, json=BODY, headers=headers)).status_code == 200


RIGHT, WRONG = f"Bearer {KEY}", "Bearer no"
SEVERAL = [
    [("authorization", RIGHT), ("authorization", RIGHT)],
    [("authorization", RIGHT), ("authorization", WRONG)],
    [("authorization", WRONG), ("authorization", RIGHT)],
    [("Authorization", RIGHT), ("authorization", WRONG)],
    [("authorization", WRONG), ("AUTHORIZATION", RIGHT)],
    [("Authorization", RIGHT), ("aUTHORIZATION", RIGHT)],
    [("authorization", RIGHT), ("authorization", "")],
    [("authorization", ""), ("authorization", RIGHT)],
    [("authorization", ""), ("authorization", "")],
    [("authorization", RIGHT), ("authorization", "Basic eDp5")],
    [("authorization", f"{RIGHT}, {RIGHT}")],
    [("authorization", f"{RIGHT},{WRONG}")],
    [("authorization", f"{WRONG}, {RIGHT}")],
    [("authorization", f", {RIGHT}")],
    [("authorization", f"{RIGHT},")],
    [("proxy-authorization", RIGHT)],
    [("x-authorization", RIGHT), ("authorization", "")],
]
"""What a proxy that joins, drops or reorders headers reads in another way than this server does:
RFC 9110, section 5.3, allows one alone. None of them opens."""


@pytest.mark.parametrize("given", SEVERAL)
async def test_two_authorization_headers_are_401(
    client: httpx.AsyncClient, engine: FakeEngine, given: list[tuple[str, str]]
) -> None:
    for route in GUARDED:
        answer = await client.post(route, json=BODY, headers=given)
        assert answer.status_code == 401, route
    assert (await client.get("/info", headers=given)).status_code == 401
    assert (await client.get("/health", headers=given)).status_code == 200, "needs none"
    assert engine.requests == []


@pytest.mark.parametrize("given", SEVERAL)
async def test_two_authorization_headers_on_the_wire_are_401(
    url: str, given: list[tuple[str, str]]
) -> None:
    """As the server's own parser hands them over."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = "".join(f"{name}: {value}\r\n" for name, value in given)
    writer.write(f"GET /info HTTP/1.1\r\nhost: x\r\n{lines}connection: close\r\n\r\n".encode())
    async with asyncio.timeout(60):
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
    writer.close()


def test_public_endpoints_are_health_metrics_and_the_web_ui() -> None:
    assert {at for at, endpoint in ENDPOINTS.items() if endpoint.operation.public} == OPEN


@pytest.mark.parametrize(("method", "path"), sorted(ENDPOINTS), ids=" ".join)
async def test_every_route_is_guarded_or_public(
    client: httpx.AsyncClient, engine: FakeEngine, method: str, path: str
) -> None:
    examples = {"model": "tgi", "version": "1", "name": "app.js"}
    url = re.sub(r"\{(\w+)\}", lambda found: examples.get(found[1], found[0]), path)
    answer = await client.request(method, url, json=BODY if method == "POST" else None)
    guarded = answer.status_code == 401
    assert guarded != ((method, path) in OPEN)
    assert answer.status_code in (200, 401)
    assert engine.requests == []


@pytest.mark.parametrize(("method", "path"), OTHERS)
async def test_no_spelling_of_a_path_bypasses_the_key(
    client: httpx.AsyncClient, method: str, path: str
) -> None:
    for host in ("router", "router/health?", "/health#@router"):
        headers = {"host": host}
        answer = await client.request(method, f"http://router{path}", headers=headers)
        assert answer.status_code == 401


async def test_head_is_public_where_get_is(client: httpx.AsyncClient) -> None:
    assert (await client.head("/health")).status_code == 200
    assert (await client.head("/info")).status_code == 401


@pytest.mark.parametrize("route", [*GUARDED, "/v1/messages"])
async def test_key_may_be_sent_as_x_api_key(client: httpx.AsyncClient, route: str) -> None:
    """As Anthropic's clients send it."""
    body = {**BODY, "model": "tgi", "max_tokens": 2}
    for headers in ({"x-api-key": KEY}, {"X-Api-Key": KEY}, {"x-api-key": f" {KEY} "}):
        assert (await client.post(route, json=body, headers=headers)).status_code == 200
    for headers in ({"x-api-key": ""}, {"x-api-key": f"Bearer {KEY}"}, {"x-api-key": f"{KEY}x"}):
        assert (await client.post(route, json=body, headers=headers)).status_code == 401


@pytest.mark.parametrize(
    "given",
    [
        [("x-api-key", KEY), ("authorization", WRONG)],
        [("x-api-key", "no"), ("authorization", RIGHT)],
        [("x-api-key", ""), ("authorization", RIGHT)],
        [("x-api-key", KEY), ("authorization", "")],
        [("x-api-key", KEY), ("authorization", KEY)],
        [("x-api-key", KEY), ("authorization", "Basic eDp5")],
        [("x-api-key", KEY), ("x-api-key", KEY)],
        [("x-api-key", KEY), ("x-api-key", "no")],
        [("x-api-key", f"{KEY},{KEY}")],
        [("x-api-key", KEY), ("authorization", RIGHT), ("authorization", RIGHT)],
    ],
)
async def test_two_keys_that_differ_are_401(
    client: httpx.AsyncClient, given: list[tuple[str, str]]
) -> None:
    assert (await client.get("/info", headers=given)).status_code == 401


async def test_the_same_key_in_both_headers_is_accepted(client: httpx.AsyncClient) -> None:
    headers = {"x-api-key": KEY, "authorization": RIGHT}
    assert (await client.get("/info", headers=headers)).status_code == 200


class TestSeveralKeys:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_key": "first,second-and-longer"}

    async def test_two_valid_keys_are_refused_unless_equal(self, client: httpx.AsyncClient) -> None:
        headers = {"x-api-key": "first", "authorization": "Bearer second-and-longer"}
        assert (await client.get("/info", headers=headers)).status_code == 401
        headers = {"x-api-key": "first", "authorization": "Bearer first"}
        assert (await client.get("/info", headers=headers)).status_code == 200

    @pytest.mark.parametrize("key", ["first", "second-and-longer"])
    async def test_any_of_several_keys_is_accepted(
        self, client: httpx.AsyncClient, key: str
    ) -> None:
        headers = {"authorization": f"Bearer {key}"}
        assert (await client.get("/info", headers=headers)).status_code == 200

    @pytest.mark.parametrize("key", ["first,second-and-longer", "second", "", ","])
    async def test_list_of_keys_itself_is_refused(
        self, client: httpx.AsyncClient, key: str
    ) -> None:
        headers = {"authorization": f"Bearer {key}"}
        assert (await client.get("/info", headers=headers)).status_code == 401

    @pytest.mark.parametrize("route", [*GUARDED, "/v1/messages"])
    async def test_each_key_is_a_tenant_of_its_own(
        self, client: httpx.AsyncClient, engine: FakeEngine, route: str
    ) -> None:
        """So that drafts are never taken from answers to requests with another key."""
        body = {**BODY, "model": "tgi", "max_tokens": 2}
        given = [
            {"authorization": "Bearer first"},
            {"x-api-key": "first"},
            {"authorization": "Bearer second-and-longer"},
        ]
        for headers in given:
            assert (await client.post(route, json=body, headers=headers)).status_code == 200
        one, same, other = (request.tenant for request in engine.requests)
        assert one == same != other
        assert other

    async def test_a_tenant_tells_nothing_about_its_key(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        text: TextBundle,
        config: RouterConfig,
    ) -> None:
        """It depends on a secret of the server: no one can try keys against it."""
        headers = {"x-api-key": "first"}
        await client.post("/generate", json=BODY, headers=headers)
        again = FakeEngine(text.tokenizer)
        transport = httpx.ASGITransport(create_app(again, text, replace(config, api_key="first")))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as second:
            await second.post("/generate", json=BODY, headers=headers)
        (request,), (twin,) = engine.requests, again.requests
        assert len(request.tenant) == len(twin.tenant) == TENANT_BYTES
        assert request.tenant != twin.tenant


async def test_openais_client_sends_the_key(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        answer = await client.completions.create(model="tgi", prompt="hello", max_tokens=3)
        assert answer.choices[0].text
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="no", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="API key"):
            await client.completions.create(model="tgi", prompt="hello")


async def test_a_large_body_without_a_key_does_not_break_the_connection(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        refused = await client.post("/generate", json={"inputs": "x" * 1_000_000})
        assert refused.status_code == 401
        answer = await client.post(
            "/generate", json=BODY, headers={"authorization": f"Bearer {KEY}"}
        )
        assert answer.status_code == 200


def test_key_is_never_logged(app: Starlette) -> None:
    assert KEY not in repr(app.state.router.config)
