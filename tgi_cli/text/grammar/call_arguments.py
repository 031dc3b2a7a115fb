"""Grammars of tool calls' arguments that are not JSON: tagged values, and literals.

Makes Lark for llguidance (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md) of a
JSON schema. Values that are no strings are JSON in every syntax. Arguments are in the order of the
schema, as in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import regex_to_lark

from tgi_cli.text.grammar import json_schema
from tgi_cli.text.grammar.grammar import GrammarError
from tgi_cli.text.grammar.json_text import quoted_regex
from tgi_cli.text.grammar.lark_regex import plain_lark, quoted_lark
from tgi_cli.text.grammar.tokens import SpecialTokens, quoted

_COMPOSED = ("allOf", "not", "if", "patternProperties", "propertyNames", "dependentRequired")
_COUNTS = ("minProperties", "maxProperties")
_STRING_KEYS = ("minLength", "maxLength", "pattern", "format", "enum", "const")
_LITERALS = (("boolean", ("True", "False")), ("null", ("None",)))
_KEY = r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}"
_MOST_LEVELS = 32
_SLASH = re.compile(r"\\?.", re.DOTALL)
_DOLLAR = re.compile(r"(?<!\\)(?P<even>(?:\\\\)*)\$$")


class ArgumentRules:
    """The Lark rules of one call's arguments.

    Args:
        syntax: A ``TagSyntax`` or ``LiteralSyntax`` of :mod:`tgi_cli.text.formats.syntax`, as JSON.
        schema: Schema of the arguments; its references are within it.
        tokens: Special tokens of the model.
        options: llguidance's options for JSON.
        pattern: What strings match, as a regular expression that Lark accepts. Default: anything.
    """

    def __init__(
        self,
        syntax: Mapping[str, Any],
        schema: Mapping[str, Any],
        tokens: SpecialTokens,
        options: Mapping[str, Any],
        pattern: str = "",
    ) -> None:
        self._syntax, self._root, self._tokens = syntax, schema, tokens
        self._options, self._pattern = dict(options), pattern
        self._rules: list[str] = []
        self._named: dict[str, str] = {}
        self._count = 0
        self._level = 0

    def lark(self) -> str:
        """The grammar. Raises GrammarError if the schema has a keyword that has no equivalent."""
        if self._syntax["kind"] == "tags":
            start = self._members(self._root, self._tag, self._tag_key, "")
        else:
            between = ", " if self._syntax["equals"] == "=" else ","
            start = self._members(self._root, self._pair, self._pair_key, between)
        return "\n".join([f"start: {start}", *self._rules])

    def _rule(self, body: str, attributes: str = "") -> str:
        """Add a rule. Returns its name."""
        self._count += 1
        name = f"r{self._count}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _members(
        self,
        schema: Any,
        member: Callable[[str, Any], str],
        other: Callable[[Any, Mapping[str, Any]], str],
        between: str,
    ) -> str:
        """The members of an object, with ``between`` between them."""
        schema = self._resolved(schema)
        self._refuse(schema, (*_COMPOSED, *_COUNTS, "anyOf", "oneOf"))
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        further = schema.get("additionalProperties", not properties)
        # From the last to the first: what may follow a member, and what may come if none has yet.
        separator = self._tokens.literal(between) if between else ""
        rest = first = '""'
        if further is not False:
            one = other({} if further is True else further, properties)
            rest = self._rule(f"({separator} {one})*")
            first = self._rule(f'{one} {rest} | ""')
        missing = [name for name in required if name not in properties]
        if missing and further is False:
            raise GrammarError(f"`required` has `{missing[0]}`, which no call may have")
        for name, each in [*((name, {}) for name in missing), *reversed(properties.items())]:
            one = member(name, each)
            if name in required:
                rest, first = (
                    self._rule(f"{separator} {one} {rest}"),
                    self._rule(f"{one} {rest}"),
                )
            else:
                rest, first = (
                    self._rule(f"({separator} {one})? {rest}"),
                    self._rule(f"{one} {rest} | {first}"),
                )
        return first

    # Tagged values.

    def _tag(self, name: str, schema: Any) -> str:
        return self._tagged(self._tokens.literal(self._syntax["key"] + name), schema)

    def _tag_key(self, schema: Any, known: Mapping[str, Any]) -> str:
        key = f"{self._tokens.literal(self._syntax['key'])} {self._other_key(known)}"
        return self._tagged(key, schema)

    def _other_key(self, known: Mapping[str, Any]) -> str:
        """A terminal for keys that the schema does not name."""
        if not known:
            return f"/{_KEY}/"
        self._count += 1
        terminal = f"K{self._count}"
        names = "|".join(regex_to_lark(re.escape(name)) for name in known)
        self._rules.append(f"{terminal}: /{_KEY}/ & ~/({names})/")
        return terminal

    def _tagged(self, key: str, schema: Any) -> str:
        types = self._types(schema)
        told = dict(self._syntax["types"])
        if not told:
            return self._rule(f"{key} {self._tag_value('', schema, types)}")
        names = types or frozenset(told)
        groups: dict[str, set[str]] = {}
        for name in sorted(names):
            groups.setdefault(told.get(name, ""), set()).add(name)
        return self._rule(
            " | ".join(
                f"{key} {self._tag_value(text, schema, frozenset(group))}"
                for text, group in groups.items()
            )
        )

    def _tag_value(self, told: str, schema: Any, types: frozenset[str] | None) -> str:
        literal, syntax = self._tokens.literal, self._syntax
        if types is None:
            self._refuse(self._resolved(schema), _COMPOSED)
        head = literal(syntax["value"].replace("TYPE", told) + syntax["pad"])
        tail = literal(syntax["gap"]) if syntax["gap"] else ""
        values = []
        if types is None or "string" in types:
            values.append(self._text(self._strings(schema), syntax["close"]))
        if types is not None and types - {"string"}:
            close = literal(syntax["pad"] + syntax["close"])
            values.append(f"{self._json(schema, types - {'string'})} {close}")
        return f"{head} ({' | '.join(values)}) {tail}"

    # Literals.

    def _pair(self, name: str, schema: Any) -> str:
        return f"{self._tokens.literal(name + self._syntax['equals'])} {self._literal(schema)}"

    def _pair_key(self, schema: Any, known: Mapping[str, Any]) -> str:
        equals = self._tokens.literal(self._syntax["equals"])
        return self._rule(f"{self._other_key(known)} {equals} {self._literal(schema)}")

    def _literal(self, schema: Any) -> str:
        """A rule for a value."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._named:
            self._count += 1
            name = self._named[key] = f"v{self._count}"
            self._level += 1
            if self._level > _MOST_LEVELS:
                raise GrammarError(f"it is nested more than {_MOST_LEVELS} levels deep")
            self._rules.append(f"{name}: {self._alternatives(self._resolved(schema))}")
            self._level -= 1
        return self._named[key]

    def _alternatives(self, schema: Mapping[str, Any]) -> str:
        if "anyOf" in schema or "oneOf" in schema:
            choices = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
            return " | ".join(self._literal(choice) for choice in choices)
        types = self._types(schema)
        if types is None:
            self._refuse(schema, _COMPOSED)
            types = frozenset(("string", "number", "boolean", "null", "object", "array"))
        found = [self._of_type(name, schema) for name in sorted(types)]
        return " | ".join(each for each in found if each) or '""'

    def _of_type(self, name: str, schema: Mapping[str, Any]) -> str:
        quotes, python = self._syntax["quotes"], self._syntax["python"]
        if name == "string" and quotes:
            return f"{self._tokens.literal(quotes)} {self._text(self._strings(schema), quotes)}"
        if name == "string" and self._pattern:
            return rf'/"{self._pattern}"/'
        if name == "string" and not any(word in schema for word in _STRING_KEYS):
            single = self._rule(r"/'([^'\\\n\x00-\x1f]|\\[nrt\\'\"])*'/")
            return f"{single} | {self._json(schema, frozenset((name,)))}"
        values = dict(_LITERALS).get(name)
        if python and values and not ("enum" in schema or "const" in schema):
            return " | ".join(map(quoted, values))
        if quotes and name == "object" and "enum" not in schema:
            opening, closing = self._tokens.literal("{"), self._tokens.literal("}")
            members = self._members(schema, self._pair, self._pair_key, ",")
            return f"{opening} {members} {closing}"
        if quotes and name == "array" and "enum" not in schema:
            return self._items(schema)
        return self._json(schema, frozenset((name,)))

    def _items(self, schema: Mapping[str, Any]) -> str:
        self._refuse(schema, ("prefixItems", "contains", "uniqueItems"))
        item = self._literal(schema.get("items", {}))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        upper = "" if most is None else str(most - 1)
        several = f'{item} ("," {item}){{{max(least - 1, 0)},{upper}}}'
        return f'"[" {several} "]"' + ("" if least else ' | "[" "]"')

    # Values.

    def _refuse(self, schema: Mapping[str, Any], words: tuple[str, ...]) -> None:
        for word in words:
            if word in schema:
                raise GrammarError(f"`{word}` is not supported in this model's tool calls")

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """A schema without references at its top."""
        passed = set()
        while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            reference = schema["$ref"]
            path = json_schema.at(self._root, reference)
            if path is None or reference in passed:
                raise GrammarError(f"`$ref` '{reference}' leads nowhere")
            passed.add(reference)
            schema = json_schema.part(self._root, path)
        return schema if isinstance(schema, Mapping) else {}

    def _types(self, schema: Any) -> frozenset[str] | None:
        return json_schema.types_of(schema, self._root)

    def _json(self, schema: Any, types: frozenset[str]) -> str:
        """A value in JSON, of some of its schema's types."""
        schema = dict(self._resolved(schema))
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            kept = [each for each in values if json_schema.type_of(each) in _with_integers(types)]
            schema = {"enum": kept}
        elif "anyOf" in schema or "oneOf" in schema:
            word = "anyOf" if "anyOf" in schema else "oneOf"
            schema[word] = [each for each in schema[word] if (self._types(each) or types) & types]
        else:
            schema["type"] = sorted(types)
        for word in ("$defs", "definitions"):
            if word in self._root:
                schema[word] = self._root[word]
        schema["x-guidance"] = self._options
        return self._rule(f"%json {json.dumps(schema)}")

    def _strings(self, schema: Any) -> str:
        """A terminal for the strings that a schema allows; empty: any."""
        if self._pattern:
            return f"/{self._pattern}/"
        schema = self._resolved(schema)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                choices = [
                    self._strings(each)
                    for each in schema[word]
                    if "string" in (self._types(each) or ("string",))
                ]
                return "" if "" in choices else " | ".join(f"({each})" for each in choices)
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            texts = [each for each in values if isinstance(each, str)]
            return " | ".join(map(quoted, texts))
        parts = []
        if "minLength" in schema or "maxLength" in schema:
            least, most = schema.get("minLength", 0), schema.get("maxLength", "")
            parts.append(f"/(?s:.){{{least},{most}}}/")
        if isinstance(pattern := schema.get("pattern"), str):
            parts.append(f"/{_whole(pattern)}/")
        return " & ".join(parts)

    def _text(self, allowed: str, close: str) -> str:
        """A rule for a text up to and with ``close``."""
        found = []
        mark = regex_to_lark(re.escape(close))
        token, rest = self._tokens.first(close)
        pad = self._syntax.get("pad") or ""
        if allowed:
            self._count += 1
            terminal = f"T{self._count}"
            without = f"/(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/"
            self._rules.append(f"{terminal}: ({allowed}) & {without}")
            end = self._rule(f"{terminal} {quoted(pad + close)}", "[lazy]")
            text = f"{terminal} {self._tokens.literal(pad)}" if pad else terminal
        else:
            end = self._rule(rf"/(.|\n)*{mark}/", "[lazy]")
            text = r"/(.|\n)+/?"
        if token is not None:
            found.append(f"{text} {token} {self._tokens.literal(rest)}")
        elif (inner := self._tokens.inner(close)) is not None:
            before, mark_token, behind = inner
            opening = regex_to_lark(re.escape(before))
            pattern = f"{terminal} {quoted(pad + before)}" if allowed else rf"/(.|\n)*{opening}/"
            head = self._rule(pattern, "[lazy]")
            repeated = "" if allowed else "+"
            found.append(f"{head}{repeated} {mark_token} {self._tokens.literal(behind)}")
        return self._rule(" | ".join([*found, end]))


