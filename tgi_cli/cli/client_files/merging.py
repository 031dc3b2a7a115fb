"""What a file's content is after settings have been merged into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_IDENTITIES = (("id", "baseUrl"), ("name",))
"""Keys that identify an object in a list: the first of these that a new object has."""


def merged(old: Any, new: Any) -> Any:
    """``old`` with the values of ``new``: objects key by key, all else replaced. None removes a
    key.

    Objects in lists are merged with the object of the same ``id`` and ``baseUrl``, or ``name``;
    new ones come first, because clients start with the first.
    """
    if isinstance(new, Mapping):
        old = old if isinstance(old, dict) else {}
        kept = {key: value for key, value in old.items() if key not in new}
        added = {k: merged(old.get(k), value) for k, value in new.items() if value is not None}
        return kept | added
    if isinstance(old, list) and isinstance(new, list) and has_objects(new):
        items, added_items = list(old), []
        for item in new:
            place = place_of(items, item)
            if place is None:
                added_items.append(item)
            else:
                items[place] = merged(items[place], item)
        return [*added_items, *items]
    return new


def has_objects(items: list[Any]) -> bool:
    """Whether a list consists of objects, which are merged one by one."""
    return bool(items) and all(isinstance(item, dict) for item in items)


def place_of(items: list[Any], wanted: Mapping[str, Any]) -> int | None:
    """The index of the object that ``wanted`` stands for, or None."""
    keys = next(names for names in _IDENTITIES if names[0] in wanted)
    for place, item in enumerate(items):
        if isinstance(item, dict) and all(item.get(key) == wanted.get(key) for key in keys):
            return place
    return None
