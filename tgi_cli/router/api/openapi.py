"""The API's OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.0).

Schemas come from the types that the routes decode and encode, paths from the routes themselves,
and summaries from their docstrings, so that none of them can drift from the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.routing import BaseRoute

from tgi_cli.router.api.schemas.messages import AnthropicErrorResponse
from tgi_cli.router.api.schemas.openai_answers import OpenAIErrorResponse
from tgi_cli.router.api.schemas.refused import RefusedParameters, refused_names
from tgi_cli.router.api.schemas.tgi import ErrorResponse
from tgi_cli.router.http.endpoint import Endpoint, Operation
from tgi_cli.router.http.error_styles import ANTHROPIC, TGI, ErrorStyle, style_of
from tgi_cli.version import __version__

_ERRORS = {
    400: "The body is not valid JSON; on OpenAI's routes also: a parameter is invalid",
    401: "The API key is missing or wrong",
    403: "Not allowed on this server",
    404: "No such model, adapter or path",
    408: "The body did not arrive in time",
    413: "The body is larger than allowed",
    415: "The body's content type is not JSON",
    422: "A parameter is invalid",
    424: "The model server failed",
    429: "Too many requests; see Retry-After",
    500: "Generation ended without a reason, or an internal error",
    503: "The server is not ready, or is shutting down",
    504: "Not complete within x-request-timeout",
    529: "Too many requests; see Retry-After",
}
_PLAIN = (400, 413, 415)
"""Errors in plain text on TGI's routes, as from TGI's web framework; 422 has both forms."""

_TIMING_HEADERS = {
    "x-compute-type": ("Device that generated the answer", "string"),
    "x-compute-time": ("Seconds", "number"),
    "x-compute-characters": ("Characters of the prompts", "integer"),
    "x-total-time": ("Milliseconds, arrival to last token", "integer"),
    "x-validation-time": ("Milliseconds, arrival to queue", "integer"),
    "x-queue-time": ("Milliseconds in the queue", "integer"),
    "x-inference-time": ("Milliseconds, first step to last token", "integer"),
    "x-time-per-token": ("Milliseconds", "integer"),
    "x-prompt-tokens": ("Tokens of the prompts", "integer"),
    "x-generated-tokens": ("Generated tokens", "integer"),
}
_TIMEOUT = {
    "name": "x-request-timeout",
    "in": "header",
    "description": "Seconds that the whole request may take.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 1_000_000},
}


def endpoints_of(routes: Sequence[BaseRoute]) -> dict[tuple[str, str], Endpoint]:
    """The endpoints by method and path, in the order in which they are matched."""
    found: dict[tuple[str, str], Endpoint] = {}
    for route in routes:
        if isinstance(route, Endpoint):
            (method,) = (route.methods or set()) - {"HEAD"}
            found.setdefault((method, route.path_format), route)
    return found


def document(routes: Sequence[BaseRoute], guarded: bool) -> dict[str, Any]:
    """Describe all of ``routes``; ``guarded`` if they need an API key."""
    endpoints = endpoints_of(routes)
    schemas = _Schemas([endpoint.operation for endpoint in endpoints.values()])
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), endpoint in endpoints.items():
        described = _describe(method, path, endpoint, schemas, guarded)
        paths.setdefault(path, {})[method.lower()] = described
    components: dict[str, Any] = {"schemas": dict(sorted(schemas.components.items()))}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "tgi",
            "description": "Text generation: the APIs of TGI, OpenAI and Anthropic.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
            "version": __version__,
        },
        "paths": paths,
        "components": components,
    }
    if guarded:
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        found["security"] = [{"key": []}, {"x-api-key": []}]
    return found


class _Schemas:
    """The schemas of all types that the operations name."""

    def __init__(self, described: Sequence[Operation]) -> None:
        types: dict[Any, None] = dict.fromkeys(
            (ErrorResponse, OpenAIErrorResponse, AnthropicErrorResponse)
        )
        for each in described:
            types |= dict.fromkeys((*each.body, *each.answer, *each.events, *each.referenced))
        schemas, self.components = msgspec.json.schema_components(
            types, ref_template="#/components/schemas/{name}"
        )
        self._schemas = dict(zip(types, schemas, strict=True))
        for kind in types:
            if isinstance(kind, type) and issubclass(kind, RefusedParameters):
                for name in refused_names(kind):
                    del self.components[kind.__name__]["properties"][name]

    def content(self, media_type: str, types: Sequence[Any], **more: Any) -> dict[str, Any]:
        """A value of any of the types, as content of a media type; empty without types."""
        schemas = [self._schemas[kind] for kind in dict.fromkeys(types)]
        if not schemas:
            return {}
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        return {media_type: {"schema": schema, **more}}


def _describe(
    method: str, path: str, endpoint: Endpoint, schemas: _Schemas, guarded: bool
) -> dict[str, Any]:
    operation = endpoint.operation
    summary = (inspect.getdoc(endpoint.endpoint) or "").partition("\n\n")[0].replace("\n", " ")
    described: dict[str, Any] = {
        "tags": [operation.tag],
        "summary": summary,
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in endpoint.param_convertors
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
    ]
    if operation.generates:
        parameters.append(_TIMEOUT)
    if parameters:
        described["parameters"] = parameters
    if operation.body:
        example = {} if operation.example is None else {"example": operation.example}
        content = schemas.content("application/json", operation.body, **example)
        described["requestBody"] = {"required": True, "content": content}
    style = style_of(path, endpoint.name)
    statuses = style.possible(set(operation.statuses))
    if guarded and operation.public:
        described["security"] = []
    elif guarded:
        statuses.add(401)
    described["responses"] = {"200": _success(operation, schemas)} | {
        str(status): _failure(status, style, schemas) for status in sorted(statuses)
    }
    return described


def _success(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {"description": "The answer"}
    content = schemas.content(operation.media_type, operation.answer)
    content |= schemas.content("text/event-stream", operation.events)
    if operation.events:
        described["description"] = (
            "The answer; a stream is server-sent events, each with one of these objects as data"
        )
    if content:
        described["content"] = content
    if operation.generates and operation.answer:
        described["headers"] = {
            name: {"description": words, "schema": {"type": kind}}
            for name, (words, kind) in _TIMING_HEADERS.items()
        }
    return described


def _failure(status: int, style: ErrorStyle, schemas: _Schemas) -> dict[str, Any]:
    if style is ANTHROPIC:
        content = schemas.content("application/json", [AnthropicErrorResponse])
    elif style is not TGI:
        content = schemas.content("application/json", [OpenAIErrorResponse])
    else:
        plain = status in _PLAIN
        content = {} if plain else schemas.content("application/json", [ErrorResponse])
        if plain or status == 422:
            content["text/plain"] = {"schema": {"type": "string"}}
    return {"description": _ERRORS[status], "content": content}
