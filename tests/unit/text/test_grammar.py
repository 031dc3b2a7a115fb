"""Every form in which a request may say what its answer must be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tgi_cli.text.grammar import grammar
from tgi_cli.text.grammar.grammar import GrammarError

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def form(found: grammar.Grammar | None) -> Any:
    return None if found is None else json.loads(found.form)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"type": "json", "value": SCHEMA}, {"json": SCHEMA}),
        ({"type": "json", "value": json.dumps(SCHEMA)}, {"json": json.dumps(SCHEMA)}),
        ({"type": "json_object", "value": SCHEMA}, {"json": SCHEMA}),
        ({"type": "regex", "value": "a+"}, {"regex": "a+"}),
        ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"type": "json_schema", "value": {"schema": SCHEMA}}, {"json": SCHEMA}),
    ],
)
def test_native(asked: Any, expected: Any) -> None:
    assert form(grammar.parse_tgi(asked)) == expected
    # TGI's chats take the same.
    assert form(grammar.parse_response_format(asked)) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json": {"type": "object"}}),
        ({"type": "json_object", "schema": SCHEMA}, {"json": SCHEMA}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            {"json": SCHEMA},
        ),
        ({"type": "json_schema", "name": "x", "schema": SCHEMA}, {"json": SCHEMA}),
        ({"type": "grammar", "grammar": 'start: "a"'}, {"lark": 'start: "a"'}),
        (
            {
                "type": "structural_tag",
                "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
                "triggers": ["<f"],
            },
            {
                "tags": {
                    "first": "",
                    "between": "",
                    "last": "",
                    "otherwise_begin": "",
                    "triggers": ["<f"],
                    "at_least": 0,
                    "at_most": None,
                    "otherwise": None,
                    "structures": [
                        {
                            "name": "",
                            "begin": "<f>",
                            "schema": SCHEMA,
                            "strict": True,
                            "end": "</f>",
                        }
                    ],
                }
            },
        ),
    ],
)
def test_response_format(asked: Any, expected: Any) -> None:
    assert form(grammar.parse_response_format(asked)) == expected


def test_parameters_of_vllm_are_parsed() -> None:
    for name, value, expected in (
        ("json", SCHEMA, {"json": SCHEMA}),
        ("regex", "a", {"regex": "a"}),
        ("choice", ["a", "b"], {"choice": ["a", "b"]}),
        ("grammar", 'root ::= "a"', {"lark": 'root ::= "a"'}),
        ("json_object", True, {"json": {"type": "object"}}),
    ):
        assert form(grammar.parse_guided(f"guided_{name}", value)) == expected
        found = grammar.parse_structured_outputs({name: value, "backend": None, "disable": False})
        assert form(found) == expected
        assert found is not None
        assert found.param == "structured_outputs"
    spaced = {"json": SCHEMA, "whitespace": " *"}
    assert form(grammar.parse_guided("guided_json", SCHEMA, " *")) == spaced
    assert (
        form(grammar.parse_structured_outputs({"json": SCHEMA, "whitespace_pattern": " *"}))
        == spaced
    )
    assert grammar.parse_structured_outputs({}) is None
    tag = {"structures": [{"begin": "<f>"}], "triggers": ["<f>"]}
    for given in (tag, json.dumps(tag)):
        assert "tags" in form(grammar.parse_structured_outputs({"structural_tag": given}))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (5, "it must be an object"),
        ({}, "`type` is missing"),
        ({"type": "json"}, "`value` is missing"),
        ({"type": "json", "value": 5}, "a JSON schema must be an object"),
        ({"type": "regex", "value": {}}, "`value` must be a text"),
        ({"type": "json_schema", "value": "x"}, "`value` must be an object"),
        ({"type": "yaml", "value": "x"}, "`type` must be json, regex or json_schema. Given: yaml"),
    ],
)
def test_invalid_tgi_grammars_are_refused(asked: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        grammar.parse_tgi(asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"type": "yaml"}, "`type` must be text, json_object, json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "`json_schema` has no `schema`"),
        ({"type": "grammar"}, "`grammar` must be a text"),
        ({"type": "json_schema", "json_schema": {"schema": 5}}, "a JSON schema must be an object"),
        ({"type": "structural_tag", "triggers": ["<"]}, "`structures` must be a list"),
        (
            {"type": "structural_tag", "triggers": ["<f"], "structures": [{"begin": "<g>"}]},
            r"`structures\[0\].begin` begins with none of the `triggers`",
        ),
        (
            {"type": "structural_tag", "triggers": [""], "structures": [{"begin": "<g>"}]},
            "`triggers` must be a list of texts",
        ),
    ],
)
def test_invalid_response_formats_are_refused(asked: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        grammar.parse_response_format(asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"json": SCHEMA, "regex": "a"}, "it must have one member. Given: json, regex"),
        ({"choice": []}, "`choice`: it must be a list of texts"),
        ({"choice": [1]}, "`choice`: it must be a list of texts"),
        ({"xml": "a"}, "`xml`: this kind of structured output is not supported"),
        ({"structural_tag": "{"}, "it is not valid JSON"),
    ],
)
def test_invalid_structured_outputs_are_refused(asked: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        grammar.parse_structured_outputs(asked)


def test_size_is_bounded() -> None:
    with pytest.raises(GrammarError, match="it has more than 262144 bytes"):
        grammar.parse_tgi({"type": "regex", "value": "a" * (1 << 18)})
