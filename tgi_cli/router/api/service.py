"""The server itself: ``GET /health``, ``/ping``, ``/info``, ``/version`` and ``/metrics``."""

from __future__ import annotations

import os
from dataclasses import replace

from msgspec import UNSET
from starlette.responses import Response

from tgi_cli.engine.messages import EngineInfo
from tgi_cli.router.api.schemas.tgi import Health, Info
from tgi_cli.router.api.schemas.tokenize import Version
from tgi_cli.router.http.bodies import json_response
from tgi_cli.router.http.endpoint import Endpoint, Operation, RequestContext
from tgi_cli.router.http.errors import ApiError
from tgi_cli.router.observability import access_log
from tgi_cli.router.observability.engine_metrics import (
    load_lines,
    lora_lines,
    sleep_lines,
    step_lines,
    vllm_lines,
)
from tgi_cli.router.observability.prometheus import CONTENT_TYPE
from tgi_cli.router.state import RouterState
from tgi_cli.version import __version__


async def health(context: RequestContext[None]) -> Response:
    """200 if the server can answer requests, without content unless the engine sleeps.

    Otherwise 503.
    """
    await check_health(context.state)
    if not context.state.sleep.awake:
        return json_response(Health(status="asleep"))
    return Response(status_code=200)


async def check_health(state: RouterState) -> None:
    """Raise ApiError, 503, if the engine is gone or stalled, or the router is draining.

    An engine that sleeps is healthy.
    """
    draining = state.admission.draining
    if not (draining or state.sleep.awake):
        return  # a request wakes it
    if draining or not state.client.connected or not await state.client.healthy():
        if draining and (request := access_log.record()) is not None:
            request.expected = True
        raise ApiError(503, "unhealthy", "healthcheck", headers={"retry-after": "5"})


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
    """Prometheus' text exposition."""
    state = context.state
    info, engine, loaded = state.client.info, await state.client.metrics(), state.adapters.loaded
    lines = [*load_lines(info, engine, len(loaded.loaded)), *step_lines(engine)]
    sleep = state.sleep
    lines += sleep_lines(sleep.awake, sleep.wakes, sleep.failed_wakes, sleep.wake_seconds)
    vllm = state.config.vllm_metrics
    if vllm:
        lines += vllm_lines(info, engine, state.config.served_names[0])
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
    body = state.metrics.render(state.admission.in_flight, lines)
    return Response(body, headers={"content-type": CONTENT_TYPE})


SERVICE = Operation(tag="Service")
HEALTH = replace(SERVICE, errors=(503,), public=True)

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
