"""What is served, and within which limits: ``GET /info``."""

from __future__ import annotations

import os

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import tgi_cli
from tgi_cli.router.api.schemas.tgi import Info
from tgi_cli.router.http.bodies import json_response
from tgi_cli.router.state import state_of


async def info(request: Request) -> Response:
    """TGI's fields, and the adapters where there may be any."""
    state = state_of(request)
    config, engine = state.config, state.client.info
    await state.adapters.refresh()
    loaded = state.adapters.loaded
    return json_response(
        Info(
            model_id=config.model_id,
            model_sha=config.revision or engine.revision or None,
            model_pipeline_tag="text-generation",
            max_concurrent_requests=config.max_concurrent_requests,
            max_best_of=config.max_best_of,
            max_stop_sequences=config.max_stop_sequences,
            max_input_tokens=state.generator.info.max_input_tokens,
            max_total_tokens=state.generator.info.max_total_tokens,
            validation_workers=config.validation_workers,
            max_client_batch_size=config.max_client_batch_size,
            router="text-generation-router",
            version=tgi_cli.__version__,
            sha=None,
            docker_label=os.environ.get("DOCKER_LABEL") or None,
            lora_adapters=loaded.names if loaded.max_loras else UNSET,
        )
    )


ROUTES = [Route("/info", info, methods=["GET"])]
