"""JSON schemas as they are meant: what lists properties is an object of just these.

Every change only narrows a schema, so that what follows the changed one follows the original.
Keywords are those of https://json-schema.org/draft/2020-12 and of its forerunners.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("prefixItems", "items", "anyOf", "oneOf", "allOf")
_ONES = (
    "items",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)
_ABOUT_OTHERS = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_SAYING_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
"""What libraries write that spell everything out; not every keyword needs to be supported so."""
_DEFINITIONS = ("$defs", "definitions")
_COMBINING = ("anyOf", "oneOf", "allOf", "$ref", "$dynamicRef")

Path = tuple[str | int, ...]


def children(schema: Any) -> Iterator[tuple[Path, Any]]:
    """The schemas within a schema, and where in it they stand."""
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        if isinstance(value, Mapping) and keyword in _MAPS:
            for name, each in value.items():
                yield (keyword, name), each
        elif isinstance(value, list) and keyword in _LISTS:
            for place, each in enumerate(value):
                yield (keyword, place), each
        elif keyword in _ONES and isinstance(value, Mapping | bool):
            yield (keyword,), value


def everywhere(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all within it, booleans left out."""
    waiting = [schema]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, Mapping):
            yield schema
            waiting += (child for _, child in children(schema))


def depth(value: Any) -> int:
    """Levels of objects and lists in a JSON value."""
    deepest = 0
    waiting = [(value, 1)]
    while waiting:
        value, level = waiting.pop()
        within = value.values() if isinstance(value, dict) else value
        if isinstance(value, dict | list):
            deepest = max(deepest, level)
            waiting += ((each, level + 1) for each in within)
    return deepest


def refine(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema as most who write one mean it.

    ``properties`` without a ``type`` means an object, ``items`` a list; JSON Schema itself would
    let any other type pass. An object that lists its properties has no others, unless it says
    ``additionalProperties``; where schemas are combined (``allOf``, or ``properties`` beside
    ``anyOf``, ``oneOf`` or ``$ref``) that cannot be told of the parts, and they stay open. Keywords
    that allow everything are left out.
    """
    close = not any(
        "allOf" in each or ("properties" in each and any(word in each for word in _COMBINING))
        for each in everywhere(schema)
    )
    refined: dict[str, Any] = _refined(schema, close)
    return refined


def _refined(schema: Any, close: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    told = {
        keyword: value
        for keyword, value in schema.items()
        if value not in _SAYING_NOTHING.get(keyword, ())
    }
    for keyword, value in list(told.items()):
        if keyword in _MAPS and isinstance(value, dict):
            told[keyword] = {name: _refined(each, close) for name, each in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            told[keyword] = [_refined(each, close) for each in value]
        elif keyword in _ONES:
            told[keyword] = _refined(value, close)
    if "enum" in told or "const" in told:
        return told
    if isinstance(told.get("properties"), dict):
        told.setdefault("type", "object")
        if close and not any(word in told for word in _ABOUT_OTHERS):
            told["additionalProperties"] = False
    elif "items" in told or "prefixItems" in told:
        told.setdefault("type", "array")
    return told


def pointer(path: Path) -> str:
    """A place as a JSON pointer in a fragment (RFC 6901); ``#`` is the whole."""
    return "#" + "".join(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in path)


def at(schema: Any, reference: str) -> Path | None:
    """Where a ``$ref`` within the same schema leads; None if nowhere, or by an anchor's name."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    path: list[str | int] = []
    for key in reference.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and key.isdigit() and int(key) < len(schema):
            path.append(int(key))
        elif isinstance(schema, dict) and key in schema:
            path.append(key)
        else:
            return None
        schema = schema[path[-1]]
    return tuple(path)


def part(schema: Any, path: Path) -> Any:
    """What stands at a place."""
    for key in path:
        schema = schema[key]
    return schema


def within(schema: Any, path: Path) -> Iterator[Path]:
    """The places of the schemas that the one at ``path`` is made of, references followed.

    Definitions are not, unless they are referred to.
    """
    here = part(schema, path)
    if not isinstance(here, Mapping):
        return
    places = [
        path + step
        for step, child in children(here)
        if step[0] not in _DEFINITIONS and isinstance(child, Mapping)
    ]
    target = at(schema, str(here.get("$ref", "")))
    if target is not None:
        places.append(target)
    for place in places:
        yield _at_the_end(schema, place)


def _at_the_end(schema: Any, path: Path) -> Path:
    """Where a chain of references ends that begins at ``path``: most often there."""
    passed = {path}
    while True:
        here = part(schema, path)
        if not isinstance(here, Mapping) or "$ref" not in here or len(here) > 1:
            return path
        target = at(schema, str(here["$ref"]))
        if target is None or target in passed:
            return path
        passed.add(target)
        path = target


def moved(schema: Any, to: str) -> Any:
    """A schema whose references still hold when it stands under the key ``to`` of a document."""
    if not isinstance(schema, dict):
        return schema
    told = dict(schema)
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str) and (value == "#" or value[:2] == "#/"):
            told[keyword] = f"#/{to}{value[1:]}"
        elif keyword in _MAPS and isinstance(value, dict):
            told[keyword] = {name: moved(each, to) for name, each in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            told[keyword] = [moved(each, to) for each in value]
        elif keyword in _ONES:
            told[keyword] = moved(value, to)
    return told
