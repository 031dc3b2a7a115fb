"""Converts Lark grammars without recursion to regular expressions, for text within a JSON string.

A tool that takes free text is called with ``{"input": "TEXT"}`` in most formats of calls.
llguidance cannot hold such a string to a grammar: its lexer looks one byte ahead, and JSON's
escapes have several. Most grammars of tools do not need recursion, and are regular then. The
expression accepts what Lark's default parser does, whose lexemes need not be the longest.
Syntax: https://lark-parser.readthedocs.io/en/stable/grammar.html
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from tgi_cli.text.grammar.grammar import GrammarError
from tgi_cli.text.grammar.json_text import quoted_literal, quoted_range, quoted_regex

MOST_CHARACTERS = 128 * 1024
"""Longest expression: rules that refer to each other often can make it any length."""
_MOST_LEVELS = 100

_TOKEN = re.compile(
    r"""
      (?P<newline>(?://[^\n]*|\#[^\n]*)?(?:\r?\n\s*(?:(?://|\#)[^\n]*)?)+(?!\s*\|)
        |(?://|\#)[^\n]*\Z)
    | (?P<blank>\s+)
    | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<repeat>~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*\d*\s*,?\s*\d*\s*\})
    | (?P<directive>%\w+)
    | (?P<attribute>\[[^\]\n]*\](?=\s*:))
    | (?P<name>\w+)
    | (?P<mark>->|\.\.|.)
    """,
    re.VERBOSE,
)

_DECIMAL = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_EXPONENT = "[eE][+-]?[0-9]+"
_NUMBER = rf"(?:{_DECIMAL}|[0-9]+)(?:{_EXPONENT})?"
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": _DECIMAL,
    "FLOAT": rf"(?:[0-9]+{_EXPONENT}|{_DECIMAL}(?:{_EXPONENT})?)",
    "NUMBER": _NUMBER,
    "SIGNED_NUMBER": f"[+-]?{_NUMBER}",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
"""The terminals of Lark's library, grammars/common.lark."""


def quoted_lark(grammar: str) -> str:
    """The regular expression, in Rust's syntax, of the JSON spellings of the texts of a grammar.

    Raises:
        GrammarError: The grammar is invalid, recursive, or uses more than rules and terminals.
    """
    return _Converter(_Reader(grammar), quotes=True).start()


def plain_lark(grammar: str) -> str:
    """The regular expression, in Rust's syntax, of the texts of a grammar. Raises GrammarError."""
    return _Converter(_Reader(grammar), quotes=False).start()


@dataclass(slots=True)
class _Lexeme:
    kind: str
    text: str


class _Reader:
    """The tokens of each definition of a grammar.

    Attributes:
        definitions: What follows the colon, by the name of the rule or terminal.
        ignored: What follows each ``%ignore``.
    """

    def __init__(self, grammar: str) -> None:
        self.definitions: dict[str, list[_Lexeme]] = {}
        self.ignored: list[list[_Lexeme]] = []
        for line in self._lines(grammar):
            self._read(line)

    @staticmethod
    def _lines(grammar: str) -> list[list[_Lexeme]]:
        lines: list[list[_Lexeme]] = [[]]
        for match in _TOKEN.finditer(grammar):
            assert match.lastgroup is not None
            if match.lastgroup == "newline":
                lines.append([])
            elif match.lastgroup != "blank":
                lines[-1].append(_Lexeme(match.lastgroup, match.group()))
        return [line for line in lines if line]

    def _read(self, line: list[_Lexeme]) -> None:
        first, *rest = line
        if first.text == "%ignore":
            self.ignored.append(rest)
            return
        if first.text == "%import":
            self._import("".join(token.text for token in rest))
            return
        if first.kind == "directive":
            raise _unsupported(first.text)
        while first.text in ("?", "!") and rest:
            first, *rest = rest
        if rest and rest[0].kind == "attribute":
            if rest[0].text.strip("[] ") != "lazy":  # which does not change what matches
                raise _unsupported(rest[0].text)
            rest = rest[1:]
        if first.kind != "name" or not rest or rest[0].text != ":":
            raise GrammarError(f"`{' '.join(token.text for token in line[:4])}` is no rule of Lark")
        if first.text in self.definitions:
            raise GrammarError(f"`{first.text}` is defined twice")
        self.definitions[first.text] = rest[1:]

    def _import(self, text: str) -> None:
        match = re.fullmatch(r"common(?:\.(\w+)(?:->(\w+))?|\.?\(([\w,]+)\))", text)
        if match is None:
            raise _unsupported(f"%import {text}")
        name, alias, several = match.groups()
        for each in several.split(",") if several else [name]:
            if each not in _COMMON:
                raise _unsupported(f"%import common.{each}")
            self.definitions[alias or each] = [_Lexeme("regex", f"/{_COMMON[each]}/")]


