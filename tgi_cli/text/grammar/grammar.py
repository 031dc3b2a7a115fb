"""The grammars of requests: JSON with a schema, a regular expression, or a grammar.

Parses the parameters of every API into a :class:`Grammar` of one form, which
:mod:`tgi_cli.text.grammar.checker` compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

MOST_BYTES = 256 * 1024
"""Largest grammar, as JSON; its compilation has limits of time and memory."""

_encode = msgspec.json.Encoder().encode

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class GrammarError(ValueError):
    """An invalid grammar; the message suits API clients."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar before its compilation.

    Attributes:
        form: JSON of ``{"json": schema or its JSON text}``, ``{"regex": pattern}``, ``{"choice":
            [text, ...]}``, ``{"lark": a Lark or GBNF grammar}`` or ``{"tags": structural tag}``.
            ``"json"`` may have ``"whitespace"``, a regular expression for the text between JSON's
            tokens, and all may have ``"before"``.
        param: The parameter of the request, for errors.
    """

    form: bytes
    param: str

    @classmethod
    def of(cls, form: Mapping[str, Any], param: str) -> Grammar:
        """Make a grammar of a form. Raises GrammarError if it is too large."""
        try:
            encoded = _encode(form)
        except RecursionError:
            raise GrammarError("it is nested too deeply") from None
        if len(encoded) > MOST_BYTES:
            raise GrammarError(f"it has more than {MOST_BYTES} bytes")
        return cls(encoded, param)

    def behind(self, before: Mapping[str, Any] | None) -> Grammar:
        """This grammar after optional reasoning; ``before`` None means no reasoning.

        ``before`` has the texts ``open`` and ``close`` around the reasoning, ``then`` in front of
        what follows this grammar, and ``inside`` if the reasoning has begun already. Raises
        GrammarError if the result is too large.
        """
        if before is None:
            return self
        return Grammar.of({**msgspec.json.decode(self.form), "before": before}, self.param)


def parse_tgi(data: Any, param: str = "grammar") -> Grammar:
    """Parse TGI's ``{"type": "json" | "regex" | "json_schema", "value"}``. Raises GrammarError."""
    kind = _kind(data)
    if kind in ("json", "json_object"):
        return Grammar.of({"json": _schema(_value(data))}, param)
    if kind == "regex":
        return Grammar.of({"regex": _text(_value(data), "`value`")}, param)
    if kind == "json_schema":
        return Grammar.of({"json": _named(_value(data), "`value`")}, param)
    raise GrammarError(f"`type` must be json, regex or json_schema. Given: {kind}")


def parse_response_format(data: Any, param: str = "response_format") -> Grammar | None:
    """Parse a ``response_format`` of OpenAI, TGI or other servers; None for plain text.

    https://platform.openai.com/docs/guides/structured-outputs. Raises GrammarError.
    """
    kind = _kind(data)
    if kind == "text":
        return None
    if kind == "json_object":
        schema = _first(data, "value", "schema")
        return Grammar.of({"json": _ANY_OBJECT if schema is None else _schema(schema)}, param)
    if kind == "json_schema":
        named = _first(data, "json_schema", "value")
        return Grammar.of(
            {"json": _named(data if named is None else named, "`json_schema`")}, param
        )
    if kind == "structural_tag":
        return parse_structural_tag(data, param)
    if kind == "grammar":
        return Grammar.of({"lark": _text(data.get("grammar"), "`grammar`")}, param)
    if kind in ("json", "regex"):
        return parse_tgi(data, param)
    raise GrammarError(
        "`type` must be text, json_object, json_schema, json, regex, grammar or structural_tag. "
        f"Given: {kind}"
    )


def parse_guided(name: str, data: Any, whitespace: str | None = None) -> Grammar:
    """Parse vLLM's ``guided_*`` or a member of ``structured_outputs``. Raises GrammarError."""
    kind = name.removeprefix("guided_")
    if kind == "json":
        form: dict[str, Any] = {"json": _schema(data)}
        if whitespace is not None:
            form["whitespace"] = whitespace
        return Grammar.of(form, name)
    if kind == "json_object":
        return Grammar.of({"json": _ANY_OBJECT}, name)
    if kind == "regex":
        return Grammar.of({"regex": _text(data, "it")}, name)
    if kind == "grammar":
        return Grammar.of({"lark": _text(data, "it")}, name)
    if kind == "choice":
        choices = data if isinstance(data, list) else []
        if not choices or not all(isinstance(choice, str) for choice in choices):
            raise GrammarError("it must be a list of texts")
        return Grammar.of({"choice": choices}, name)
    raise GrammarError("this kind of structured output is not supported")


def parse_structured_outputs(data: Mapping[str, Any]) -> Grammar | None:
    """Parse vLLM's ``structured_outputs``. Raises GrammarError."""
    given = {name: value for name, value in data.items() if value not in (None, False)}
    whitespace = given.pop("whitespace_pattern", None)
    if whitespace is not None and not isinstance(whitespace, str):
        raise GrammarError("`whitespace_pattern` must be a text")
    if not given:
        return None
    if len(given) > 1:
        raise GrammarError(f"it must have one member. Given: {', '.join(given)}")
    ((kind, value),) = given.items()
    if kind == "structural_tag":
        grammar = parse_structural_tag(_parsed(value) if isinstance(value, str) else value)
    else:
        try:
            grammar = parse_guided(kind, value, whitespace)
        except GrammarError as error:
            raise GrammarError(f"`{kind}`: {error}") from error
    return Grammar(grammar.form, "structured_outputs")


