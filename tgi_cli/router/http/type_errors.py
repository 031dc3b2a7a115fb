"""What msgspec says of a body that has the wrong types, in OpenAI's words.

msgspec appends the place, such as ``$.messages[0].content``; ``[...]`` is an entry of an object
whose key it does not tell.
"""

from __future__ import annotations

import re

_PLACE = re.compile(r"(?P<cause>.*) - at (?:`key` in )?`\$\.?(?P<place>[^`]*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_NAMED = re.compile(r"`(?P<name>\w+)` must be ")
_LENGTH = re.compile(r"Expected `(?P<kind>\w+)` of length (?P<sign>[<>]=?)")
_RANGE = re.compile(r"Expected `(?P<kind>int|float)` (?P<sign>[<>]=?)")
_TYPE = re.compile(r"Expected `[^`]*`, got `")

_LENGTHS = {
    ("str", "<"): "string_above_max_length",
    ("str", ">"): "string_below_min_length",
    ("array", "<"): "array_above_max_length",
    ("array", ">"): "array_below_min_length",
    ("object", "<"): "object_above_max_properties",
    ("object", ">"): "object_below_min_properties",
}
_RANGES = {
    ("int", "<"): "integer_above_max_value",
    ("int", ">"): "integer_below_min_value",
    ("float", "<"): "decimal_above_max_value",
    ("float", ">"): "decimal_below_min_value",
}


def describe(cause: str) -> tuple[str, str | None, str]:
    """Message, parameter (None: the body itself) and code of OpenAI's error."""
    found = _PLACE.fullmatch(cause)
    place = found["place"].replace("[...]", "") if found else ""
    cause = found["cause"] if found else cause
    missing = _MISSING.fullmatch(cause)
    if missing:
        name = f"{place}.{missing['name']}" if place else missing["name"]
        return f"Missing required parameter: '{name}'.", name, "missing_required_parameter"
    named = _NAMED.match(cause)
    if named:
        return cause, named["name"], "invalid_type"
    code = _code(cause)
    what = "type" if code == "invalid_type" else "value"
    where = f"'{place}'" if place else "the request's body"
    return f"Invalid {what} for {where}: {cause[:1].lower()}{cause[1:]}", place or None, code


def _code(cause: str) -> str:
    for pattern, codes in ((_LENGTH, _LENGTHS), (_RANGE, _RANGES)):
        found = pattern.match(cause)
        if found:
            return codes.get((found["kind"], found["sign"][0]), "invalid_value")
    return "invalid_type" if _TYPE.match(cause) else "invalid_value"
