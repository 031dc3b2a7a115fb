"""Prometheus: ``GET /metrics``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.router.metrics import CONTENT_TYPE
from tgi_cli.router.state import state_of


async def metrics(request: Request) -> Response:
    """The text exposition."""
    state = state_of(request)
    loaded = state.adapters.loaded.loaded
    text = state.metrics.render(state.client.load, state.admission.in_flight, len(loaded))
    return Response(text, headers={"content-type": CONTENT_TYPE})


ROUTES = [Route("/metrics", metrics, methods=["GET"])]
