"""The API's document covers all routes, and its page is self-contained."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from tgi_cli.router.api.docs import kind
from tgi_cli.router.api.openapi import endpoints_of
from tgi_cli.router.app import ROUTES
from tgi_cli.router.http.error_styles import TGI, style_of


@pytest.fixture
async def document(client: httpx.AsyncClient) -> dict[str, Any]:
    answer = await client.get("/api-doc/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    return answer.json()  # type: ignore[no-any-return]


async def test_every_route_is_documented(app: Starlette, document: dict[str, Any]) -> None:
    served = {
        (method, re.sub(r":\w+\}", "}", route.path))
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    reported = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    assert reported == served == set(endpoints_of(ROUTES))


async def test_every_reference_resolves(document: dict[str, Any]) -> None:
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert names == set(document["components"]["schemas"])


async def test_operation_ids_are_unique(document: dict[str, Any]) -> None:
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    assert all(operation["summary"] for operation in operations)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            reported = set(operation["responses"])
            if "requestBody" in operation:
                assert {"400", "413", "415"} <= reported
                assert ("422" in reported) == (style_of(path) is TGI), "400 in other forms"
            assert "424" not in reported or style_of(path) is TGI, "500 in other forms"


async def test_schemas_are_those_that_the_routes_decode(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["GenerateRequest"]["required"] == ["inputs"]
    parameters = schemas["GenerateParameters"]["properties"]
    assert parameters["temperature"]["exclusiveMinimum"] == 0
    assert parameters["top_p"]["exclusiveMaximum"] == 1
    assert parameters["full_text"] | {"description": ""} == {
        "type": "boolean",
        "default": False,
        "description": "",
    }
    assert schemas["VertexRequest"]["properties"]["instances"]["type"] == "array"
    streamed = document["paths"]["/generate_stream"]["post"]["responses"]["200"]
    assert set(streamed["content"]) == {"text/event-stream"}
    whole = document["paths"]["/generate"]["post"]["responses"]["200"]
    assert "x-compute-time" in whole["headers"]


async def test_refused_parameters_are_not_documented(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    offered = {name: set(schemas[name]["properties"]) for name in schemas if "Request" in name}
    assert {"n", "allowed_token_ids", "logprobs"} <= offered["ChatRequest"]
    assert "best_of" in offered["CompletionRequest"]
    assert not {"use_beam_search", "best_of", "suffix"} & offered["ChatRequest"]
    assert not {"n", "max_tokens", "echo"} & offered["ResponsesRequest"]


async def test_examples_are_answered(client: httpx.AsyncClient, document: dict[str, Any]) -> None:
    tried = 0
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        example = content.get("application/json", {}).get("example")
        if example is not None and path != "/infill":  # this model has no tokens for it
            answer = await client.post(path.format(model="m", version="1"), json=example)
            assert answer.status_code == 200, (path, answer.text)
            tried += 1
    assert tried >= 9


async def test_security_is_absent_without_a_key(document: dict[str, Any]) -> None:
    assert "security" not in document
    assert "securitySchemes" not in document["components"]


class TestKey:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_key": "s3cret"}

    async def test_document_lists_what_needs_the_key(self, app: Starlette) -> None:
        transport = httpx.ASGITransport(app)
        headers = {"authorization": "Bearer s3cret"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://router", headers=headers
        ) as client:
            reported = (await client.get("/api-doc/openapi.json")).json()
            page = (await client.get("/docs")).text
        assert reported["security"] == [{"key": []}, {"x-api-key": []}]
        assert "401" in reported["paths"]["/generate"]["post"]["responses"]
        for path in ("/health", "/ping", "/metrics"):
            assert reported["paths"][path]["get"]["security"] == []
        assert "API key" in page
        assert "s3cret" not in page + json.dumps(reported)


async def test_page_is_self_contained(client: httpx.AsyncClient, document: dict[str, Any]) -> None:
    answer = await client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    page = answer.text
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert "@import" not in page
    assert "url(" not in page
    for path in document["paths"]:
        assert f"<code>{path}</code>" in page
    for name in document["components"]["schemas"]:
        assert f'id="{name}"' in page
    assert set(re.findall(r'href="#(\w+)"', page)) <= set(document["components"]["schemas"])
    assert 'href="#GenerateRequest"' in page
    assert "``" not in re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL)


def test_schemas_are_summarised() -> None:
    assert kind({"$ref": "#/components/schemas/Token"}) == "Token"
    assert kind({"anyOf": [{"type": "integer"}, {"type": "null"}]}) == "integer | null"
    assert kind({"type": "array", "items": {"type": "string"}}) == "array of string"
    assert kind({"enum": ["a", "b"]}) == '"a" | "b"'
    assert kind({}) == "any"
