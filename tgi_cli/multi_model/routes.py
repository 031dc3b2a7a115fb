"""What the server in front of several models answers itself.

Shapes are those of llama.cpp's router mode where it has them:
https://github.com/ggml-org/llama.cpp/tree/master/tools/server
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import httpx
import msgspec
from msgspec import UNSET, UnsetType
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.multi_model.model_manager import ModelManager
from tgi_cli.multi_model.model_process import ModelProcess
from tgi_cli.multi_model.model_scheduler import LoadState
from tgi_cli.router.bounds import Name
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import BodyMemory, json_response, parse, read_body
from tgi_cli.router.http.endpoint import Endpoint, Operation
from tgi_cli.router.observability import access_log, openmetrics
from tgi_cli.router.observability.prometheus import CONTENT_TYPE, by_label

_BODY_BYTES = 64 * 1024
_MOST_BODIES = 64 << 20
"""Bytes of all bodies that are read at a time."""
_METRICS_SECONDS = 2.0
_RETRY_SECONDS = "5"


class ModelStatus(msgspec.Struct, kw_only=True):
    """The phase of a model; ``failed`` with the cause if its last load failed."""

    value: Literal["loaded", "loading", "unloaded", "sleeping"]
    args: list[str]
    failed: bool | UnsetType = UNSET
    cause: str | UnsetType = UNSET
    load_seconds: float | UnsetType = UNSET
    memory_bytes: int


class ListedModel(msgspec.Struct, kw_only=True):
    """A model, or an adapter of a model that was loaded.

    Fields that only a model's own server knows, such as the context length, are there from its
    first load on.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    path: str
    in_cache: bool = True
    status: ModelStatus


class ListedModels(msgspec.Struct, kw_only=True):
    """The answer of ``/models``."""

    object: Literal["list"] = "list"
    data: list[ListedModel]


class NamedModel(msgspec.Struct):
    """The body of ``/models/load`` and ``/models/unload``."""

    model: Name


class Done(msgspec.Struct):
    """The answer of ``/models/load`` and ``/models/unload``."""

    success: bool


@dataclass(slots=True)
class FrontState:
    """What the routes share.

    Attributes:
        draining: this server shuts down.
        bodies: the bodies that are read.
        document: the API's document, once it was asked for.
    """

    manager: ModelManager
    draining: bool = False
    started: float = field(default_factory=time.time)
    bodies: BodyMemory = field(default_factory=lambda: BodyMemory(_MOST_BODIES))
    document: bytes = b""


Answer = Callable[[FrontState, Request], Awaitable[Response]]


class FrontEndpoint(Endpoint):
    """A route of this server, described as those of a model's server are."""

    def __init__(self, path: str, answer: Answer, operation: Operation, method: str) -> None:
        self.operation = operation

        async def endpoint(request: Request) -> Response:
            return await answer(request.app.state.front, request)

        endpoint.__doc__ = inspect.getdoc(answer)
        Route.__init__(self, path, endpoint, methods=[method], name=answer.__name__)


async def health(state: FrontState, request: Request) -> Response:
    """200 unless the server shuts down: a model that is not loaded is loaded for its requests."""
    if state.draining:
        if (record := access_log.record()) is not None:
            record.expected = True
        retry = {"retry-after": _RETRY_SECONDS}
        raise errors.ApiError(503, "unhealthy", "healthcheck", headers=retry)
    return Response(status_code=200)


async def list_models(state: FrontState, request: Request) -> Response:
    """All models with their status, and the adapters of those that were loaded."""
    manager = state.manager
    found: list[dict[str, Any]] = []
    for name, spec in manager.specs.items():
        status = _status(manager, name)
        common = {"path": str(spec.path), "in_cache": True, "status": status}
        created = int(state.started)
        plain = {
            "id": name,
            "object": "model",
            "type": "model",
            "created": created,
            "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "owned_by": name,
            "display_name": name,
        }
        cards = manager.cards.get(name) or [plain]
        # The list has each model once, under the name that it was given.
        others = [name_ for name_ in spec.names if name_ != name]
        found += [card | common for card in cards if card.get("id") not in others]
    ids = [card["id"] for card in found]
    return json_response(
        {
            "object": "list",
            "data": found,
            "has_more": False,
            "first_id": ids[0],
            "last_id": ids[-1],
        }
    )


async def get_model(state: FrontState, request: Request) -> Response:
    """One of them by its name."""
    wanted = request.path_params["model"]
    name = state.manager.resolve(wanted)
    listed = msgspec.json.decode((await list_models(state, request)).body)
    by_id = {card["id"]: card for card in listed["data"]}
    return json_response(by_id.get(wanted) or by_id[name])


