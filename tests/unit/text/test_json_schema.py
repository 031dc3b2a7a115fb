"""What is made of a schema before it is compiled, and how its parts are found."""

from __future__ import annotations

from typing import Any

import pytest

from tgi_cli.text.grammar import json_schema

TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "refined"),
    [
        (
            {"properties": {"a": TEXT}},
            {"properties": {"a": TEXT}, "type": "object", "additionalProperties": False},
        ),
        (
            {"type": ["object", "null"], "properties": {}},
            {"type": ["object", "null"], "properties": {}, "additionalProperties": False},
        ),
        ({"items": TEXT}, {"items": TEXT, "type": "array"}),
        ({"prefixItems": [TEXT]}, {"prefixItems": [TEXT], "type": "array"}),
        ({"type": "object", "required": ["a"]}, {"type": "object", "required": ["a"]}),
        ({"enum": [1], "properties": {}}, {"enum": [1], "properties": {}}),
        (
            {"properties": {}, "additionalProperties": TEXT},
            {"properties": {}, "additionalProperties": TEXT, "type": "object"},
        ),
        (
            {"properties": {}, "patternProperties": {"^x": TEXT}},
            {"properties": {}, "patternProperties": {"^x": TEXT}, "type": "object"},
        ),
        (
            {"allOf": [{"properties": {"a": TEXT}}, {"properties": {"b": TEXT}}]},
            {
                "allOf": [
                    {"properties": {"a": TEXT}, "type": "object"},
                    {"properties": {"b": TEXT}, "type": "object"},
                ]
            },
        ),
        (
            {"anyOf": [{"properties": {"a": TEXT}}, {"type": "null"}]},
            {
                "anyOf": [
                    {"properties": {"a": TEXT}, "type": "object", "additionalProperties": False},
                    {"type": "null"},
                ]
            },
        ),
        (
            {"properties": {"a": TEXT}, "anyOf": [{"required": ["a"]}]},
            {"properties": {"a": TEXT}, "anyOf": [{"required": ["a"]}], "type": "object"},
        ),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {}}}},
            {
                "$ref": "#/$defs/x",
                "$defs": {
                    "x": {"properties": {}, "type": "object", "additionalProperties": False}
                },
            },
        ),
        ({"properties": 5}, {"properties": 5}),
        ({"properties": {"properties": TEXT}, "default": {"properties": {}}},
         {"properties": {"properties": TEXT}, "default": {"properties": {}}, "type": "object",
          "additionalProperties": False}),
    ],
)  # fmt: skip
def test_refine(schema: dict[str, Any], refined: dict[str, Any]) -> None:
    before = repr(schema)
    assert json_schema.refine(schema) == refined
    assert repr(schema) == before


def test_paths_of_subschemas() -> None:
    schema = {"properties": {"a/b": {"items": [TEXT]}, "~": True}, "$defs": {"x": {"not": {}}}}
    places = dict(json_schema.children(schema))
    assert places == {
        ("properties", "a/b"): {"items": [TEXT]},
        ("properties", "~"): True,
        ("$defs", "x"): {"not": {}},
    }
    assert json_schema.pointer(("properties", "a/b", "items", 0)) == "#/properties/a~1b/items/0"
    assert json_schema.at(schema, "#/properties/a~1b/items/0") == ("properties", "a/b", "items", 0)
    assert json_schema.at(schema, "#") == ()
    assert json_schema.at(schema, "#/properties/c") is None
    assert json_schema.at(schema, "#anchor") is None
    assert json_schema.at(schema, "https://example.com/#/properties") is None


def test_references_hold_where_a_schema_is_moved() -> None:
    schema = {"$ref": "#", "anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#y"}], "const": {"$ref": "#"}}
    assert json_schema.moved(schema, "x") == {
        "$ref": "#/x",
        "anyOf": [{"$ref": "#/x/$defs/x"}, {"$ref": "#y"}],
        "const": {"$ref": "#"},
    }


def test_depth() -> None:
    assert json_schema.depth({}) == 1
    assert json_schema.depth({"a": [1, {"b": 2}], "c": "[[[["}) == 3
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert json_schema.depth(deep) == 100_001
