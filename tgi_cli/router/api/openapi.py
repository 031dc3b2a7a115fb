"""The API's own document, OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0).

Schemas come from the types that the routes decode and encode, paths from the routes themselves,
and summaries from their docstrings, so that none of them can drift from what is served.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

import tgi_cli
from tgi_cli.router.api.operations import ALSO, NAMED, OPERATIONS, Operation
from tgi_cli.router.api.schemas.refused import RefusedParameters, refused_names
from tgi_cli.router.api.schemas.service import ErrorResponse, OpenAIErrorResponse
from tgi_cli.router.http.errors import is_openai, openai_status

_REF = "#/components/schemas/{name}"

_ERRORS = {
    400: "The body is no JSON; on OpenAI's routes also: a parameter that cannot be",
    401: "The API key is missing or another one",
    403: "Not allowed on this server",
    404: "No such model, adapter or path",
    408: "The body did not arrive in time",
    413: "The body is larger than allowed",
    415: "The body's content type is not JSON",
    422: "A parameter that cannot be",
    424: "The model server failed",
    429: "Too many requests; Retry-After says when to come back",
    500: "Generation ended without a reason, or a defect",
    503: "The server is not ready, or about to stop",
    504: "Not done within x-request-timeout",
}
_PLAIN = (400, 413, 415)
"""Told in plain text on native routes, as TGI's web framework does; 422 in both forms."""

_TIMED = {
    "x-compute-type": ("What answered", "string"),
    "x-compute-time": ("Seconds", "number"),
    "x-compute-characters": ("Characters of the prompts", "integer"),
    "x-total-time": ("Milliseconds, arrival to last token", "integer"),
    "x-validation-time": ("Milliseconds, arrival to queue", "integer"),
    "x-queue-time": ("Milliseconds in the queue", "integer"),
    "x-inference-time": ("Milliseconds, first step to last token", "integer"),
    "x-time-per-token": ("Milliseconds", "integer"),
    "x-prompt-tokens": ("Tokens of the prompts", "integer"),
    "x-generated-tokens": ("Tokens generated", "integer"),
}
_DEADLINE = {
    "name": "x-request-timeout",
    "in": "header",
    "description": "Seconds that the whole request may take.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 1_000_000},
}


def document(routes: Sequence[BaseRoute], guarded: bool) -> dict[str, Any]:
    """All of ``routes`` as an OpenAPI document; ``guarded``: an API key is needed.

    Raises KeyError for a route that :mod:`tgi_cli.router.api.operations` does not know.
    """
    found = list(_operations(routes))
    types = _Types([operation for _, _, _, operation in found])
    paths: dict[str, dict[str, Any]] = {}
    for path, method, route, operation in found:
        described = _describe(path, method, route, operation, types, guarded)
        paths.setdefault(path, {}).setdefault(method.lower(), described)
    components: dict[str, Any] = {"schemas": dict(sorted(types.components.items()))}
    told: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "tgi",
            "description": "Text generation: the APIs of Text Generation Inference and OpenAI.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
            "version": tgi_cli.__version__,
        },
        "paths": paths,
        "components": components,
    }
    if guarded:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        told["security"] = [{"key": []}]
    return told


def _operations(routes: Sequence[BaseRoute]) -> Iterator[tuple[str, str, Route, Operation]]:
    """Path, method, route and operation of each, in the order in which requests find them."""
    for route in routes:
        if not isinstance(route, Route):
            continue
        path = route.path_format
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = NAMED.get(route.name) or OPERATIONS[method, path]
            yield path, method, route, operation


class _Types:
    """Schemas of all types that the operations name."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        types = [ErrorResponse, OpenAIErrorResponse, *ALSO]
        for operation in operations:
            types += [*operation.body, *_answers(operation), *operation.events]
        self._types = list(dict.fromkeys(types))
        schemas, self.components = msgspec.json.schema_components(self._types, ref_template=_REF)
        self._schemas = dict(zip(self._types, schemas, strict=True))
        for kind in self._types:
            if isinstance(kind, type) and issubclass(kind, RefusedParameters):
                for name in refused_names(kind):
                    del self.components[kind.__name__]["properties"][name]

    def any_of(self, types: Sequence[Any]) -> dict[str, Any]:
        """The schema of a value of any of the types."""
        schemas = [self._schemas[kind] for kind in dict.fromkeys(types)]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _answers(operation: Operation) -> list[Any]:
    answer = operation.answer
    if answer is None or isinstance(answer, str):
        return []
    return list(answer) if isinstance(answer, tuple) else [answer]


def _describe(
    path: str, method: str, route: Route, operation: Operation, types: _Types, guarded: bool
) -> dict[str, Any]:
    summary = (inspect.getdoc(route.endpoint) or "").partition("\n\n")[0].replace("\n", " ")
    told: dict[str, Any] = {
        "tags": [operation.tag],
        "summary": summary,
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in route.param_convertors
    ]
    if operation.timed:
        parameters.append(_DEADLINE)
    if parameters:
        told["parameters"] = parameters
    if operation.body:
        content = {"schema": types.any_of(operation.body)}
        if operation.example is not None:
            content["example"] = operation.example
        told["requestBody"] = {"required": True, "content": {"application/json": content}}
    openai = is_openai(path, route.name)
    statuses = operation.errors
    if openai:
        statuses = tuple(dict.fromkeys(map(openai_status, statuses)))
    if guarded and operation.open:
        told["security"] = []
    elif guarded:
        statuses = (*statuses, 401)
    told["responses"] = {"200": _success(operation, types)} | {
        str(status): _failure(status, openai, types) for status in sorted(statuses)
    }
    return told


def _success(operation: Operation, types: _Types) -> dict[str, Any]:
    told: dict[str, Any] = {"description": "The answer"}
    content: dict[str, Any] = {}
    if isinstance(operation.answer, str):
        content[operation.answer] = {"schema": {"type": "string"}}
    elif operation.answer is not None:
        content["application/json"] = {"schema": types.any_of(_answers(operation))}
    if operation.events:
        told["description"] = (
            "The answer; a stream is server-sent events, each with one of these objects as data"
        )
        content["text/event-stream"] = {"schema": types.any_of(operation.events)}
    if content:
        told["content"] = content
    if operation.timed and operation.answer is not None:
        told["headers"] = {
            name: {"description": words, "schema": {"type": kind}}
            for name, (words, kind) in _TIMED.items()
        }
    return told


def _failure(status: int, openai: bool, types: _Types) -> dict[str, Any]:
    told: dict[str, Any] = {"description": _ERRORS[status]}
    if openai:
        told["content"] = {"application/json": {"schema": types.any_of([OpenAIErrorResponse])}}
        return told
    told["content"] = content = {}
    if status not in _PLAIN:
        content["application/json"] = {"schema": types.any_of([ErrorResponse])}
    if status in _PLAIN or status == 422:
        content["text/plain"] = {"schema": {"type": "string"}}
    return told