class _Converter:
    """Expands the rules, and puts ignored text in front of every terminal of a rule."""

    def __init__(self, reader: _Reader, quotes: bool) -> None:
        self._definitions = reader.definitions
        self._quotes = quotes
        self._found: dict[str, str] = {}
        self._open: list[str] = []
        self._tokens: list[_Lexeme] = []
        self._levels = 0
        self._skip = ""
        if reader.ignored:
            self._skip = f"(?:{'|'.join(self._parse(tokens, True) for tokens in reader.ignored)})*"

    def start(self) -> str:
        return self._named("start") + self._skip

    def _named(self, name: str) -> str:
        if name in self._found:
            return self._found[name]
        if name in self._open:
            raise GrammarError(
                f"the rule `{name}` refers to itself: in this model's calls, the grammar of a tool "
                "cannot be recursive"
            )
        if name not in self._definitions:
            raise GrammarError(f"the rule `{name}` is not defined")
        self._open.append(name)
        found = self._found[name] = self._parse(self._definitions[name], name.isupper())
        self._open.pop()
        return found

    def _parse(self, tokens: list[_Lexeme], terminal: bool) -> str:
        """The expression of a definition."""
        outer, self._tokens = self._tokens, tokens[::-1]
        self._levels += 1
        expression = self._alternatives(terminal)
        self._levels -= 1
        if self._tokens:
            raise GrammarError(f"`{self._tokens[-1].text}` is not expected in a rule")
        self._tokens = outer
        return f"(?:{expression})"

    def _alternatives(self, terminal: bool) -> str:
        if self._levels > _MOST_LEVELS:
            raise GrammarError("its rules are nested too deeply")
        found = [self._sequence(terminal)]
        while self._accept("|"):
            found.append(self._sequence(terminal))
        return _bounded("|".join(found))

    def _sequence(self, terminal: bool) -> str:
        found: list[str] = []
        while self._tokens and self._tokens[-1].text not in ("|", ")", "]"):
            if self._accept("->"):  # names the alternative
                self._tokens[-1:] = []
                break
            found.append(self._item(terminal))
        return _bounded("".join(found))

    def _item(self, terminal: bool) -> str:
        expression = self._atom(terminal)
        while self._tokens and (
            self._tokens[-1].kind == "repeat" or self._tokens[-1].text in ("?", "*", "+")
        ):
            suffix = re.sub(r"\s", "", self._tokens.pop().text)
            if suffix.startswith("~"):
                suffix = f"{{{suffix[1:].replace('..', ',')}}}"
            expression = f"(?:{expression}){suffix}"
        return expression

    def _atom(self, terminal: bool) -> str:
        token = self._tokens.pop()
        kind, text = token.kind, token.text
        if kind == "mark" and text in ("(", "["):
            self._levels += 1
            inner = self._alternatives(terminal)
            self._levels -= 1
            if not self._accept(")" if text == "(" else "]"):
                raise GrammarError(f"`{text}` is not closed")
            return f"(?:{inner})" + ("?" if text == "[" else "")
        if kind == "name":
            expression = self._named(text)
            if not text.isupper():
                return expression
        elif kind == "string":
            expression = self._string(text)
        elif kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            body = body.replace(r"\/", "/")
            if self._quotes:
                expression = f"(?:{quoted_regex(body, flags)})"
            else:
                expression = f"(?{flags}:{body})"
        else:
            raise _unsupported(text)
        return expression if terminal else self._skip + expression

    def _string(self, text: str) -> str:
        value = _value(text.removesuffix("i"))
        if self._accept(".."):
            last = _value(self._tokens.pop().text) if self._tokens else ""
            if len(value) != 1 or len(last) != 1 or value > last:
                raise GrammarError(f"`{text}..` is no range of characters")
            if not self._quotes:
                return rf"[\U{ord(value):08x}-\U{ord(last):08x}]"
            return quoted_range(value, last)
        if not self._quotes:
            return f"(?{'i' if text.endswith('i') else ''}:{re.escape(value)})"
        return f"(?:{quoted_literal(value, text.endswith('i'))})"

    def _accept(self, mark: str) -> bool:
        if not self._tokens or self._tokens[-1] != _Lexeme("mark", mark):
            return False
        self._tokens.pop()
        return True


def _bounded(expression: str) -> str:
    if len(expression) > MOST_CHARACTERS:
        raise GrammarError(f"its rules expand to more than {MOST_CHARACTERS} characters")
    return expression


def _value(literal: str) -> str:
    """The text of a string literal."""
    try:
        found = json.loads(literal, strict=False)
    except ValueError:
        raise GrammarError(f"{literal} is no text") from None
    return str(found)


def _unsupported(text: str) -> GrammarError:
    return GrammarError(f"`{text}` is not supported in the grammar of a tool")