def custom_arguments(
    syntax: Mapping[str, Any], text: Mapping[str, str], tokens: SpecialTokens
) -> str:
    """The grammar of the arguments of a tool whose only one, ``input``, is text of a grammar.

    Args:
        text: See :func:`text_pattern`.
    """
    quoted = syntax["kind"] == "literals" and not syntax["quotes"]
    schema = {"properties": {"input": {"type": "string"}}, "required": ["input"]}
    pattern = slashed(text_pattern(text, quoted=quoted))
    return ArgumentRules(syntax, schema, tokens, {}, pattern).lark()


def text_pattern(text: Mapping[str, str], *, quoted: bool) -> str:
    """A regular expression of the texts of ``{"lark": grammar}`` or ``{"regex": pattern}``.

    Args:
        quoted: The texts are within JSON strings.
    """
    if "lark" in text:
        return f"(?:{quoted_lark(text['lark']) if quoted else plain_lark(text['lark'])})"
    pattern = text["regex"]
    if "|" not in pattern:  # the whole text must match anyway
        pattern = _DOLLAR.sub(r"\g<even>", pattern.removeprefix("^"))
    return f"(?:{quoted_regex(pattern) if quoted else regex_to_lark(pattern)})"


def slashed(pattern: str) -> str:
    """A pattern for Lark, where slashes end it."""
    return _SLASH.sub(
        lambda match: r"\/" if match.group().endswith("/") else match.group(), pattern
    )


def _with_integers(types: frozenset[str]) -> frozenset[str]:
    return types | {"integer"} if "number" in types else types


def _whole(pattern: str) -> str:
    """A pattern for whole texts in which ``pattern`` is found. Raises GrammarError."""
    inner = pattern.removeprefix("^")
    before = "" if inner != pattern else "(?s:.*)"
    ends = inner.endswith("$") and not inner.endswith("\\$")
    body = inner[:-1] if ends else inner
    anchors = re.sub(r"\\.|\[\^?[^\]]*\]", "", body)
    if "^" in anchors or "$" in anchors or (body != pattern and "|" in anchors):
        raise GrammarError(f"`pattern` '{pattern}' is not supported in this model's tool calls")
    return f"{before}({regex_to_lark(body)}){'' if ends else '(?s:.*)'}"
