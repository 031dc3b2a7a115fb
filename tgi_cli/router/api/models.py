"""The list of models, ``GET /v1/models``, and ``POST /v1/embeddings``, which no model has.

One list answers OpenAI's clients and Anthropic's
(https://docs.anthropic.com/en/api/models-list), and those that read the context length.
"""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.responses import Response

from tgi_cli.config.model_names import BASE_NAME
from tgi_cli.router.api.openai_common import v1_endpoints
from tgi_cli.router.api.schemas.openai_answers import Modalities, ModelCard, ModelList
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import json_response
from tgi_cli.router.http.endpoint import Operation, RequestContext
from tgi_cli.router.state import RouterState

_MOST_LISTED = 1000
_SEES = Modalities(modality="text+image->text", input_modalities=("text", "image"))


async def _models(state: RouterState) -> dict[str, ModelCard]:
    """The served model under its names, then its adapters, with their files and base."""
    await state.adapters.refresh()
    names = state.config.served_names
    found = {}
    for name in names:
        found[name] = _card(name, state)
        if name != state.config.model_id:
            found[name].root = state.config.model_id
    for adapter in state.adapters.loaded.loaded:
        card = found[adapter.name] = _card(adapter.name, state)
        card.root, card.parent = adapter.path, names[0]
    return found


def _card(name: str, state: RouterState) -> ModelCard:
    info = state.generator.info
    created = datetime.fromtimestamp(int(state.started), UTC)
    return ModelCard(
        id=name,
        created=int(state.started),
        created_at=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        owned_by=name,
        display_name=name,
        max_model_len=info.max_total_tokens,
        context_length=info.max_total_tokens,
        max_input_tokens=info.max_input_tokens,
        max_tokens=info.max_total_tokens - 1,
        architecture=Modalities() if state.images is None else _SEES,
    )


async def list_models(context: RequestContext[None]) -> Response:
    """The models and adapters that requests may name; all of them, or Anthropic's pages."""
    query = context.request.query_params
    limit, before, after = (query.get(name) for name in ("limit", "before_id", "after_id"))
    models = list((await _models(context.state)).values())
    ids = [model.id for model in models]
    start, end = 0, len(ids)
    if after is not None:
        start = _place(ids, after, "after_id") + 1
    if before is not None:
        end = _place(ids, before, "before_id")
    count = found = max(end - start, 0)
    if limit is not None:
        count = min(found, _limit(limit))
    page = models[end - count : end] if before is not None else models[start : start + count]
    return json_response(
        ModelList(
            data=page,
            has_more=count < found,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
        )
    )


def _limit(text: str) -> int:
    """The number of models of a page. Raises ApiError."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MOST_LISTED):
        raise errors.validation(f"`limit` must be >= 1 and <= {_MOST_LISTED}", "limit")
    return int(text)


def _place(ids: list[str], name: str, param: str) -> int:
    """The place of a model in the list. Raises ApiError."""
    if name not in ids:
        raise errors.validation(f"`{param}` names no model of the list", param)
    return ids.index(name)


async def get_model(context: RequestContext[None]) -> Response:
    """A model by its id; the served model also by TGI's name for it."""
    name = context.request.path_params["model"]
    models = await _models(context.state)
    found = models.get(context.state.config.served_names[0] if name == BASE_NAME else name)
    if found is None:
        raise errors.no_model(f"The model `{name}` does not exist")
    return json_response(found)


async def embeddings(context: RequestContext[None]) -> Response:
    """Always refused: the served model generates text."""
    raise errors.validation(
        f"The model `{context.state.config.served_names[0]}` generates text: "
        "this server makes no embeddings",
        "model",
        "unsupported_value",
    )


_TEXT = {"type": "string"}
_LIST = Operation(
    tag="OpenAI",
    answer=(ModelList,),
    errors=(422,),
    query={
        "limit": {"type": "integer", "minimum": 1, "maximum": _MOST_LISTED},
        "before_id": _TEXT,
        "after_id": _TEXT,
    },
)
_GET = Operation(tag="OpenAI", answer=(ModelCard,), errors=(404,))

ROUTES = [
    *v1_endpoints("/models", list_models, _LIST, method="GET"),
    *v1_endpoints("/models/{model:path}", get_model, _GET, method="GET"),
    *v1_endpoints("/embeddings", embeddings, Operation(tag="OpenAI", errors=(400,))),
]