def parse_structural_tag(data: Any, param: str = "response_format") -> Grammar:
    """Parse a structural tag: text with structured parts, such as tool calls.

    As in vLLM, it has ``structures``, each with a ``begin``, the JSON ``schema`` of what follows
    and an ``end``; and ``triggers``: wherever the text contains one, a structure must begin with
    it. Extensions: if ``at_least`` is 1, the whole text is ``first``, structures with ``between``
    between them, and ``last``; if ``at_most`` is 1, there is one structure. With ``first`` or
    ``last``, several may also follow each other in free text. ``otherwise`` is a Grammar of text
    without structures, after ``otherwise_begin``. A structure that is not ``strict`` accepts any
    object if its schema cannot be compiled. A structure with ``text`` is the call of a tool that
    takes free text: ``{"lark": grammar}`` or ``{"regex": pattern}`` of the string ``input`` in its
    arguments. A structure may have ``arguments``, a syntax of :mod:`tgi_cli.text.formats.syntax`
    in which values are written, and ``counter``, a text that stands for a number in ``begin``.
    Raises GrammarError.
    """
    if not isinstance(data, Mapping):
        raise GrammarError("it must be an object")
    structures = data.get("structures")
    if not isinstance(structures, list) or not structures:
        raise GrammarError("`structures` must be a list of at least one")
    otherwise = data.get("otherwise")
    triggers = data.get("triggers")
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError("`triggers` must be a list of texts")
    tag: dict[str, Any] = {
        name: _text(data.get(name, ""), f"`{name}`")
        for name in ("first", "between", "last", "otherwise_begin")
    }
    tag["triggers"] = triggers
    tag["at_least"] = 1 if data.get("at_least") else 0
    tag["at_most"] = 1 if data.get("at_most") == 1 else None
    tag["otherwise"] = (
        msgspec.json.decode(otherwise.form) if isinstance(otherwise, Grammar) else None
    )
    tag["structures"] = []
    for index, each in enumerate(structures):
        if not isinstance(each, Mapping):
            raise GrammarError(f"`structures[{index}]` must be an object")
        begin = _text(each.get("begin"), f"`structures[{index}].begin`")
        anywhere = not tag["at_least"] and otherwise is None
        if anywhere and not any((tag["first"] + begin).startswith(t) for t in triggers):
            raise GrammarError(f"`structures[{index}].begin` begins with none of the `triggers`")
        schema = each.get("schema")
        tag["structures"].append(
            {
                "name": str(each.get("name", "")),
                "begin": begin,
                "schema": _ANY_OBJECT if schema is None else _schema(schema),
                "strict": each.get("strict") is not False,
                **_free_text(each.get("text"), f"`structures[{index}].text`"),
                "end": _text(each.get("end", ""), f"`structures[{index}].end`"),
            }
        )
        if each.get("counter"):
            counter = _text(each["counter"], f"`structures[{index}].counter`")
            tag["structures"][-1]["counter"] = counter
        if each.get("arguments") is not None:
            tag["structures"][-1]["arguments"] = _syntax(each["arguments"])
    return Grammar.of({"tags": tag}, param)


def _syntax(data: Any) -> dict[str, Any]:
    """The ``arguments`` of a structure. Raises GrammarError."""
    if not isinstance(data, Mapping):
        raise GrammarError("`arguments` must be an object")
    if data.get("kind") == "tags":
        fields = ["key", "value", "close", "gap", "pad"]
        types = data.get("types", [])
        if not isinstance(types, list | tuple) or not all(
            isinstance(each, list | tuple)
            and len(each) == 2
            and all(isinstance(text, str) for text in each)
            for each in types
        ):
            raise GrammarError("`arguments.types` must be a list of pairs of texts")
        extra: dict[str, Any] = {"types": [list(each) for each in types]}
    elif data.get("kind") == "literals":
        fields = ["equals", "quotes"]
        extra = {"python": data.get("python") is True}
    else:
        raise GrammarError("`arguments.kind` must be `tags` or `literals`")
    for name in fields:
        if not isinstance(data.get(name), str):
            raise GrammarError(f"`arguments.{name}` must be a text")
    return {"kind": data["kind"], **{name: data[name] for name in fields}, **extra}


def _free_text(data: Any, where: str) -> dict[str, Any]:
    """The member ``text`` of a structure, if there is one."""
    if data is None:
        return {}
    kind, text = next(iter(data.items()), ("", None)) if isinstance(data, Mapping) else ("", None)
    if kind not in ("lark", "regex"):
        raise GrammarError(f"{where} must be an object with `lark` or `regex`")
    return {"text": {kind: _text(text, where)}}


def _kind(data: Any) -> str:
    if not isinstance(data, Mapping):
        raise GrammarError("it must be an object")
    kind = data.get("type")
    if not isinstance(kind, str):
        raise GrammarError("`type` is missing")
    return kind


def _value(data: Mapping[str, Any]) -> Any:
    if data.get("value") is None:
        raise GrammarError("`value` is missing")
    return data["value"]


def _first(data: Mapping[str, Any], *names: str) -> Any:
    return next((data[name] for name in names if data.get(name) is not None), None)


def _named(data: Any, where: str) -> Any:
    """The schema in OpenAI's ``{"name", "schema", "strict"}``; all schemas are strict."""
    if not isinstance(data, Mapping):
        raise GrammarError(f"{where} must be an object")
    schema = data.get("schema")
    if schema is None:
        raise GrammarError(f"{where} has no `schema`")
    return _schema(schema)


def _schema(data: Any) -> Any:
    """A schema, or its JSON text."""
    if isinstance(data, Mapping | str | bool):
        return data
    raise GrammarError("a JSON schema must be an object, or a text that holds one")


def _text(data: Any, where: str) -> str:
    if not isinstance(data, str):
        raise GrammarError(f"{where} must be a text")
    return data


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"it is not valid JSON: {error}") from error
