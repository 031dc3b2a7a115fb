"""What grammars let through, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from tgi_cli.text.grammar.compile import Compiler
from tgi_cli.text.grammar.grammar import Grammar, GrammarError, parse_structural_tag
from tgi_cli.text.grammar.tokens import SpecialTokens

TOKENS = SpecialTokens(
    {"<eos>": 0, "<|call|>": 1, "<tool_call>": 2, "<think>": 3}, ["<eos>", "<|call|>"], [0]
)
COMPILER = Compiler(TOKENS)
TOKENIZER = TOKENS.tokenizer()
NAMES = sorted(TOKENS.ids)


def compiled(form: dict[str, Any]) -> str:
    return COMPILER.compile(Grammar.of(form, "g").form)


def follows(grammar: str, *parts: str) -> bool:
    """Whether parts, one after the other, are all of a text of the grammar.

    Those that name a special token are that token.
    """
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    for part in parts:
        ids = [TOKENS.ids[part]] if part in TOKENS.ids else TOKENIZER.tokenize_str(part)
        if matcher.try_consume_tokens(ids) < len(ids):
            return False
    return matcher.is_accepting()


def test_json_follows_its_schema() -> None:
    schema = {
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name"],
    }
    for given in (schema, json.dumps(schema)):
        grammar = compiled({"json": given})
        assert follows(grammar, '{"name": "x", "age": 3}')
        assert follows(grammar, '{"name":"x"}')
        for wrong in (
            '{"name": "x", "age": -3}',
            '{"age": 3}',
            '{"name": "x", "other": 1}',
            '"x"',
            '{"name":  "x"}',
            '{\n"name": "x"}',
            '{"name": "x"} ',
        ):
            assert not follows(grammar, wrong), wrong


def test_white_space() -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert follows(compiled({"json": schema, "whitespace": "[\n ]*"}), '{\n  "a" :1 }')
    own = {**schema, "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    assert follows(compiled({"json": own}), '{\n\t"a": 1}')
    with pytest.raises(GrammarError, match="`not` is not supported"):
        compiled({"json": {**own, "not": {}}})


def test_non_objects_and_recursive_references() -> None:
    assert follows(compiled({"json": {"items": {"type": "boolean"}}}), "[true, false]")
    assert follows(compiled({"json": True}), '[{"a": null}]')
    node = {"properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["v"]}
    grammar = compiled({"json": node})
    assert follows(grammar, '{"v": 1, "next": {"v": 2, "next": {"v": 3}}}')
    assert not follows(grammar, '{"v": 1, "next": {"next": {"v": 3}}}')


TEXT = {"type": "string"}
OBJECT: dict[str, Any] = {"type": "object"}

SUPPORTED: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": ["string", "null"]}, ["a", None], [1]),
    ({"enum": [1, "a", [2]]}, [1, "a", [2]], [3]),
    ({"const": {"a": 1}}, [{"a": 1}], [{"a": 2}]),
    ({"type": "integer", "minimum": 3, "exclusiveMaximum": 7}, [3, 6], [2, 7]),
    ({"type": "integer", "multipleOf": 5}, [10], [11]),
    ({"type": "number", "maximum": 1.5}, [1.5], [1.6]),
    ({**TEXT, "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["a", "abcd"]),
    ({**TEXT, "pattern": "^a+$"}, ["aa"], ["b"]),
    ({**TEXT, "format": "date"}, ["2024-02-29"], ["2024-13-01"]),
    ({**TEXT, "format": "date-time"}, ["2024-01-31T10:00:00Z"], ["now"]),
    ({**TEXT, "format": "email"}, ["a@example.com"], ["a"]),
    ({**TEXT, "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["1"]),
    ({**TEXT, "format": "ipv4"}, ["10.0.0.1"], ["10.0.0.256"]),
    ({"items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1]], [[], [1, 2, 3]]),
    ({"prefixItems": [TEXT], "items": False}, [["a"]], [["a", 1]]),
    ({"properties": {"a": TEXT}, "required": ["a"]}, [{"a": "b"}], [{}, {"a": 1}]),
    ({**OBJECT, "additionalProperties": {"type": "integer"}}, [{"x": 1}], [{"x": "y"}]),
    ({**OBJECT, "patternProperties": {"^n": TEXT}, "additionalProperties": False},
     [{"n1": "a"}], [{"m": "a"}]),
    ({**OBJECT, "minProperties": 1}, [{"a": 1}], [{}]),
    ({"anyOf": [TEXT, {"type": "integer"}]}, ["a", 1], [None]),
    ({"oneOf": [TEXT, {"type": "integer"}]}, ["a", 1], [None]),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, [3], [2]),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}}, [1], ["a"]),
    ({"$ref": "#/definitions/x", "definitions": {"x": {"type": "integer"}}}, [1], ["a"]),
    ({"$ref": "#x", "$defs": {"y": {"$anchor": "x", "type": "integer"}}}, [1], ["a"]),
    ({**OBJECT, "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"},
      "unevaluatedProperties": True, "dependentRequired": {}}, [{"x": 1}], [{"x": "y"}]),
    ({"items": {"type": "integer"}, "uniqueItems": False}, [[1, 1]], ["a"]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://example.com/x",
      "title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c",
      "deprecated": True, "type": "integer"}, [1], ["a"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), SUPPORTED, ids=lambda v: str(v)[:40])
def test_supported_keywords(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    grammar = compiled({"json": schema})
    for value in valid:
        assert follows(grammar, json.dumps(value, ensure_ascii=False)), value
    for value in invalid:
        assert not follows(grammar, json.dumps(value, ensure_ascii=False)), value


REFUSED: list[tuple[Any, str]] = [
    *[
        ({"properties": {"a": {"items": {"type": kind, keyword: value}}}},
         f"JSON schema keyword `{keyword}` is not supported (at #/properties/a/items)")
        for kind, keyword, value in (
            ("object", "not", {}),
            ("object", "dependentRequired", {"a": ["b"]}),
            ("object", "dependentSchemas", {"a": {}}),
            ("object", "propertyNames", {"pattern": "a"}),
            ("object", "unevaluatedProperties", False),
            ("array", "uniqueItems", True),
            ("array", "contains", {}),
            ("array", "unevaluatedItems", False),
            ("string", "$dynamicRef", "#x"),
        )
    ],
    ({"items": {"not": {}, "uniqueItems": False}},
     "JSON schema keyword `not` is not supported (at #/items)"),
    ({"if": {}, "then": {}, "else": {}},
     "JSON schema keywords `else`, `if`, `then` are not supported (at #)"),
    ({"anyOf": [TEXT, {"$ref": "#/$defs/x"}], "$defs": {"x": {"prefixItems": [{"not": {}}]}}},
     "JSON schema keyword `not` is not supported (at #/$defs/x/prefixItems/0)"),
    ({"properties": {"next": {"$ref": "#"}, "b": {"$ref": "#/properties/next"},
                     "c": {"not": {}}}},
     "JSON schema keyword `not` is not supported (at #/properties/c)"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]},
     "`oneOf` is only supported where the alternatives exclude each other: use `anyOf` (at #)"),
    ({"$ref": "https://example.com/schema.json"},
     "'https://example.com/schema.json' is not known: only references within the schema are "
     "followed (at #)"),
    ({"items": {"$ref": "file:///etc/passwd"}},
     "'file:///etc/passwd' is not known: only references within the schema are followed "
     "(at #/items)"),
    ({"items": {"$ref": "#/$defs/x"}}, "`$ref` '#/$defs/x' leads nowhere (at #/items)"),
    ({"items": {**TEXT, "format": "iban"}}, "`format` 'iban' is not supported (at #/items)"),
    ({"items": {**TEXT, "pattern": "a["}},
     "`pattern`: unclosed character class at position 1 of the regex a[ (at #/items)"),
    ({"items": {"type": "text"}}, "Invalid type: text (at #/items)"),
    ({"type": "integer", "minimum": 3, "maximum": 2},
     "Unsatisfiable schema: minimum (3) is greater than maximum (2) (at #)"),
    ({"properties": []}, "properties must be an object (at #)"),
    (False, "a JSON schema must be an object"),
    ("[1]", "a JSON schema must be an object"),
    ("{", "it is not valid JSON: Expecting property name enclosed in double quotes: "
     "line 1 column 2 (char 1)"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=lambda v: str(v)[:60])
def test_errors_name_the_keyword_and_its_path(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError) as error:
        compiled({"json": schema})
    assert str(error.value) == message


def test_depth_is_bounded() -> None:
    schema: Any = TEXT
    for _ in range(60):
        schema = {"items": schema}
    compiled({"json": schema})
    for _ in range(5):
        schema = {"items": schema}
    for given in (schema, json.dumps(schema), '{"items":' * 20_000 + "{}" + "}" * 20_000):
        with pytest.raises(GrammarError, match="nested"):
            compiled({"json": given})


def test_regex() -> None:
    grammar = compiled({"regex": r"^((25[0-5]|1?\d?\d)\.){3}\d+/\w$"})
    assert follows(grammar, "10.0.255.7/x")
    assert not follows(grammar, "10.0.255/x")
    assert not follows(grammar, "٣.0.0.0/x")  # \d is ASCII, as in TGI
    assert not follows(grammar, "10.0.255.7/ä")
    assert follows(compiled({"regex": "a\nb|ü.?"}), "a\nb")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("ab[", "invalid regex at position 2: unclosed character class"),
        (r"\d/\d/a{3", "invalid regex at position 7: unclosed counted repetition"),
        ("x(?=a)", "invalid regex at position 1: look-around, including look-ahead and "
         "look-behind, is not supported"),
        (r"(a)\1", "invalid regex at position 3: backreferences are not supported"),
        (r"\bword", r"invalid regex: lookarounds not supported yet; WordUnicode in regex /\bword/"),
    ],
)  # fmt: skip
def test_a_regex_is_refused_with_the_position(pattern: str, message: str) -> None:
    with pytest.raises(GrammarError) as error:
        compiled({"regex": pattern})
    assert str(error.value) == message


def test_choice() -> None:
    grammar = compiled({"choice": ["yes", 'no "\\', "a\nb"]})
    assert all(follows(grammar, text) for text in ("yes", 'no "\\', "a\nb"))
    assert not follows(grammar, "no")


def test_lark_and_gbnf() -> None:
    assert follows(compiled({"lark": 'start: "a" number\nnumber: /[0-9]+/'}), "a12")
    assert follows(compiled({"lark": 'root ::= "a" [0-9]+'}), "a12")
    assert follows(compiled({"lark": 'start: <|call|> "x"'}), "<|call|>", "x")
    with pytest.raises(GrammarError, match="unknown name"):
        compiled({"lark": "start: nothing"})
    with pytest.raises(GrammarError, match="unknown special token"):
        compiled({"lark": "start: <|nothing|>"})
    with pytest.raises(GrammarError, match="neither Lark nor GBNF"):
        compiled({"lark": "hello"})


WEATHER = {"properties": {"city": TEXT}, "required": ["city"]}


def hermes(**fields: Any) -> str:
    """Calls of two tools, by a marker that is a token but not a special one."""
    structures = [
        {
            "name": name,
            "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
            "schema": schema,
            "end": "}\n</tool_call>",
        }
        for name, schema in (("weather", WEATHER), ("time", None))
    ]
    tag = {"triggers": ["<tool_call>"], "structures": structures, "between": "\n", **fields}
    return COMPILER.compile(parse_structural_tag(tag).form)


CALL = '\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WRONG = '\n{"name": "weather", "arguments": {"town": "Köln"}}\n</tool_call>'
OTHER = '\n{"name": "time", "arguments": {"zone": 1}}\n</tool_call>'


@pytest.mark.parametrize("marker", [("<tool_call>",), ("<tool_ca", "ll>")], ids=["token", "text"])
def test_text_with_calls_in_it(marker: tuple[str, ...]) -> None:
    grammar = hermes()
    assert follows(grammar, "No call at all: <tool, a < b.\n")
    assert follows(grammar, *marker, CALL)
    assert follows(grammar, "<think>", "Hm.", *marker, CALL, " and ", *marker, OTHER, "\nDone.")
    assert not follows(grammar, "Hm.", *marker, WRONG)
    assert not follows(grammar, "<think>", "Hm.", *marker, CALL, *marker, WRONG)
    assert not follows(grammar, *marker, "free text")
    alone = hermes(at_most=1)
    assert follows(alone, "text only")
    assert follows(alone, "Hm.", *marker, CALL)
    assert not follows(alone, *marker, CALL, *marker, CALL)


def test_calls_alone() -> None:
    grammar = hermes(at_least=1)
    assert follows(grammar, "<tool_call>", CALL)
    assert follows(grammar, "<tool_call>", CALL, "\n", "<tool_call>", OTHER)
    assert not follows(grammar, "text")
    assert not follows(grammar, "text", "<tool_call>", CALL)
    assert not follows(grammar, "<tool_call>", WRONG)
    assert not follows(
        hermes(at_least=1, at_most=1), "<tool_call>", CALL, "\n", "<tool_call>", OTHER
    )


def test_calls_in_a_list_behind_a_special_token() -> None:
    tag: dict[str, Any] = {
        "triggers": ["<|call|>"],
        "structures": [{"begin": '{"arguments": ', "schema": WEATHER, "end": "}"}],
        "first": "<|call|> [",
        "between": ", ",
        "last": "]",
    }
    one = '{"arguments": {"city": "x"}}'
    for least in (0, 1):
        grammar = COMPILER.compile(parse_structural_tag({**tag, "at_least": least}).form)
        assert follows(grammar, "<|call|>", f" [{one}]")
        assert follows(grammar, "<|call|>", f" [{one}, {one}]")
        assert not follows(grammar, "<|call|>", f" [{one}, ]")
        assert follows(grammar, "text") == (not least)
        # The letters of a special token are not the token.
        assert follows(grammar, "<|ca", f"ll|> [{one}]") == (not least)


def test_a_tools_schema_is_refused_by_its_name() -> None:
    structures = [{"name": "f", "begin": "<tool_call>", "schema": {"items": {"not": {}}}}]
    with pytest.raises(GrammarError) as error:
        COMPILER.compile(
            parse_structural_tag({"triggers": ["<tool_call>"], "structures": structures}).form
        )
    assert str(error.value) == (
        "schema of `f`: JSON schema keyword `not` is not supported (at #/items)"
    )


def test_only_strict_schemas_are_refused_in_structures() -> None:
    schema = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    structure = {"name": "f", "begin": "<tool_call>", "schema": schema, "end": "."}
    tag: dict[str, Any] = {"triggers": ["<tool_call>"], "at_least": 1}
    for strict in (True, None):
        with pytest.raises(GrammarError, match="`uniqueItems` is not supported"):
            COMPILER.compile(
                parse_structural_tag({**tag, "structures": [{**structure, "strict": strict}]}).form
            )
    lenient = {**tag, "structures": [{**structure, "strict": False}]}
    grammar = COMPILER.compile(parse_structural_tag(lenient).form)
    assert follows(grammar, "<tool_call>", '{"a": [1, 1]}.')
    assert not follows(grammar, "<tool_call>", "[].")


def test_calls_or_something_else() -> None:
    grammar = hermes(otherwise=Grammar.of({"json": WEATHER}, "response_format"))
    assert follows(grammar, "<tool_call>", CALL)
    assert follows(grammar, '{"city": "x"}')
    assert not follows(grammar, "text")
    assert not follows(grammar, "<tool_call>", WRONG)


def behind(inside: bool, **before: str) -> str:
    found = Grammar.of({"json": WEATHER}, "g").behind({**before, "inside": inside})
    return COMPILER.compile(found.form)


def test_reasoning_may_come_before() -> None:
    before = {"open": "<think>", "close": "</think>", "then": ""}
    grammar = behind(False, **before)
    assert follows(grammar, '{"city": "x"}')
    assert follows(grammar, "<think>", 'Hm. {"', '</think>\n\n{"city": "x"}')
    assert follows(grammar, "<thi", 'nk>Hm.</think>{"city": "x"}')
    assert not follows(grammar, "<think>", "Hm.</think>\n\nNo.")
    assert not follows(grammar, 'Hm.</think>{"city": "x"}')
    within = behind(True, **before)
    assert follows(within, 'Hm.</think>\n\n{"city": "x"}')
    assert not follows(within, '{"city": "x"}')
    tag = hermes_behind(before)
    assert follows(tag, "<think>", "Hm.", "</think>\n", "<tool_call>", CALL)
    assert not follows(tag, "<think>", "Hm.", "</think>\n", "text")


def hermes_behind(before: dict[str, str]) -> str:
    begin = '<tool_call>\n{"name": "weather", "arguments": '
    structure = {"begin": begin, "schema": WEATHER, "end": "}\n</tool_call>"}
    tag = {"triggers": ["<tool_call>"], "structures": [structure], "at_least": 1}
    return COMPILER.compile(parse_structural_tag(tag).behind({**before, "inside": False}).form)


def test_marked_content_is_constrained_behind_its_marker() -> None:
    before = {"open": "<|call|>thought", "close": "<|call|>end", "then": "<|call|>final"}
    grammar = behind(False, **before)
    assert follows(grammar, "<|call|>", 'final{"city": "x"}')
    thought = ("<|call|>", "thought", "Hm.", "<|call|>", "end")
    assert follows(grammar, *thought, *thought, "<|call|>", 'final{"city": "x"}')
    assert not follows(grammar, *thought, '{"city": "x"}')
    plain = behind(False, open="", close="", then="<|call|>final")
    assert follows(plain, "<|call|>", 'final{"city": "x"}')
    assert not follows(plain, '{"city": "x"}')
