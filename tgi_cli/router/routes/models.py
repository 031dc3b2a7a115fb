"""OpenAI's list of models: ``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.router.errors import ApiError
from tgi_cli.router.http import json_response
from tgi_cli.router.state import state_of


def _model(model_id: str) -> dict[str, object]:
    return {"id": model_id, "object": "model", "created": 0, "owned_by": model_id}


async def list_models(request: Request) -> Response:
    """The one model that is served."""
    data = [_model(state_of(request).config.model_id)]
    return json_response({"object": "list", "data": data})


async def get_model(request: Request) -> Response:
    """The served model by its id, or by TGI's name for it."""
    served = state_of(request).config.model_id
    asked = request.path_params["model"]
    if asked not in (served, "tgi"):
        raise ApiError(
            404,
            f"The model `{asked}` does not exist",
            "not_found",
            param="model",
            code="model_not_found",
        )
    return json_response(_model(served))


ROUTES = [
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", get_model, methods=["GET"]),
]
