"""OpenAI's stored responses: the routes below ``/v1/responses/{response_id}``."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response

from tgi_cli.router.api.openai_common import v1_endpoints
from tgi_cli.router.api.response_state import INLINE_BYTES, decoded
from tgi_cli.router.api.schemas import responses as schemas
from tgi_cli.router.http import errors
from tgi_cli.router.http.bodies import json_response
from tgi_cli.router.http.endpoint import Operation, RequestContext
from tgi_cli.router.response_store import StoredResponse

_MOST_LISTED = 100
_LISTED = 20


async def get_response(context: RequestContext[None]) -> Response:
    """A stored response, or how far it is in the background."""
    stored = _stored(context)
    if context.request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise errors.unsupported("stream", "a `stream` of a stored response")
    return json_response(msgspec.Raw(stored.encode()))


async def delete_response(context: RequestContext[None]) -> Response:
    """Forgets a stored response; one in the background is cancelled."""
    stored = _stored(context)
    await _cancel(stored)
    context.state.responses.remove(stored.id)
    return json_response(schemas.DeletedResponse(id=stored.id))


async def cancel_response(context: RequestContext[None]) -> Response:
    """Cancels a response in the background; one that has ended stays as it is."""
    stored = _stored(context)
    response = msgspec.json.decode(stored.encode(), type=_Background)
    if not response.background:
        raise errors.validation(
            "Only responses with `background` can be cancelled: close the connection of others",
            "response_id",
        )
    await _cancel(stored)
    return json_response(msgspec.Raw(_stored(context).encode()))


async def list_input_items(context: RequestContext[None]) -> Response:
    """The items that a stored response answers, those of earlier turns included."""
    stored = _stored(context)
    query = context.request.query_params
    limit = _limit(query.get("limit"))
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise errors.validation(f"`order` must be asc or desc. Given: {order}", "order")
    size = sum(items.size for items in stored.context)
    if size <= INLINE_BYTES:
        page = _page(stored, order == "desc", after, limit)
    else:
        page = await context.state.workers.run(_page, stored, order == "desc", after, limit)
    return json_response(page)


def _page(
    stored: StoredResponse, descending: bool, after: str | None, limit: int
) -> schemas.ItemList:
    items = decoded(stored.context)
    if descending:
        items.reverse()
    start = 0
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            raise errors.validation(f"`after` names no item: '{after}'", "after")
        start = places[0] + 1
    data = items[start : start + limit]
    return schemas.ItemList(
        data=data,
        first_id=data[0]["id"] if data else None,
        last_id=data[-1]["id"] if data else None,
        has_more=start + limit < len(items),
    )


def _limit(given: str | None) -> int:
    if given is None:
        return _LISTED
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:9]) <= _MOST_LISTED:
        raise errors.validation(f"`limit` must be between 1 and {_MOST_LISTED}", "limit")
    return int(given)


class _Background(msgspec.Struct):
    background: bool


def _stored(context: RequestContext[Any]) -> StoredResponse:
    """The response that the path names. Raises ApiError."""
    response_id, store = context.request.path_params["response_id"], context.state.responses
    stored = store.get(response_id)
    if stored is None:
        raise errors.ApiError(
            404,
            f"Response with id '{response_id}' not found. {store.bounds}",
            "not_found",
            param="response_id",
        )
    return stored


async def _cancel(stored: StoredResponse) -> None:
    """End the task of a response in the background, and wait until it is stored."""
    task = stored.running
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


_PATH = "/responses/{response_id}"
_GET = Operation(tag="OpenAI", answer=(schemas.ResponseObject,), errors=(400, 404))
_DELETE = Operation(tag="OpenAI", answer=(schemas.DeletedResponse,), errors=(404,))
_LIST = Operation(tag="OpenAI", answer=(schemas.ItemList,), errors=(400, 404))

ROUTES = [
    *v1_endpoints(_PATH, get_response, _GET, method="GET"),
    *v1_endpoints(_PATH, delete_response, _DELETE, method="DELETE"),
    *v1_endpoints(f"{_PATH}/cancel", cancel_response, _GET),
    *v1_endpoints(f"{_PATH}/input_items", list_input_items, _LIST, method="GET"),
]
