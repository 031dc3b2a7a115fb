"""Conversations that continue stored responses, and storing their responses."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tgi_cli.router.api.response_input import Item, input_items
from tgi_cli.router.api.schemas.responses import ResponseObject, ResponsesRequest
from tgi_cli.router.http import errors
from tgi_cli.router.response_store import Items, ResponseStore, StoredResponse
from tgi_cli.router.state import RouterState

MOST_CONVERSATION_BYTES = 4 << 20
"""Most JSON of stored items that one request reads: what no context holds anyway."""
INLINE_BYTES = 64 << 10
"""Most JSON of items that is read or written on the event loop, in half a millisecond."""
_PART = 256
"""Items that are encoded together: one call holds the interpreter lock."""

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Turn:
    """The items of a request.

    Attributes:
        context: The stored items in front of its own.
        own: Its own items.
        items: All of them.
    """

    context: Sequence[Items]
    own: Sequence[Item]
    items: Sequence[Item]


def stores(body: ResponsesRequest, state: RouterState) -> bool:
    """Whether the response is stored."""
    return body.store is not False and state.responses.enabled


async def read_turn(body: ResponsesRequest, state: RouterState) -> Turn:
    """The items of a request, after those of the response that it continues. Raises ApiError."""
    store, own = state.responses, input_items(body)
    context: list[Items] = []
    if body.previous_response_id is not None:
        context = _previous(body.previous_response_id, store).conversation
    wanted = [item for item in own if item.get("type") == "item_reference"]
    referenced = _referenced(wanted, store)
    sources = [*context, *(items for each in referenced for items in _sources(each))]
    size = sum(items.size for items in sources)
    if size > MOST_CONVERSATION_BYTES:
        raise errors.validation(
            f"the stored items of this conversation have {size} bytes, which are more than "
            f"{MOST_CONVERSATION_BYTES}",
            "previous_response_id" if context else "input",
        )
    if not sources:
        return Turn((), own, own)
    if size <= INLINE_BYTES:
        return _turn(context, own, referenced)
    return await state.workers.run(_turn, context, own, referenced)


def _previous(response_id: str, store: ResponseStore) -> StoredResponse:
    stored = store.get(response_id)
    if stored is None:
        raise errors.validation(
            f"Previous response with id '{response_id}' not found. {store.bounds}",
            "previous_response_id",
            "previous_response_not_found",
        )
    if stored.running is not None:
        raise errors.validation(
            f"Previous response with id '{response_id}' is still in progress.",
            "previous_response_id",
        )
    return stored


def _referenced(wanted: Sequence[Item], store: ResponseStore) -> list[StoredResponse]:
    """The responses that have the items that are referred to, each once. Raises ApiError."""
    found: dict[str, StoredResponse] = {}
    for item in wanted:
        item_id = item.get("id")
        stored = store.with_item(item_id) if isinstance(item_id, str) else None
        if stored is None:
            raise errors.validation(f"Item with id '{item_id}' not found. {store.bounds}", "input")
        found[stored.id] = stored
    return list(found.values())


def _sources(stored: StoredResponse) -> list[Items]:
    """The items that belong to a response itself: the request's, and the output."""
    return [*stored.context[-1:], stored.output]


def _turn(
    context: Sequence[Items], own: Sequence[Item], referenced: Sequence[StoredResponse]
) -> Turn:
    ids = {item.get("id") for item in own if item.get("type") == "item_reference"}
    items: dict[Any, Item] = {}
    for stored in referenced:
        for item in decoded(_sources(stored)):
            if item.get("id") in ids:
                items[item["id"]] = item
    own = [
        items.get(item.get("id"), item) if item.get("type") == "item_reference" else item
        for item in own
    ]
    return Turn(context, own, [*decoded(context), *own])


def decoded(given: Sequence[Items]) -> list[dict[str, Any]]:
    """The items, one after the other."""
    return [item for items in given for part in items.parts for item in msgspec.json.decode(part)]


@dataclass(frozen=True, slots=True)
class OwnItems:
    """The own items of a request, as they are stored and listed, and their ids."""

    items: Items
    ids: Sequence[str]


def own_items(turn: Turn) -> OwnItems:
    """Encode the own items of a request."""
    base = uuid.uuid4().hex
    parts: list[bytes] = []
    ids: list[str] = []
    for start in range(0, len(turn.own), _PART):
        part = [
            _stored_item(item, f"{base}{index:04x}")
            for index, item in enumerate(turn.own[start : start + _PART], start)
        ]
        parts.append(_encode(part))
        ids += (item["id"] for item in part)
    return OwnItems(Items(parts), ids)


class ResponseRecord:
    """A response on its way into the store.

    Args:
        response: Is written meanwhile.
        turn: The items of its request.
        own: Those that are not stored yet.
    """

    def __init__(
        self, store: ResponseStore, response: ResponseObject, turn: Turn, own: OwnItems
    ) -> None:
        self._store = store
        self._response = response
        self._ids = own.ids
        self._context = [*turn.context, own.items]

    def save(self, running: asyncio.Task[None] | None = None) -> None:
        """Store the response as it is, with its task as long as that is running."""
        response = self._response
        encoded = _encode(response)
        stored = StoredResponse(
            id=response.id,
            encode=self._live if running else lambda: encoded,
            context=self._context,
            output=Items([_encode([] if running else response.output)]),
            item_ids=[*self._ids, *(item.id for item in response.output)],
            running=running,
        )
        if not self._store.add(stored):
            response.store = False

    def _live(self) -> bytes:
        return _encode(self._response)


def _stored_item(item: Item, unique: str) -> Mapping[str, Any]:
    """An item of the input in the form in which it is listed: with an id, and text as parts."""
    kind = item.get("type") or "message"
    found = {"type": kind, **item}
    if not isinstance(found.get("id"), str) or not found["id"]:
        found["id"] = f"{_PREFIXES.get(kind, 'item')}_{unique}"
    if kind == "message":
        text = item.get("content")
        if isinstance(text, str):
            part: dict[str, Any] = {"type": "input_text", "text": text}
            if item.get("role") == "assistant":
                part = {"type": "output_text", "text": text, "annotations": []}
            found["content"] = [part]
    found.setdefault("status", "completed")
    return found
