"""The API's documentation: ``GET /docs`` to read, ``GET /api-doc/openapi.json`` for programs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.responses import HTMLResponse, Response

from tgi_cli.router.api.openapi import document
from tgi_cli.router.http.bodies import json_response
from tgi_cli.router.http.endpoint import Endpoint, Operation, RequestContext

if TYPE_CHECKING:
    import jinja2

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page is self-contained and sends requests to this server alone."""


async def openapi(context: RequestContext[None]) -> Response:
    """This API as an OpenAPI 3.1 document."""
    return json_response(await asyncio.to_thread(_document, context.request.app))


async def docs(context: RequestContext[None]) -> Response:
    """This page: every route with its bodies, to read and to try."""
    base = context.request.scope.get("root_path", "")
    # Rendering takes 40 ms.
    page = await asyncio.to_thread(_page, context.request.app, base)
    return HTMLResponse(page, headers={"content-security-policy": _POLICY})


def _page(app: Starlette, base: str) -> str:
    found = _document(app)
    groups: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    return _template().render(document=found, groups=groups, base=base)


def _document(app: Starlette) -> dict[str, Any]:
    """Built at the first request for it."""
    if not hasattr(app.state, "openapi"):
        guarded = app.state.router.config.api_key is not None
        app.state.openapi = document(app.routes, guarded)
    found: dict[str, Any] = app.state.openapi
    return found


@cache
def _template() -> jinja2.Template:
    import jinja2  # for this page alone: servers need not have it in memory

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


_JSON = Operation(tag="Service", answer=(dict[str, Any],))
_PAGE = replace(_JSON, answer=(str,), media_type="text/html")

ROUTES = [
    Endpoint("/docs", docs, _PAGE, method="GET"),
    Endpoint("/api-doc/openapi.json", openapi, _JSON, method="GET"),
]
