"""Small texts and objects that are expensive to compile or render."""

from __future__ import annotations

from typing import Any

TEMPLATES = (
    "{{ 'a' * 10**9 }}",
    '{{ "%2000000000d" % 1 }}',
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ 10**10**8 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ (" + "(" * 5000 + "1" + ")" * 5000 + ") }}",
)
REGEXES = (
    "(a?){5000}a{5000}",
    ".*" * 200,
    "(a+)+$",
    "(((a{1,100}){1,100}){1,100}){1,100}",
    "(" * 2000 + "a" + ")" * 2000,
    "[",
    "a{1000000000}",
    "(?=a)b",
    "\\p{L}" * 500,
)
LARKS = (
    'start: start start | "a" |',
    'start: "a"' + ' | "a"' * 20_000,
    "start: " + "(" * 3000 + '"a"' + ")" * 3000,
    "start: /(a?){5000}a{5000}/",
    "start: start",
    'root ::= root root | "a" | ""',
)
SCHEMA_TEXTS = ('{"$ref":"#"}', '{"type":"object",', "[" * 5000, '{"enum":[]}')

TEXTS: dict[str, tuple[str, ...]] = {
    "templates": TEMPLATES,
    "regular expressions": REGEXES,
    "grammars": LARKS,
    "schemas as text": SCHEMA_TEXTS,
}
"""By kind; sent as every string of every schema."""


def schemas() -> list[dict[str, Any]]:
    """Return recursive, exponential, unsatisfiable and large JSON schemas."""
    chain: dict[str, Any] = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)
    }
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    return [
        {"$ref": "#"},
        {"$ref": "#/$defs/d0", "$defs": chain | {"d40": {"type": "string"}}},
        {"$ref": "http://127.0.0.1:1/schema"},
        {"type": "string", "pattern": "(a?){5000}a{5000}"},
        {"type": "string", "minLength": 10**9},
        {"type": "string", "maxLength": 10**400},
        {"type": "array", "items": {}, "minItems": 10**9},
        {"type": "integer", "minimum": -(10**400), "multipleOf": 10**300},
        {"type": "number", "multipleOf": 1e-300},
        {"enum": [f"value {n}" for n in range(20_000)]},
        {"anyOf": [{"type": "object", "properties": {f"k{n}": {}}} for n in range(2000)]},
        {"type": "object", "properties": {f"k{n}": {"type": "string"} for n in range(5000)}},
        {"type": "object", "properties": {}, "required": [f"k{n}" for n in range(5000)]},
        {"not": {}},
        {"type": "banana", "properties": 7, "required": {}, "enum": 3},
        deep,
    ]


def objects() -> dict[str, list[Any]]:
    """Return the values sent as every free-form object: bare and wrapped schemas, messages."""
    bare = schemas()
    regexes, larks = REGEXES[:4], LARKS[:2]
    choices = [f"choice {n}" for n in range(20_000)]
    return {
        "schemas": bare,
        "schemas as response_format": [
            {"type": "json_schema", "json_schema": {"name": "a", "schema": each}} for each in bare
        ],
        "schemas as grammar": [{"type": "json", "value": each} for each in bare]
        + [{"type": "json_schema", "value": each} for each in bare[:2]]
        + [{"type": "json_schema", "name": "a", "schema": each} for each in bare[:6]]
        + [{"type": "regex", "value": each} for each in regexes],
        "schemas as structured_outputs": [{"json": each} for each in bare]
        + [{"regex": each} for each in regexes]
        + [{"grammar": each} for each in larks]
        + [{"choice": choices}, {"choice": [""]}, {"choice": []}, {"structural_tag": "{}"}]
        + [{"json": {}, "regex": "a"}],
        "messages of other forms": [
            {"type": "function_call", "call_id": "a", "name": "a", "arguments": "[" * 100_000},
            {"type": "function_call_output", "call_id": "a", "output": "a" * 500_000},
            {"type": "reasoning", "summary": [], "content": [{"type": "a", "text": "a" * 9}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]
             * 20_000},
            {"role": "user", "content": "a" * 500_000},
            {"function": {"name": "a" * 100_000, "arguments": "{" * 100_000}},
        ],
    }  # fmt: skip
