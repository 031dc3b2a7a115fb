"""OpenAI's list of models, ``GET /v1/models``, and ``POST /v1/embeddings``, which no model has."""

from __future__ import annotations

from starlette.responses import Response

from tgi_cli.hub.lora_files import BASE_NAME
from tgi_cli.router.api.openai_common import openai_endpoints
from tgi_cli.router.api.schemas.openai_answers import ModelCard, ModelList
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import json_response
from tgi_cli.router.http.endpoint import Operation, RequestContext
from tgi_cli.router.state import RouterState


async def _models(state: RouterState) -> dict[str, ModelCard]:
    """The served model, then its adapters by name, as in vLLM with their files and base."""
    await state.adapters.refresh()
    served = state.config.model_id
    found = {served: ModelCard(id=served, created=0, owned_by=served)}
    for adapter in state.adapters.loaded.loaded:
        found[adapter.name] = ModelCard(
            id=adapter.name,
            created=0,
            owned_by=adapter.name,
            root=adapter.path,
            parent=served,
        )
    return found


async def list_models(context: RequestContext[None]) -> Response:
    """The models and adapters that requests may name."""
    return json_response(ModelList(data=list((await _models(context.state)).values())))


async def get_model(context: RequestContext[None]) -> Response:
    """One of them by its id; the served model also by TGI's name for it."""
    name = context.request.path_params["model"]
    models = await _models(context.state)
    found = models.get(context.state.config.model_id if name == BASE_NAME else name)
    if found is None:
        raise errors.no_model(f"The model `{name}` does not exist")
    return json_response(found)


async def embeddings(context: RequestContext[None]) -> Response:
    """Always refused: the served model generates text."""
    raise errors.validation(
        f"The model `{context.state.config.model_id}` generates text: "
        "this server makes no embeddings",
        "model",
        "unsupported_value",
    )


_LIST = Operation(tag="OpenAI", answer=(ModelList,))
_GET = Operation(tag="OpenAI", answer=(ModelCard,), errors=(404,))

ROUTES = [
    *openai_endpoints("/models", list_models, _LIST, method="GET"),
    *openai_endpoints("/models/{model:path}", get_model, _GET, method="GET"),
    *openai_endpoints("/embeddings", embeddings, Operation(tag="OpenAI", errors=(400,))),
]
