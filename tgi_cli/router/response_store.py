"""Keeps responses in memory, so that later requests can refer to them.

The store is bounded by the number of responses, their bytes and their age; the oldest go first.
A response keeps the items of those before it in its conversation even when they are gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MOST_RESPONSES = 4096
ENTRY_BYTES = 1024
"""What a response costs beside its JSON: objects and dictionary entries."""
ITEM_BYTES = 128
"""What the id of an item costs beside its characters."""


@dataclass(eq=False, slots=True)
class Items:
    """Items of one request or response, which several conversations may share.

    Attributes:
        parts: JSON arrays. A long one would hold the interpreter lock while it is read.
        users: The stored responses that have them.
    """

    parts: Sequence[bytes]
    users: int = 0

    @property
    def size(self) -> int:
        """Length of the JSON."""
        return sum(map(len, self.parts))


@dataclass(eq=False, slots=True)
class StoredResponse:
    """A response, with the conversation that it belongs to.

    Attributes:
        id: Its id.
        encode: Encodes the response as it is now.
        context: Items of the input: those of earlier turns, then the request's own.
        output: Items of the output.
        item_ids: Ids of the request's items and of the output's.
        running: The task that generates it in the background, if any.
    """

    id: str
    encode: Callable[[], bytes]
    context: Sequence[Items]
    output: Items
    item_ids: Sequence[str] = ()
    running: asyncio.Task[None] | None = None
    stored_at: float = field(default_factory=time.monotonic)
    own_bytes: int = 0

    @property
    def conversation(self) -> list[Items]:
        """All items up to and including the response's."""
        return [*self.context, self.output]


class ResponseStore:
    """The stored responses of a router.

    Args:
        most_bytes: Bytes that they may take together; 0: none is stored.
        seconds: How long each is kept.
        clock: The time in seconds.
    """

    def __init__(
        self, most_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most_bytes = most_bytes
        self.seconds = seconds
        self.bytes = 0
        self._clock = clock
        self._responses: dict[str, StoredResponse] = {}
        """Responses by id, the oldest first."""
        self._items: dict[str, str] = {}
        """The response that has the item."""

    @property
    def enabled(self) -> bool:
        """Whether responses are stored at all."""
        return self.most_bytes > 0 and self.seconds > 0

    @property
    def bounds(self) -> str:
        """What is kept, for error messages."""
        if not self.enabled:
            return "This server stores no responses: send the whole conversation as `input`."
        return (
            f"This server keeps responses for {self.seconds:g} seconds, at most {MOST_RESPONSES} "
            f"and {self.most_bytes} bytes of them, unless `store` is false."
        )

    def __len__(self) -> int:
        return len(self._responses)

    def get(self, response_id: str) -> StoredResponse | None:
        """The response, or None if it is unknown or too old."""
        self._expire()
        return self._responses.get(response_id)

    def with_item(self, item_id: str) -> StoredResponse | None:
        """The response that has an item, in its own input or its output."""
        self._expire()
        return self._responses.get(self._items.get(item_id, ""))

    def add(self, stored: StoredResponse) -> bool:
        """Store a response, or replace it; drops the oldest if there are too many.

        Returns whether it is stored: one that alone exceeds the bounds is not.
        """
        self.remove(stored.id)
        conversation = stored.conversation
        stored.stored_at = self._clock()
        stored.own_bytes = (
            ENTRY_BYTES
            + 8 * len(conversation)
            + len(stored.encode())
            + sum(ITEM_BYTES + len(item_id) for item_id in stored.item_ids)
        )
        if stored.own_bytes + sum(items.size for items in conversation) > self.most_bytes:
            return False
        self.bytes += stored.own_bytes
        for items in conversation:
            self.bytes += 0 if items.users else items.size
            items.users += 1
        self._responses[stored.id] = stored
        for item_id in stored.item_ids:
            self._items.setdefault(item_id, stored.id)
        self._expire()
        return True

    def remove(self, response_id: str) -> bool:
        """Forget a response. Returns whether there was one."""
        stored = self._responses.pop(response_id, None)
        if stored is None:
            return False
        self.bytes -= stored.own_bytes
        for items in stored.conversation:
            items.users -= 1
            self.bytes -= 0 if items.users else items.size
        for item_id in stored.item_ids:
            if self._items.get(item_id) == response_id:
                del self._items[item_id]
        return True

    def _expire(self) -> None:
        oldest = self._clock() - self.seconds
        for stored in list(self._responses.values()):
            full = len(self._responses) > MOST_RESPONSES or self.bytes > self.most_bytes
            if not full and stored.stored_at > oldest:
                return
            if stored.running is None:  # a running one is bounded by the requests in flight
                self.remove(stored.id)
