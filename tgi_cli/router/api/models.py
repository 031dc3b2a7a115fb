"""OpenAI's list of models: ``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_cli.hub.lora_files import BASE_NAME
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import json_response
from tgi_cli.router.state import RouterState, state_of


def _model(model_id: str, **more: str) -> dict[str, object]:
    return {"id": model_id, "object": "model", "created": 0, "owned_by": model_id, **more}


async def _models(state: RouterState) -> dict[str, dict[str, object]]:
    """The served model, then its adapters, as vLLM lists them: by name, with files and base."""
    await state.adapters.refresh()
    served = state.config.model_id
    found = {served: _model(served)}
    for adapter in state.adapters.loaded.loaded:
        found[adapter.name] = _model(adapter.name, root=adapter.path, parent=served)
    return found


async def list_models(request: Request) -> Response:
    """All that requests may name."""
    data = list((await _models(state_of(request))).values())
    return json_response({"object": "list", "data": data})


async def get_model(request: Request) -> Response:
    """One of them by its id; the served model also by TGI's name for it."""
    state = state_of(request)
    asked = request.path_params["model"]
    models = await _models(state)
    found = models.get(state.config.model_id if asked == BASE_NAME else asked)
    if found is None:
        raise errors.no_model(f"The model `{asked}` does not exist")
    return json_response(found)


ROUTES = [
    *(Route(path, list_models, methods=["GET"]) for path in ("/v1/models", "/models")),
    *(
        Route(f"{path}/{{model:path}}", get_model, methods=["GET"])
        for path in ("/v1/models", "/models")
    ),
]
