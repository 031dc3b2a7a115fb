"""Whether requests would be answered: ``GET /health``, ``GET /ping`` and ``GET /``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.router.http.errors import ApiError
from tgi_cli.router.state import state_of


async def health(request: Request) -> Response:
    """200 and nothing; 503 when the engine is gone or stuck, or the router is about to stop."""
    await check(request)
    return Response(status_code=200)


async def check(request: Request) -> None:
    """Raise ApiError, 503, unless requests would be answered."""
    state = state_of(request)
    if state.admission.draining or not state.client.connected or not await state.client.healthy():
        raise ApiError(503, "unhealthy", "healthcheck", headers={"retry-after": "5"})


ROUTES = [
    Route("/health", health, methods=["GET"]),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/", health, methods=["GET"]),
]
