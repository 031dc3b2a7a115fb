"""Whatever the grammar of a format lets through is parsed as calls with valid arguments."""

from __future__ import annotations

import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from tests.unit.text import tiny
from tests.unit.text.test_response_parser import calls, form, read
from tgi_cli.text.formats.syntax import LiteralSyntax, TagSyntax
from tgi_cli.text.formats.tools import TOOL_FORMATS
from tgi_cli.text.formats.written import written_calls
from tgi_cli.text.grammar.compile import Compiler
from tgi_cli.text.grammar.grammar import GrammarError, parse_structural_tag
from tgi_cli.text.grammar.tokens import SpecialTokens
from tgi_cli.text.tokenizer import Tokenizer
from tgi_cli.text.tools import tool_grammar

_TOKENIZER = Tokenizer(tiny.byte_level())
_TOKENS = SpecialTokens({"<eos>": 0}, ["<eos>"], [0])
_BYTES = _TOKENS.tokenizer()
_LETTERS = {index: letter for letter, index in enumerate(_TOKENS.letter_ids())}
_COMPILER = Compiler(_TOKENS)
_COMMON = frozenset(b'<>/"}{])(,:|\n=aeprt1') | frozenset("｜".encode())

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 0, "maximum": 20},
        "unit": {"enum": ["c", "f"]},
        "place": {"$ref": "#/$defs/place"},
        "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "code": {"type": "string", "minLength": 2, "maxLength": 4},
        "zone": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "note": {"type": ["string", "null"]},
        "which": {"anyOf": [{"enum": ["any"]}, {"type": "null"}]},
    },
    "required": ["city", "place"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {
                "k": {"type": "string", "maxLength": 5},
                "n": {"type": ["number", "null"]},
                "next": {"$ref": "#/$defs/place"},
            },
            "required": ["k"],
        }
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]


def compiled(name: str, choice: Any, parallel: bool = True, strict: bool = True) -> str:
    tag = tool_grammar(TOOLS, choice, parallel, TOOL_FORMATS[name])
    assert tag is not None
    structures = [{**each, "strict": strict} for each in tag["structures"]]
    triggers = tag["triggers"] if choice == "auto" else []
    found = parse_structural_tag({**tag, "structures": structures, "triggers": triggers})
    return _COMPILER.compile(found.form)


def walk(grammar: str, seed: int, closes: list[str], most: int = 4000) -> str | None:
    """A text of the grammar, letter by letter; None if it gets too long or is no UTF-8."""
    chance = random.Random(seed)
    matcher = LLMatcher(_BYTES, grammar, log_level=0)
    written: list[int] = []
    while len(written) < most:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        if 0 in allowed and (len(allowed) == 1 or chance.random() < 0.5):
            try:
                return bytes(_LETTERS[index] for index in written).decode()
            except UnicodeDecodeError:
                return None
        ids = _BYTES.tokenize_str(chance.choice(closes)) if closes else []
        if ids and chance.random() < 0.25 and matcher.validate_tokens(ids) == len(ids):
            matcher.consume_tokens(ids)
            written += ids
            continue
        letters = [index for index in allowed if index in _LETTERS]
        common = [index for index in letters if _LETTERS[index] in _COMMON]
        index = chance.choice(common if common and chance.random() < 0.85 else letters)
        matcher.consume_token(index)
        written.append(index)
    return None


def closes(name: str) -> list[str]:
    """Texts that end values, which a walk would rarely find."""
    syntax = TOOL_FORMATS[name].syntax
    if isinstance(syntax, TagSyntax):
        return [syntax.close, syntax.pad + syntax.close]
    return [syntax.quotes] if isinstance(syntax, LiteralSyntax) and syntax.quotes else []


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_walks_of_the_grammar_are_valid_calls(name: str) -> None:
    grammar = compiled(name, "required")
    parser = form(_TOKENIZER, name, "harmony" if name == "harmony" else None)
    seen = 0
    for seed in range(12):
        text = walk(grammar, seed, closes(name))
        if text is None:
            continue
        message = read(parser, [text], tools=TOOLS)
        assert message.content == "", text
        assert message.calls, text
        for called, arguments in calls(message):
            if called == "weather":
                jsonschema.validate(arguments, WEATHER)
        seen += len(message.calls)
    assert seen > 5


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_named_function_is_called_once(name: str) -> None:
    grammar = compiled(name, {"function": {"name": "time"}})
    parser = form(_TOKENIZER, name, "harmony" if name == "harmony" else None)
    texts = [walk(grammar, seed, closes(name)) for seed in range(6)]
    found = [read(parser, [text], tools=TOOLS) for text in texts if text is not None]
    assert found
    assert all([call.name for call in each.calls] == ["time"] for each in found)


