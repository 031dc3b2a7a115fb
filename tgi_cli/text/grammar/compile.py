"""Compiles the grammar of a request for llguidance, or finds what is wrong with it.

That may take any time and memory, so :mod:`tgi_cli.text.grammar.compile_process` does it in a
process of its own. https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from tgi_cli.text.grammar import dry_run, json_schema
from tgi_cli.text.grammar.call_arguments import (
    ArgumentRules,
    custom_arguments,
    slashed,
    text_pattern,
)
from tgi_cli.text.grammar.grammar import GrammarError
from tgi_cli.text.grammar.json_schema import Path
from tgi_cli.text.grammar.tokens import SpecialTokens, quoted
from tgi_cli.worker.grammar_errors import NOTHING_FITS, limit_passed

MOST_LEVELS = 64
"""Most levels of objects and lists in a schema; llguidance supports twice as many."""

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""One space may follow a comma or a colon. More white space costs tokens, and without a limit
some models generate nothing else."""

_NOTHING = (
    "no text can match it: it contradicts itself, or a rule or `$ref` leads back to itself before "
    "anything is written"
)
_LOCATE_SECONDS = 1.0
_LONGEST_CAUSE = 300
_CARET = re.compile(
    r"regex parse error:\n    (?P<line>.*)\n    (?P<before> *)\^+\nerror: (?P<why>.+)"
)
_WHY = re.compile(r"regex parse error:.*^error: (?P<why>.+?)$", re.DOTALL | re.MULTILINE)
_PLACE = re.compile(r"^at 1\(\d+\): (invalid regex .* \(in regex\): )?", re.DOTALL)
_KEYS = re.compile(r"Unimplemented keys: (?P<keys>\[.*\])$")
_REMOTE = re.compile(r"Resource '(?P<uri>.*?)' is not present in a registry")
_POINTER = re.compile(r"Pointer '(?P<pointer>.*)' does not exist")


