"""Completes JSON schemas as their authors mean them, and finds their parts.

Every change narrows a schema, so that values of the changed one are valid for the original.
Keywords are those of https://json-schema.org/draft/2020-12 and earlier drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
_OTHER_PROPERTIES = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_TRIVIAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
"""Values that allow everything. Some libraries write them, also of unsupported keywords."""
_DEFINITIONS = ("$defs", "definitions")
_COMBINING = ("anyOf", "oneOf", "allOf", "$ref", "$dynamicRef")

Path = tuple[str | int, ...]


def children(schema: Any) -> Iterator[tuple[Path, Any]]:
    """The direct subschemas of a schema, with their paths."""
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        if isinstance(value, Mapping) and keyword in _MAPS:
            for name, each in value.items():
                yield (keyword, name), each
        elif isinstance(value, list) and keyword in _LISTS:
            for index, each in enumerate(value):
                yield (keyword, index), each
        elif keyword in _ONES and isinstance(value, Mapping | bool):
            yield (keyword,), value


def everywhere(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all its subschemas, except booleans."""
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
    """Complete a schema as most authors mean it.

    ``properties`` without a ``type`` means an object, ``items`` a list; by JSON Schema, any other
    type would be valid, too. An object with ``properties`` has no others, unless it has
    ``additionalProperties``. Where schemas are combined (``allOf``, or ``properties`` beside
    ``anyOf``, ``oneOf`` or ``$ref``) the parts stay open. Keywords that allow everything are
    dropped.
    """
    close = not any(
        "allOf" in each or ("properties" in each and any(word in each for word in _COMBINING))
        for each in everywhere(schema)
    )
    refined: dict[str, Any] = _refined(schema, close)
    return refined


def _with_parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A schema with other schemas in it."""
    result = dict(schema)
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            result[keyword] = {name: change(each) for name, each in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            result[keyword] = [change(each) for each in value]
        elif keyword in _ONES:
            result[keyword] = change(value)
    return result


def _refined(schema: Any, close: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = {
        keyword: value
        for keyword, value in schema.items()
        if value not in _TRIVIAL.get(keyword, ())
    }
    result = _with_parts(result, lambda each: _refined(each, close))
    if "enum" in result or "const" in result:
        return result
    if isinstance(result.get("properties"), dict):
        result.setdefault("type", "object")
        if close and not any(word in result for word in _OTHER_PROPERTIES):
            result["additionalProperties"] = False
    elif "items" in result or "prefixItems" in result:
        result.setdefault("type", "array")
    return result


def pointer(path: Path) -> str:
    """A path as a JSON pointer in a URI fragment (RFC 6901)."""
    return "#" + "".join(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in path)


def at(schema: Any, reference: str) -> Path | None:
    """The path of a ``$ref`` in the same schema, or None if it is invalid, or an anchor."""
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
    """The part of a schema at a path."""
    for key in path:
        schema = schema[key]
    return schema


def within(schema: Any, path: Path) -> Iterator[Path]:
    """The paths of the subschemas of the schema at ``path``, with references followed.

    Definitions are included only if they are referenced.
    """
    here = part(schema, path)
    if not isinstance(here, Mapping):
        return
    paths = [
        path + step
        for step, child in children(here)
        if step[0] not in _DEFINITIONS and isinstance(child, Mapping)
    ]
    target = at(schema, str(here.get("$ref", "")))
    if target is not None:
        paths.append(target)
    for each in paths:
        yield _follow(schema, each)


def _follow(schema: Any, path: Path) -> Path:
    """The end of the chain of references that begins at ``path``."""
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


def types_of(schema: Any, root: Any) -> frozenset[str] | None:
    """The JSON types of the values that a part of a schema allows, or None if it names none.

    Integers are not numbers here: a schema of type ``number`` has that type alone.
    """
    return _types_of(schema, root, frozenset())


def _types_of(schema: Any, root: Any, passed: frozenset[str]) -> frozenset[str] | None:
    if not isinstance(schema, Mapping):
        return None
    declared = schema.get("type")
    if isinstance(declared, str):
        found = {declared}
    elif isinstance(declared, list):
        found = {each for each in declared if isinstance(each, str)}
    elif "const" in schema or isinstance(schema.get("enum"), list):
        found = {type_of(each) for each in schema.get("enum", [schema.get("const")])}
    elif isinstance(reference := schema.get("$ref"), str):
        path = None if reference in passed else at(root, reference)
        return None if path is None else _types_of(part(root, path), root, passed | {reference})
    elif isinstance(choices := schema.get("anyOf", schema.get("oneOf")), list):
        each = [_types_of(choice, root, passed) for choice in choices]
        if not each or None in each:
            return None
        found = {name for names in each for name in names or ()}
    elif "properties" in schema:
        found = {"object"}
    elif "items" in schema or "prefixItems" in schema:
        found = {"array"}
    else:
        return None
    if schema.get("nullable") is True:
        found = found | {"null"}
    return frozenset(found) or None


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    names = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return names[type(value)]


def moved(schema: Any, to: str) -> Any:
    """A schema whose references hold under the key ``to`` of a document."""
    if not isinstance(schema, dict):
        return schema
    result = _with_parts(schema, lambda each: moved(each, to))
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference[:2] == "#/"):
        result["$ref"] = f"#/{to}{reference[1:]}"
    return result
