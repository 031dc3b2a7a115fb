"""The API about itself: ``GET /docs`` for people, ``GET /api-doc/openapi.json`` for programs."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from tgi_cli.router.api.openapi import document
from tgi_cli.router.http.bodies import json_response

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page holds all it needs, and speaks to this server alone."""


async def openapi(request: Request) -> Response:
    """This API as an OpenAPI 3.1 document."""
    return json_response(_document(request.app))


async def docs(request: Request) -> Response:
    """This page: every route with its bodies, to read and to try."""
    told = _document(request.app)
    groups: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    page = _template().render(document=told, groups=groups, base=request.scope.get("root_path", ""))
    return HTMLResponse(page, headers={"content-security-policy": _POLICY})


def _document(app: Starlette) -> dict[str, Any]:
    """Built when somebody asks, and once."""
    if not hasattr(app.state, "openapi"):
        guarded = app.state.router.config.api_key is not None
        app.state.openapi = document(app.routes, guarded)
    told: dict[str, Any] = app.state.openapi
    return told


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["pretty"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
    environment.filters["kind"] = kind
    source = files("tgi_cli.router.api").joinpath("docs.html").read_text(encoding="utf-8")
    return environment.from_string(source)


def kind(schema: dict[str, Any]) -> str:
    """A schema in a few words: ``integer | null``, ``array of Token``."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(kind(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"])
    if schema.get("type") == "array":
        return f"array of {kind(schema.get('items') or {})}"
    return str(schema.get("type", "any"))


ROUTES = [
    Route("/docs", docs, methods=["GET"]),
    Route("/api-doc/openapi.json", openapi, methods=["GET"]),
]
