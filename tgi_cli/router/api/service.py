"""The server itself: ``GET /health``, ``/ping``, ``/info``, ``/version`` and ``/metrics``."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

from msgspec import UNSET
from starlette.responses import Response

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.router.api.schemas.service import Health, ReplicaHealth
from tgi_cli.router.api.schemas.tgi import Info
from tgi_cli.router.api.schemas.tokenize import Version
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import json_response
from tgi_cli.router.http.endpoint import Endpoint, Operation, RequestContext
from tgi_cli.router.http.errors import ApiError
from tgi_cli.router.observability import access_log, openmetrics
from tgi_cli.router.observability.engine_metrics import (
    load_lines,
    lora_lines,
    routing_lines,
    sleep_lines,
    step_lines,
    vllm_lines,
)
from tgi_cli.router.observability.prometheus import CONTENT_TYPE, by_label
from tgi_cli.router.replicas.pool import EnginePool, replicas_of
from tgi_cli.router.state import RouterState
from tgi_cli.version import __version__


async def health(context: RequestContext[None]) -> Response:
    """200 if the server can answer requests, also while it sleeps; otherwise 503. Of several
    replicas one suffices, the answer has the health of each, ``replica`` asks for that of one."""
    state = context.state
    replica = _replica(context.request.query_params.get("replica"), state)
    replicas = await check_health(state, replica)
    if not state.sleep.awake:
        return json_response(Health(status="asleep"))
    if len(replicas) == 1:
        return Response(status_code=200)
    return json_response(
        Health(
            status="ok" if all(replicas) else "degraded",
            replicas=[
                ReplicaHealth(replica=index, healthy=healthy)
                for index, healthy in enumerate(replicas)
            ],
        )
    )


async def check_health(state: RouterState, replica: int | None = None) -> list[bool]:
    """The health of each replica.

    Raises ApiError, 503, if all are gone or stalled, or the one that is asked for, or the router is
    draining. Without ``replica``, those that sleep are healthy: a request wakes them.
    """
    draining = state.admission.draining
    if not draining:
        client = state.client
        if replica is None and not state.sleep.awake:
            return [True] * len(replicas_of(client))
        if isinstance(client, EnginePool):
            replicas = await client.health()
        else:
            replicas = [client.connected and await client.healthy()]
        if any(replicas) if replica is None else replicas[replica]:
            return replicas
    if (draining or replica is not None) and (request := access_log.record()) is not None:
        request.expected = True
    raise ApiError(503, "unhealthy", "healthcheck", headers={"retry-after": "5"})


def _replica(text: str | None, state: RouterState) -> int | None:
    """The number of a replica, or None for all. Raises ApiError."""
    if text is None:
        return None
    count = len(replicas_of(state.client))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < count):
        raise errors.validation(f"`replica` must be >= 0 and < {count}", "replica")
    return int(text)


def _pipeline(engine: EngineInfo) -> str:
    """The Hub's name of what the model does."""
    return "text2text-generation" if engine.decoder_start_ids else "text-generation"


async def info(context: RequestContext[None]) -> Response:
    """The served model, its limits, and the adapters where there may be any."""
    state = context.state
    config, engine = state.config, state.client.info
    await state.adapters.refresh()
    loaded = state.adapters.loaded
    return json_response(
        Info(
            model_id=config.model_id,
            model_sha=config.revision or engine.revision or None,
            model_pipeline_tag=_pipeline(engine),
            max_concurrent_requests=config.max_concurrent_requests,
            max_best_of=config.max_best_of,
            max_stop_sequences=config.max_stop_sequences,
            max_input_tokens=state.generator.info.max_input_tokens,
            max_total_tokens=state.generator.info.max_total_tokens,
            validation_workers=config.validation_workers,
            max_client_batch_size=config.max_client_batch_size,
            router="text-generation-router",
            version=__version__,
            sha=None,
            docker_label=os.environ.get("DOCKER_LABEL") or None,
            lora_adapters=loaded.names if loaded.max_loras else UNSET,
        )
    )


async def version(context: RequestContext[None]) -> Response:
    """The version of this server."""
    return json_response(Version(version=__version__))


async def metrics(context: RequestContext[None]) -> Response:
    """Prometheus' text exposition, or OpenMetrics with exemplars if the client prefers that; the
    engine's metrics are by replica if there are several."""
    state = context.state
    accept = ",".join(context.request.headers.getlist("accept"))
    exemplars = openmetrics.is_accepted(accept)
    loaded = state.adapters.loaded
    vllm = state.config.vllm_metrics
    client = state.client
    engines = replicas_of(client)
    measured = await asyncio.gather(*(engine.metrics() for engine in engines))
    expositions = []
    for engine, values in zip(engines, measured, strict=True):
        info = engine.info
        lines = [*load_lines(info, values, len(engine.adapters.loaded)), *step_lines(values)]
        if vllm:
            lines += vllm_lines(info, values, state.config.served_names[0])
        expositions.append(lines)
    if isinstance(client, EnginePool):
        by_replica = {str(replica): lines for replica, lines in enumerate(expositions)}
        lines = [*by_label("replica", by_replica), *routing_lines(client)]
    else:
        (lines,) = expositions
    sleep = state.sleep
    lines += sleep_lines(sleep.awake, sleep.wakes, sleep.failed_wakes, sleep.wake_seconds)
    if loaded.max_loras:
        live = state.generator.live
        running = {one.spec.adapter for one in live if one.started} - {""}
        waiting = {one.spec.adapter for one in live if not one.started} - {""}
        labels = {
            "max_lora": str(loaded.max_loras),
            "running_lora_adapters": ",".join(sorted(running)),
            "waiting_lora_adapters": ",".join(sorted(waiting)),
        }
        for prefix in ("tgi_", "vllm:") if vllm else ("tgi_",):
            lines += lora_lines(prefix, labels)
    body = state.metrics.render(state.admission.in_flight, lines, exemplars)
    content_type = openmetrics.CONTENT_TYPE if exemplars else CONTENT_TYPE
    return Response(body, headers={"content-type": content_type, "vary": "accept"})


SERVICE = Operation(tag="Service")
HEALTH = replace(
    SERVICE,
    query={"replica": {"type": "integer", "minimum": 0}},
    errors=(422, 503),
    public=True,
)

ROUTES = [
    Endpoint("/health", health, HEALTH, method="GET"),
    Endpoint("/ping", health, HEALTH, method="GET"),
    Endpoint("/ping", health, replace(HEALTH, public=False)),
    Endpoint("/info", info, replace(SERVICE, answer=(Info,)), method="GET"),
    Endpoint("/version", version, replace(SERVICE, answer=(Version,)), method="GET"),
    Endpoint(
        "/metrics",
        metrics,
        replace(SERVICE, answer=(str,), media_type="text/plain", public=True),
        method="GET",
    ),
]