TRIGGERED = [
    name for name, known in TOOL_FORMATS.items() if known.grammar and known.grammar.trigger
]


@pytest.mark.parametrize("name", TRIGGERED)
def test_a_trigger_in_free_text_begins_a_call(name: str) -> None:
    known = TOOL_FORMATS[name].grammar
    assert known is not None
    matcher = LLMatcher(_BYTES, compiled(name, "auto"), log_level=0)

    def follows(text: str) -> bool:
        ids = _BYTES.tokenize_str(text)
        return matcher.try_consume_tokens(ids) == len(ids)

    assert follows("Text. " + known.trigger)
    assert not matcher.is_accepting()
    call = (known.first + known.begin).replace("NAME", "time").replace("INDEX", "0")
    assert call.startswith(known.trigger)
    assert not matcher.deep_copy().try_consume_tokens(_BYTES.tokenize_str("@@@ more text"))
    assert follows(call[len(known.trigger) :])


def test_strict_schemas_that_tags_cannot_write_are_refused() -> None:
    tools = [{"function": {"name": "f", "parameters": {"allOf": [{"type": "object"}]}}}]
    tag = tool_grammar(tools, "required", True, TOOL_FORMATS["qwen3_coder"])
    assert tag is not None
    [structure] = tag["structures"]
    with pytest.raises(GrammarError, match="schema of `f`: `allOf` is not supported"):
        _COMPILER.compile(parse_structural_tag({**tag, "triggers": []}).form)
    lenient = {**tag, "triggers": [], "structures": [{**structure, "strict": False}]}
    text = walk(_COMPILER.compile(parse_structural_tag(lenient).form), 1, ["</parameter>"])
    assert text is not None
    assert text.startswith("<tool_call>\n<function=f>\n")


MARKED = {
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "</arg_value>"),
    "deepseek_v32": ("｜DSML｜",),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
}
"""Marks that are tokens of models."""


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_what_a_format_writes_is_let_through(name: str, special: bool, choice: str) -> None:
    """Several calls, with the marks as text or as tokens."""
    known = TOOL_FORMATS[name].grammar
    assert known is not None
    if choice == "auto" and not known.trigger:
        return
    marks = MARKED.get(name, ())
    added = {"<eos>": 0, **{mark: index + 1 for index, mark in enumerate(marks)}}
    tokens = SpecialTokens(added, ["<eos>", *(marks if special else ())], [0])
    tag = tool_grammar(TOOLS, choice, True, TOOL_FORMATS[name])
    assert tag is not None
    tag |= {"triggers": tag["triggers"] if choice == "auto" else []}
    grammar = Compiler(tokens).compile(parse_structural_tag(tag).form)
    given = ("weather", {"city": 'a <b> </c> "d"', "place": {"k": "x"}, "hours": [True]})
    text = written_calls(TOOL_FORMATS[name], [given] * (1 if known.single else 3))
    wrong = written_calls(TOOL_FORMATS[name], [("weather", {"place": {"k": "x"}})])
    assert text is not None
    assert wrong is not None
    letters = tokens.tokenizer()

    def follows(text: str) -> bool:
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, marks))})" if marks else "(?!)", text):
            ids += [added[part]] if part in added else letters.tokenize_str(part)
        matcher = LLMatcher(letters, grammar, log_level=0)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert follows(text)
    assert not follows(wrong)


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4", "olmo3", "hermes", "kimi_k3"])
@pytest.mark.parametrize(
    "grammar",
    [{"regex": r'^[a-c"\n]+/$'}, {"lark": 'start: LINE+ "/"\nLINE: /[a-c"]+\\n?/'}],
    ids=["regex", "lark"],
)
def test_custom_tools_hold_their_grammar(name: str, grammar: dict[str, str]) -> None:
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    tools = [{"type": "function", "function": {"name": "patch", "parameters": schema}}]
    tag = tool_grammar(tools, "required", False, TOOL_FORMATS[name])
    assert tag is not None
    structures = [{**each, "text": grammar} for each in tag["structures"]]
    given = parse_structural_tag({**tag, "structures": structures, "triggers": []})
    compiled = _COMPILER.compile(given.form)

    def follows(text: str) -> bool:
        written = written_calls(TOOL_FORMATS[name], [("patch", {"input": text})])
        assert written is not None
        matcher = LLMatcher(_BYTES, compiled, log_level=0)
        ids = _BYTES.tokenize_str(written)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert follows('ab"\nc/')
    assert not follows("abd/")
    assert not follows("ab")
