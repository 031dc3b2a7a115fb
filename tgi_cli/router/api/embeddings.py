"""OpenAI's embeddings: ``POST /v1/embeddings``, which models that generate text do not make."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.router.http import errors
from tgi_cli.router.state import state_of


async def embeddings(request: Request) -> Response:
    """Always refused: the served model generates text."""
    model = state_of(request).config.model_id
    raise errors.validation(
        f"The model `{model}` generates text: this server makes no embeddings",
        "model",
        "unsupported_value",
    )


ROUTES = [Route(path, embeddings, methods=["POST"]) for path in ("/v1/embeddings", "/embeddings")]
