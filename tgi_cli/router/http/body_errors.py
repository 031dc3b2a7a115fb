"""Errors of bodies that are not valid JSON or have the wrong types.

msgspec's messages end with a path, such as ``$.messages[0].content``, where ``[...]`` is any key
of an object; OpenAI's errors name the parameter separately.
"""

from __future__ import annotations

import re

from tgi_cli.router.http.errors import ApiError

_PATH = re.compile(r"(?P<cause>.*) - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`", re.DOTALL)
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


def invalid_json(cause: str) -> ApiError:
    """A body that is not valid JSON."""
    message = f"Failed to parse the request body as JSON: {cause}"
    return ApiError(400, message, "validation", plain=True)


def wrong_types(cause: str) -> ApiError:
    """Valid JSON that does not match the endpoint's type; ``cause`` is msgspec's message."""
    message, param, code = describe(cause)
    return ApiError(
        422,
        f"Failed to deserialize the JSON body into the target type: {cause}",
        "validation",
        param=param,
        code=code,
        openai_message=message,
        plain=True,
    )


def describe(cause: str) -> tuple[str, str | None, str]:
    """Message, parameter (None for the body itself) and code of OpenAI's error."""
    found = _PATH.fullmatch(cause)
    path = found["path"].replace("[...]", "") if found else ""
    cause = found["cause"] if found else cause
    missing = _MISSING.fullmatch(cause)
    if missing:
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return f"Missing required parameter: '{name}'.", name, "missing_required_parameter"
    named = _NAMED.match(cause)
    if named:
        return cause, named["name"], "invalid_type"
    code = _code(cause)
    what = "type" if code == "invalid_type" else "value"
    where = f"'{path}'" if path else "the request's body"
    return f"Invalid {what} for {where}: {cause[:1].lower()}{cause[1:]}", path or None, code


def _code(cause: str) -> str:
    for pattern, codes in ((_LENGTH, _LENGTHS), (_RANGE, _RANGES)):
        found = pattern.match(cause)
        if found:
            return codes.get((found["kind"], found["sign"][0]), "invalid_value")
    return "invalid_type" if _TYPE.match(cause) else "invalid_value"
