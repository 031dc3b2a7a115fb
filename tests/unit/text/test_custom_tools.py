"""Free text of tools: the grammar of its calls, and reading it out of JSON."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher

from tgi_cli.text.custom_calls import CustomInput
from tgi_cli.text.grammar.compile import Compiler
from tgi_cli.text.grammar.grammar import GrammarError, parse_structural_tag
from tgi_cli.text.grammar.lark_regex import quoted_lark
from tgi_cli.text.grammar.tokens import SpecialTokens

TOKENS = SpecialTokens({"<eos>": 0}, ["<eos>"], [0])
COMPILER = Compiler(TOKENS)
TOKENIZER = TOKENS.tokenizer()

EDIT = r"""
start: head edit+ "end" LF?   // one or more
head: "edit" " " NAME LF
# a comment between rules

edit: add | drop
    | "move " /(.+)/ LF -> moved
add: ("+" | "@" [" "]) /(.*)/ LF
drop: "-"~2..3 "X".."Z" LF
NAME[lazy]: /\w+\.?/
%import common.LF
"""


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    ids = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def call(**text: str) -> str:
    """The compiled grammar of a call whose input has this form."""
    structure = {"name": "t", "begin": "<", "schema": {"type": "object"}, "end": ">"}
    tag = {"triggers": [], "at_least": 1, "at_most": 1, "structures": [{**structure, "text": text}]}
    return COMPILER.compile(parse_structural_tag(tag).form)


def holds(grammar: str, text: str) -> bool:
    return accepts(grammar, f"<{json.dumps({'input': text}, ensure_ascii=False)}>")


@pytest.mark.parametrize(
    ("lark", "texts", "others"),
    [
        (
            EDIT,
            [
                "edit a\n+one\nend",
                'edit a.\n+say "hi" \\ \n@ \n---Y\nmove x\ty\nend\n',
                "edit a\n@two ü 🤗\nend",
            ],
            [
                "edit a\nend",
                "edit a\n+one\nend\n\n",
                "edit a\n-X\nend",
                "edit a\n----X\nend",
                "edit",
            ],
        ),
        (r'start: /[^"]*/', ["a\nb\x01\\"], ['"']),
        (r'start: /[\s"]+/', ['\n\t "'], ["x", ""]),
        (r'start: "a\"B"i', ['A"b', 'a"B'], ['a\\"B']),
        (r"start: /a.b/s /c/i", ["a\nbC"], ["a\nb"]),
        (r"start: /a\/b/", ["a/b"], [r"a\/b"]),
        ('start: " ".."~"', ['"', "\\", "~"], ["\n", "ab"]),
        (
            "start: NUMBER ESCAPED_STRING\n%import common (NUMBER, ESCAPED_STRING)\n"
            "%import common.WS -> GAP\n%ignore GAP",
            ['1.5e3\n"a\\"b"', '1""', '  1 "x" '],
            ["1", '1 " "x'],
        ),
        ('start: a{2} b*\n?a: "x" | "y"\n!b: "z"', ["xy", "yyzz"], ["x", "xyx"]),
    ],
)
def test_call_holds_text_of_a_lark_grammar(lark: str, texts: list[str], others: list[str]) -> None:
    grammar = call(lark=lark)
    for text in texts:
        assert holds(grammar, text), text
    for text in others:
        assert not holds(grammar, text), text


@pytest.mark.parametrize("pattern", [r'[a-z]+ "\d{2}"\\', r'^[a-z]+ "\d{2}"\\$'])
def test_call_holds_text_of_a_regex(pattern: str) -> None:
    grammar = call(regex=pattern)
    assert holds(grammar, 'ab "12"\\')
    assert not holds(grammar, 'ab "12"')
    assert not holds(grammar, 'x ab "12"\\')


@pytest.mark.parametrize("pattern", ["a/b", r"a\/b", r"a[\/]b", "a[/]b", r"a\x2fb"])
def test_slash_in_a_regex_does_not_end_it(pattern: str) -> None:
    assert holds(call(regex=pattern), "a/b")


def test_escaped_dollar_at_the_end_of_a_regex_is_kept() -> None:
    grammar = call(regex=r"\d+\$")
    assert holds(grammar, "5$")
    assert not holds(grammar, "5")


@pytest.mark.parametrize(
    ("lark", "cause"),
    [
        ('start: "(" start ")"', "the rule `start` refers to itself"),
        ("start: a\na: b\nb: a?", "the rule `a` refers to itself"),
        ("start: other", "`other` is not defined"),
        ('rule: "a"', "`start` is not defined"),
        ('start: "a"\nstart: "b"', "`start` is defined twice"),
        ('start: ("a"', "`(` is not closed"),
        ('start: "a")', "`)` is not expected"),
        ("start: <special>", "`<` is not supported"),
        ("start: @other", "`@` is not supported"),
        ("start: /a/ & /b/", "`&` is not supported"),
        ("start: ~/a/", "`~` is not supported"),
        ('start: %json {"type": "object"}', "`%json` is not supported"),
        ('%llguidance {}\nstart: "a"', "`%llguidance` is not supported"),
        ('start[suffix="x"]: "a"', '`[suffix="x"]` is not supported'),
        ("start: SQL\n%import common.SQL_COMMENT", "`%import common.SQL_COMMENT` is not"),
        ("start: /a/x", "the flag `x`"),
        ("start: /(?=a)/", "`(?=` is not supported"),
        (r"start: /[a&&b]/", "the class [a&&b] is not supported"),
        (r"start: /\bx/", r"`\b` is not supported"),
        (r"start: /[\p{L}]/", "is not supported"),
        ("start: /[a/", "the class at position 0 is not closed"),
        ("start: /[z-a]/", "invalid regex"),
        ('start: "z".."a"', "no range of characters"),
        ("start", "is no rule of Lark"),
        ("", "`start` is not defined"),
        (
            "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(30)) + '\na30: "x"',
            "expand to more than",
        ),
        ("start: " + "(" * 5000, "nested too deeply"),
        ("start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(200)), "nested too deeply"),
    ],
)
def test_grammars_that_cannot_be_held_are_refused(lark: str, cause: str) -> None:
    with pytest.raises(GrammarError) as caught:
        call(lark=lark)
    assert str(caught.value).startswith("grammar of `t`: ")
    assert cause in str(caught.value)


def test_invalid_regex_is_refused_by_name() -> None:
    with pytest.raises(GrammarError, match="grammar of `t`: "):
        call(regex="a(")


@pytest.mark.parametrize("text", [None, {}, {"lark": 5}, {"other": "x"}, "start"])
def test_text_of_a_structure_is_checked(text: object) -> None:
    structure = {"begin": "<", "text": text}
    tag = {"triggers": ["<"], "structures": [structure]}
    if text is None:
        assert b"text" not in parse_structural_tag(tag).form
        return
    with pytest.raises(GrammarError, match=r"structures\[0\]\.text"):
        parse_structural_tag(tag)


def test_alternatives_of_a_rule_do_not_leak() -> None:
    assert quoted_lark('start: x "c"\nx: "a" | "b"').count("|") == 1
    grammar = call(lark='start: x "c"\nx: "a" | "b"')
    assert holds(grammar, "ac")
    assert not holds(grammar, "a")


TEXT = 'quote " slash \\ / line\nbell\x07 ü 🤗 end'


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_input_is_read_while_it_arrives(ascii_only: bool, step: int) -> None:
    arguments = json.dumps({"before": [1], "input": TEXT, "after": "x"}, ensure_ascii=ascii_only)
    stream = CustomInput()
    found = [
        stream.push(arguments[start : start + step]) for start in range(0, len(arguments), step)
    ]
    assert "".join(found) == TEXT
    assert stream.finish() == ""
    if step == 1:
        assert len([piece for piece in found if piece]) > len(TEXT) // 2
        assert not any("\ud800" <= char <= "\udfff" for piece in found for char in piece)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "cut o', "cut o"),
        ('{"input": "cut\\', "cut"),
        ('{"input": "cut\\u00e', "cut"),
        ('{"input": "cut\\ud83e\\udd1', "cut"),
        ('{"input": "cut\\u00e9', "cuté"),
        ('{"input": "bad \\x escape"}', "bad \\x escape"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"text": "x"}', '{"text": "x"}'),
        ("{}", "{}"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
def test_nothing_of_odd_arguments_is_lost(arguments: str, expected: str, step: int) -> None:
    stream = CustomInput()
    found = [
        stream.push(arguments[start : start + step]) for start in range(0, len(arguments), step)
    ]
    assert "".join(found) + stream.finish() == expected
