"""Argument values that a model wrote as text, as JSON of the types that a schema allows."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tgi_cli.text.grammar.json_schema import type_of, types_of

STRING = frozenset(("string",))
"""The types of a parameter that is a string."""
_CONSTANTS = {"True": True, "False": False, "None": None}


class ParameterTypes:
    """The JSON types of the parameters of some tools."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") for tool in tools
        }

    def names(self, function: str) -> list[str]:
        """The parameters of a function, in the order of its schema."""
        properties = self._properties(function)
        return list(properties)

    def of(self, function: str, parameter: str) -> frozenset[str] | None:
        """The types of a parameter, or None if any is valid."""
        schema = self._schemas.get(function)
        properties = self._properties(function)
        if parameter not in properties:
            return None
        return types_of(properties[parameter], schema)

    def _properties(self, function: str) -> Mapping[str, Any]:
        schema = self._schemas.get(function)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return properties if isinstance(properties, Mapping) else {}


def to_json(text: str, types: frozenset[str] | None) -> str:
    """The JSON of a value that a model wrote without quotes.

    JSON of the types is passed on verbatim, and Python's literals are converted. Any other text
    becomes a string.
    """
    stripped = text.strip()
    if types != STRING:
        try:
            value = json.loads(stripped, parse_constant=_refuse)
        except (ValueError, RecursionError):
            value, stripped = _literal(stripped)
        if stripped and (types is None or _is_of(value, types)):
            return stripped
        if isinstance(value, float) and value.is_integer() and types and "integer" in types:
            return str(int(value))
    return json.dumps(text, ensure_ascii=False)


def _refuse(text: str) -> Any:
    raise ValueError(text)


def _literal(text: str) -> tuple[Any, str]:
    """The value of a Python literal and its JSON, which is empty if the text is none."""
    if text in _CONSTANTS:
        value = _CONSTANTS[text]
    elif not text.startswith(("{", "[", "(")):
        return None, ""
    else:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None, ""
    if isinstance(value, tuple):
        value = list(value)
    try:
        return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None, ""


def _is_of(value: Any, types: frozenset[str]) -> bool:
    """Whether a value is of one of some JSON types."""
    kind = type_of(value)
    return kind in types or (kind == "integer" and "number" in types)