async def load_model(state: FrontState, request: Request) -> Response:
    """Load a model in its turn, as for a request; answers at once: the list has the progress."""
    state.manager.load(await _named(state, request))
    return json_response(Done(success=True))


async def unload_model(state: FrontState, request: Request) -> Response:
    """Unload a model when its requests are done; answers at once. A request loads it again."""
    state.manager.unload(await _named(state, request))
    return json_response(Done(success=True))


async def metrics(state: FrontState, request: Request) -> Response:
    """The server's metrics, and those of loaded models by `model`: in Prometheus' text format, or
    in OpenMetrics if the client prefers that."""
    manager = state.manager
    loaded = manager.loaded()
    exemplars = openmetrics.is_accepted(",".join(request.headers.getlist("accept")))
    content_type = openmetrics.CONTENT_TYPE if exemplars else CONTENT_TYPE
    texts = await asyncio.gather(
        *(_metrics_of(process, content_type) for process in loaded.values())
    )
    # Values may hold what else ends lines.
    by_model = {name: text.split("\n") for name, text in zip(loaded, texts, strict=True)}
    lines = [*by_label("model", by_model)]
    own = manager.metrics.lines(manager.scheduler)
    lines += openmetrics.openmetrics(own) if exemplars else own
    registry = CollectorRegistry()
    ProcessCollector(namespace="tgi_front", registry=registry)
    own_process = openmetrics.exposition_of(registry) if exemplars else generate_latest(registry)
    body = "\n".join([*lines, ""]).encode() + own_process
    return Response(body, headers={"content-type": content_type, "vary": "accept"})


async def openapi(state: FrontState, request: Request) -> Response:
    """This API as an OpenAPI 3.1 document."""
    if not state.document:
        state.document = await asyncio.to_thread(_document, request.app.state.guarded)
    return Response(state.document, media_type="application/json")


def _document(guarded: bool) -> bytes:
    """The document, which takes 0.1 s with what it imports."""
    from tgi_cli.router.api.openapi import document
    from tgi_cli.router.app import ROUTES as MODEL_ROUTES

    return msgspec.json.encode(document([*ROUTES, *MODEL_ROUTES], guarded))


async def _metrics_of(process: ModelProcess, content_type: str) -> str:
    try:
        answer = await process.client.get(
            "/metrics", headers={"accept": content_type}, timeout=_METRICS_SECONDS
        )
    except httpx.HTTPError:
        return ""
    return answer.text


async def _named(state: FrontState, request: Request) -> str:
    """The model that the body names. Raises ApiError."""
    body = parse(await read_body(request, _BODY_BYTES, state.bodies), NamedModel)
    return state.manager.resolve(body.model)


def _status(manager: ModelManager, name: str) -> ModelStatus:
    model = manager.scheduler.models[name]
    value: Literal["loaded", "loading", "unloaded", "sleeping"] = "unloaded"
    if model.state in (LoadState.LOADED, LoadState.DRAINING, LoadState.UNLOADING):
        value = "loaded"
    elif model.state is LoadState.LOADING:
        value = "loading"
    elif model.asleep:
        value = "sleeping"
    cause = manager.failures.get(name)
    return ModelStatus(
        value=value,
        args=list(manager.specs[name].arguments),
        failed=UNSET if cause is None else True,
        cause=UNSET if cause is None else cause,
        load_seconds=UNSET if model.load_seconds is None else round(model.load_seconds, 3),
        memory_bytes=model.memory,
    )


_SERVICE = Operation(tag="Service")
_HEALTH = Operation(tag="Service", errors=(503,), public=True)
_LIST = Operation(tag="Models", answer=(ListedModels,))
_GET = Operation(tag="Models", answer=(ListedModel,), errors=(404,))
_CHANGE = Operation(
    tag="Models", body=(NamedModel,), answer=(Done,), errors=(404, 503), example={"model": "NAME"}
)
_METRICS = Operation(tag="Service", answer=(str,), media_type="text/plain", public=True)

ROUTES = [
    FrontEndpoint("/health", health, _HEALTH, "GET"),
    FrontEndpoint("/ping", health, _HEALTH, "GET"),
    FrontEndpoint("/v2/health/live", health, _HEALTH, "GET"),
    FrontEndpoint("/v2/health/ready", health, _HEALTH, "GET"),
    FrontEndpoint("/v1/models", list_models, _LIST, "GET"),
    FrontEndpoint("/models", list_models, _LIST, "GET"),
    FrontEndpoint("/v1/models/{model:path}", get_model, _GET, "GET"),
    FrontEndpoint("/models/load", load_model, _CHANGE, "POST"),
    FrontEndpoint("/models/unload", unload_model, _CHANGE, "POST"),
    FrontEndpoint("/metrics", metrics, _METRICS, "GET"),
    FrontEndpoint("/api-doc/openapi.json", openapi, _SERVICE, "GET"),
]
