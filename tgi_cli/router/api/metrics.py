"""Prometheus: ``GET /metrics``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.router.observability.engine_metrics import EngineView
from tgi_cli.router.observability.prometheus import CONTENT_TYPE
from tgi_cli.router.state import state_of


async def metrics(request: Request) -> Response:
    """The text exposition."""
    state = state_of(request)
    loaded = state.adapters.loaded
    live = [generation for generation in state.generator.live if generation.spec.adapter]
    view = EngineView(
        model_id=state.config.model_id,
        metrics=await state.client.metrics(),
        max_loras=loaded.max_loras,
        adapters=len(loaded.loaded),
        running=sorted({one.spec.adapter for one in live if one.started}),
        waiting=sorted({one.spec.adapter for one in live if not one.started}),
        vllm=state.config.vllm_metrics,
    )
    text = state.metrics.render(view, state.admission.in_flight)
    return Response(text, headers={"content-type": CONTENT_TYPE})


ROUTES = [Route("/metrics", metrics, methods=["GET"])]
