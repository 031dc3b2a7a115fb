"""Grammars that compile and cannot be followed are refused before the engine has them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from llguidance import LLParserLimits

from tests.unit.text.test_grammar_compile import compiled, follows
from tgi_cli import demo
from tgi_cli.text.grammar import dry_run
from tgi_cli.text.grammar.grammar import MOST_BYTES, Grammar, GrammarError
from tgi_cli.worker.grammar import load_grammars

COMPLEX = "too many ways to match the same text"
NOTHING = "no text can match it"
READINGS = "the same text can be parsed in too many ways"
RULES = "too many of its rules may apply at one place of the text: at most"

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stars": ({"regex": ".*" * 200}, COMPLEX),
    "optional": ({"regex": "(a?){5000}a{5000}"}, COMPLEX),
    "ambiguous": ({"lark": 'start: s\ns: s s | "a"'}, READINGS),
    "ambiguous with empty": ({"lark": 'start: s\ns: s s | "a" | ""'}, READINGS),
    "very ambiguous": ({"lark": 'start: s\ns: s s s | s s | "a"'}, READINGS),
    "rules": ({"lark": "start: " + " | ".join(f'"w{i}"' for i in range(3000))}, RULES),
    "repeated rule": ({"lark": 'start: "a"{100000}'}, RULES),
    "optional properties": (
        {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(2000)}}},
        RULES,
    ),
    "itself": ({"json": {"$ref": "#"}}, NOTHING),
    "each other": (
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"},
                                                 "b": {"$ref": "#/$defs/a"}}}},
        NOTHING,
    ),
    "rule of itself": ({"lark": "start: start"}, NOTHING),
    "contradiction": ({"regex": r"a[^\s\S]"}, NOTHING),
    "deep": ({"lark": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "nested too deeply"),
    "look-around": ({"regex": "(?=a)b"}, "look-around"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_cause(name: str) -> None:
    form, cause = REFUSED[name]
    with pytest.raises(GrammarError) as raised:
        compiled(form)
    assert cause in str(raised.value)
    for internal in ("<state>", "NoExtensionBias", "lexer", "row", "Parser"):
        assert internal not in str(raised.value)


WORDS = [f'choice {i:05}, its "text"' for i in range(8000)]
USABLE: dict[str, tuple[dict[str, Any], str]] = {
    "choices": ({"choice": WORDS}, WORDS[-1]),
    "choices with a common beginning": ({"choice": ["a" * 200, "a" * 201, ""]}, "a" * 201),
    "enumeration": ({"json": {"enum": WORDS[:3000]}}, '"choice 00007, its \\"text\\""'),
    "long list": ({"json": {"items": {"type": "integer"}, "maxItems": 1000000}}, "[1, 2, 3]"),
    "long text": ({"json": {"type": "string", "maxLength": 100000000}}, '"abc"'),
    "sums": ({"lark": 'start: e\ne: e "+" e | e "*" e | N\nN: /[0-9]+/'}, "1+2*3"),
    "right-recursive": ({"lark": 'start: "a" start | "a"'}, "aaa"),
    "words": ({"regex": r"(\w+ ){1,200}\w+"}, "a b c"),
    "unicode": ({"regex": r"\p{L}{1,1000}"}, "äöü"),
}


@pytest.mark.parametrize("name", USABLE)
def test_large_grammars_within_the_limits_are_accepted(name: str) -> None:
    form, text = USABLE[name]
    grammar = compiled(form)
    assert follows(grammar, text)
    engine = load_grammars(demo.model_path(), 4096, (2, 0))
    assert engine is not None
    try:
        matcher: Any = engine.compile(grammar).result(60)
        for token in engine._tokenizer.tokenize_str(text):
            engine.fill([matcher])
            assert matcher.accept(token), matcher.error
    finally:
        engine.close()


def test_choices_beyond_the_bound_are_refused_by_size() -> None:
    with pytest.raises(GrammarError, match=f"more than {MOST_BYTES} bytes"):
        Grammar.of({"choice": [f"a rather long choice, number {i}" for i in range(20000)]}, "g")


def test_the_check_is_no_wider_than_the_engine() -> None:
    ours, engine = dry_run.matcher_limits(), LLParserLimits()
    for name in ("max_items_in_row", "initial_lexer_fuel", "max_lexer_states", "max_grammar_size"):
        assert getattr(ours, name) == getattr(engine, name)
    assert ours.step_lexer_fuel < engine.step_lexer_fuel
    assert ours.step_max_items < engine.step_max_items


def test_a_grammar_that_is_slow_to_follow_ends_its_own_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the check let through must not hold up everybody's tokens."""
    engine = load_grammars(demo.model_path(), 4096, (2, 0))
    assert engine is not None
    clock = [0.0]

    def late() -> float:
        clock[0] += 0.5
        return clock[0]

    try:
        grammar = compiled({"regex": "a*"})
        slow: Any = engine.compile(grammar).result(60)
        with monkeypatch.context() as patched:
            patched.setattr(time, "thread_time", late)
            (token,) = engine._tokenizer.tokenize_str("a")
            assert slow.accept(token)
            assert slow.accept(token)
            assert engine.fill([slow]).any() == 0
            assert not slow.accept(token)
        assert "takes too long to follow" in slow.error
        other: Any = engine.compile(grammar).result(60)
        for _ in range(10):
            assert engine.fill([other]).any()
            assert other.accept(token)
    finally:
        engine.close()