class Compiler:
    """Compiles grammars for one model."""

    def __init__(self, tokens: SpecialTokens) -> None:
        self._tokens = tokens
        self._tokenizer = tokens.tokenizer()
        self._letter_ids = tokens.letter_ids()
        self._limits = dry_run.matcher_limits()

    def compile(self, form: bytes) -> str:
        """Compile :attr:`tgi_cli.text.grammar.grammar.Grammar.form` to llguidance's JSON form.

        Includes a dry run. Raises GrammarError.
        """
        try:
            request = json.loads(form)
            grammars = self._grammars(request)
            found = json.dumps({"grammars": grammars}, ensure_ascii=False)
        except RecursionError:
            raise GrammarError("it is nested too deeply") from None
        if error := self._error(found):
            raise GrammarError(_explain(error))
        matcher = LLMatcher(self._tokenizer, found, log_level=0, limits=self._limits)
        error = matcher.get_error()
        error = error or dry_run.find_error(matcher, form.decode(), self._letter_ids)
        if error:
            raise GrammarError(_explain(error))
        return found

    def _grammars(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The grammar of the start, and the named grammars that it refers to."""
        found = self._whole(request)
        if "before" not in request:
            return found
        body = {**found[0], "name": "behind"}
        return [{"lark_grammar": self._before(request["before"])}, body, *found[1:]]

    def _before(self, request: Mapping[str, Any]) -> str:
        """See :meth:`tgi_cli.text.grammar.grammar.Grammar.behind`."""
        opening, close, then = request["open"], request["close"], request["then"]
        first = "rest" if request["inside"] else ""
        rules = []
        if opening:
            rules = [
                "TEXT: /(.|\\n)+/",
                "GAP: /[ \\n]{1,4}/",
                f"thought: {self._tokens.literal(opening)} rest",
                *self._until("rest", close),
            ]
        if then:
            further = "thought*" if opening else ""
            start = f"{first} {further} {self._tokens.literal(then)}"
        else:
            start = "rest GAP?" if first else "(thought GAP?)?"
        return "\n".join([f"start: {start} @behind", *rules])

    def _until(self, name: str, text: str) -> list[str]:
        """Rules for free text that ends with ``text``."""
        lazy = f"{name}_end[lazy]: /(.|\\n)*{regex_to_lark(re.escape(text))}/"
        token, rest = self._tokens.first(text)
        if token is None:
            return [f"{name}: {name}_end", lazy]
        by_token = f"TEXT? {token} {self._tokens.literal(rest)}"
        return [f"{name}: {by_token} | {name}_end", lazy]

    def _whole(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "json" in request:
            return [{"json_schema": self._schema(request["json"], request.get("whitespace"))}]
        if "regex" in request:
            return [{"lark_grammar": self._regex(request["regex"])}]
        if "choice" in request:
            # One terminal, hence one lexeme: the parser could not follow as many rules at once.
            choices = " | ".join(map(quoted, dict.fromkeys(request["choice"])))
            return [{"lark_grammar": f"start: CHOICE\nCHOICE: {choices}"}]
        if "lark" in request:
            try:
                return [{"lark_grammar": any_to_lark(request["lark"])}]
            except Exception as error:  # the conversion of invalid GBNF may raise anything
                raise GrammarError(f"it is neither Lark nor GBNF: {error}") from error
        return self._tags(request["tags"])

    def _error(self, grammar: str) -> str:
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        return messages[0] if failed else ""

    def _regex(self, pattern: str) -> str:
        """A regular expression in Lark; ``\\d``, ``\\w`` and ``\\s`` are ASCII, as in TGI."""
        lark = f"start: /{regex_to_lark(pattern, 'dws')}/"
        error = self._error(json.dumps({"grammars": [{"lark_grammar": lark}]}))
        if not error:
            return lark
        if (found := _CARET.search(error)) and "\n" not in pattern:
            position = _unescaped(pattern, len(found["before"]))
            raise GrammarError(f"invalid regex at position {position}: {found['why']}")
        raise GrammarError(f"invalid regex: {_explain(error)}")

    def _schema(
        self, request: Any, whitespace: str | None = None, name: str = ""
    ) -> dict[str, Any]:
        """A schema with llguidance's options. Raises GrammarError."""
        where = f"schema of `{name}`: " if name else ""
        if isinstance(request, str):
            try:
                request = json.loads(request)
            except ValueError as error:
                raise GrammarError(f"{where}it is not valid JSON: {error}") from None
        if request is True:
            request = {}
        if not isinstance(request, dict):
            raise GrammarError(f"{where}a JSON schema must be an object")
        if json_schema.depth(request) > MOST_LEVELS:
            raise GrammarError(f"{where}it is nested more than {MOST_LEVELS} levels deep")
        schema = json_schema.refine(request)
        own = schema.get("x-guidance")
        options = {**_COMPACT, **(own if isinstance(own, dict) else {})}
        if whitespace is not None:
            options |= {
                "whitespace_flexible": True,
                "whitespace_pattern": whitespace,
                "item_separator": ",",
                "key_separator": ":",
            }
        schema["x-guidance"] = {**options, "lenient": False}
        if cause := self._schema_error(schema):
            raise GrammarError(where + self._located(schema, cause))
        return schema

    def _schema_error(self, schema: Any) -> str:
        return self._error(json.dumps({"grammars": [{"json_schema": schema}]}))

    def _located(self, schema: dict[str, Any], cause: str) -> str:
        """Add to an error the innermost part of the schema that has it."""
        document = {"x": json_schema.moved(schema, "x")}
        until = time.monotonic() + _LOCATE_SECONDS
        path: Path = ()
        seen = {path}
        while time.monotonic() < until:
            here = json_schema.part(schema, path)
            if any(key in here for key in _unknown_keys(cause)):
                break
            for child in json_schema.within(schema, path):
                if child in seen:
                    continue
                seen.add(child)
                document["$ref"] = json_schema.pointer(("x", *child))
                if found := self._schema_error(document):
                    path, cause = child, found.replace("Pointer '/x/", "Pointer '/")
                    break
            else:
                break
        return f"{_explain(cause, json_schema.part(schema, path))} (at {json_schema.pointer(path)})"

    def _tags(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See :func:`tgi_cli.text.grammar.grammar.parse_structural_tag`."""
        triggers, structures = request["triggers"], request["structures"]
        first, between, last = (request[name] for name in ("first", "between", "last"))
        literal = self._tokens.literal
        others = [
            {"name": f"s{index}", **self._arguments(each)} for index, each in enumerate(structures)
        ]
        otherwise = ""
        if request["otherwise"] is not None:
            (body,) = self._whole(request["otherwise"])
            others.append({**body, "name": "otherwise"})
            begin = request["otherwise_begin"]
            otherwise = f"| {literal(begin) if begin else ''} @otherwise"

        def alternatives(cut: int = 0, trigger: str = "", before: str = "") -> str:
            """The structures that begin with the trigger, without ``cut`` characters.

            The text ``before`` is one lexeme with the beginning: lexemes are greedy, and what
            follows the last structure may begin like it.
            """
            return " | ".join(
                f"{self._begin(before, each, cut)} @s{index} {literal(each['end'])}"
                for index, each in enumerate(structures)
                if each["begin"].startswith(trigger)
            )

        once = request["at_most"] == 1
        further = "" if once else "next*"
        following = [] if once else [f"next: {alternatives(before=between)}"]
        if request["at_least"] or otherwise:
            rules = [
                f"start: {literal(first)} call {further} {literal(last)} {otherwise}",
                f"call: {alternatives()}",
                *following,
            ]
        else:
            rules = [f"call: {alternatives()}", *following] if first or last else []
            calls = []
            marks = self._tokens.others(triggers)
            for number, trigger in enumerate(triggers):
                if first or last:
                    rest = f"{literal(first[len(trigger) :])} call {further} {literal(last)}"
                else:
                    rest = alternatives(len(trigger), trigger)
                    if not rest:
                        continue
                calls.append(f"call_{number}")
                token = self._tokens.ids.get(trigger)
                heads = [f"free <[{token}]>"] if token is not None else []
                if (inner := self._tokens.inner(trigger)) is not None:
                    before, mark, behind = inner
                    other = f"(TEXT? {marks})* " if marks else ""
                    heads.append(f"{other}before_{number}+ {mark} {literal(behind)}")
                    lazy = regex_to_lark(re.escape(before))
                    rules.append(f"before_{number}[lazy]: /(.|\\n)*{lazy}/")
                heads.append(f"(TEXT? {marks})* trigger_{number}" if marks else f"trigger_{number}")
                rules += [
                    f"call_{number}: ({' | '.join(heads)}) ({rest})",
                    f"trigger_{number}[lazy]: /(.|\\n)*{regex_to_lark(re.escape(trigger))}/",
                ]
            start = f"({' | '.join(calls)})"
            rules = [
                f"start: free | {start}" if once else f"start: {start}* free",
                f"free: TEXT? ({marks} TEXT?)*" if marks else "free: TEXT?",
                "TEXT: /(.|\\n)+/",
                *rules,
            ]
        return [{"name": "start", "lark_grammar": "\n".join(rules)}, *others]

    def _begin(self, before: str, structure: Mapping[str, Any], cut: int) -> str:
        """A text and the beginning of a structure, without ``cut`` characters."""
        begin, counter = before + structure["begin"][cut:], structure.get("counter", "")
        parts = begin.split(counter) if counter else [begin]
        return " /[0-9]{1,4}/ ".join(map(self._tokens.literal, parts))

    def _arguments(self, structure: Mapping[str, Any]) -> dict[str, Any]:
        """The grammar of a structure's arguments."""
        if "text" in structure:
            return self._text_argument(structure)
        try:
            return self._written(structure, structure["schema"])
        except GrammarError:
            if structure["strict"]:
                raise
            return self._written(structure, {"type": "object"})

    def _written(self, structure: Mapping[str, Any], schema: Any) -> dict[str, Any]:
        name, syntax = structure["name"], structure.get("arguments")
        checked = self._schema(schema, name=name)
        if syntax is None:
            return {"json_schema": checked}
        options = checked.pop("x-guidance")
        try:
            lark = ArgumentRules(syntax, checked, self._tokens, options).lark()
            return self._checked(lark)
        except GrammarError as error:
            raise GrammarError(f"schema of `{name}`: {error}") from None

    def _text_argument(self, structure: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a tool whose ``input`` is text of a grammar of its own."""
        text, syntax = structure["text"], structure.get("arguments")
        try:
            if syntax is None:
                # One terminal, hence one lexeme, which JSON's escapes cannot divide.
                pattern = f'\\{{"input": ?"{text_pattern(text, quoted=True)}"\\}}'
                lark = f"start: TEXT\nTEXT: /{slashed(pattern)}/"
            else:
                lark = custom_arguments(syntax, text, self._tokens)
            return self._checked(lark)
        except (GrammarError, RecursionError) as error:
            cause = error if isinstance(error, GrammarError) else "it is nested too deeply"
            raise GrammarError(f"grammar of `{structure['name']}`: {cause}") from None

    def _checked(self, lark: str) -> dict[str, Any]:
        """A nested grammar. Raises GrammarError if it is invalid."""
        if error := self._error(json.dumps({"grammars": [{"lark_grammar": lark}]})):
            raise GrammarError(_explain(error))
        return {"lark_grammar": lark}


def _unescaped(pattern: str, column: int) -> int:
    """The position in a pattern for a column in the result of :func:`regex_to_lark`."""
    low, high = 0, len(pattern)
    while low < high:
        middle = (low + high) // 2
        if len(regex_to_lark(pattern[:middle], "dws")) >= column:
            high = middle
        else:
            low = middle + 1
    return low


def _unknown_keys(error: str) -> list[str]:
    found = _KEYS.search(error)
    keys: list[str] = json.loads(found["keys"]) if found else []
    return keys


def _explain(error: str, schema: Any = None) -> str:
    """An error of llguidance in one line of bounded length, for API clients."""
    if error.startswith(NOTHING_FITS):
        return _NOTHING
    if limit := limit_passed(error):
        return limit
    if unknown := _unknown_keys(error):
        keys = [f"`{key}`" for key in unknown]
        words = "keyword" if len(keys) == 1 else "keywords"
        verb = "is" if len(keys) == 1 else "are"
        return f"JSON schema {words} {', '.join(keys)} {verb} not supported"
    if error.startswith("oneOf constraints"):
        return "`oneOf` is only supported where the alternatives exclude each other: use `anyOf`"
    if found := _REMOTE.search(error):
        return f"'{found['uri']}' is not known: only references within the schema are followed"
    if found := _POINTER.search(error):
        return f"`$ref` '#{found['pointer']}' leads nowhere"
    if error.startswith("Unknown format: "):
        return f"`format` '{error.partition(': ')[2]}' is not supported"
    if found := _CARET.search(error):
        error = f"{found['why']} at position {len(found['before'])} of the regex {found['line']}"
    elif found := _WHY.search(error):
        error = found["why"]
    line = " ".join(_PLACE.sub("", error.split("\n   1 | ")[0]).split())
    if isinstance(schema, dict) and "pattern" in schema and "regex" in line:
        line = f"`pattern`: {line}"
    return line if len(line) <= _LONGEST_CAUSE else f"{line[:_LONGEST_CAUSE]}..."
