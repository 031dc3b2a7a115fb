"""What a request may ask its answer to be: JSON of a schema, a regular expression, a grammar.

Every API has its own words for it; here each becomes a :class:`Grammar`, which says the same in
one form. :mod:`tgi_cli.text.grammar.checker` compiles it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

MOST_BYTES = 256 * 1024
"""Of a grammar as JSON; what one of this size may cost is bounded by time and memory as well."""

_encode = msgspec.json.Encoder().encode

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class GrammarError(ValueError):
    """A grammar that cannot be; the message says why, in words for an API's answer."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text must be, not yet compiled.

    Attributes:
        form: JSON of ``{"json": schema or its JSON text}``, ``{"regex": pattern}``, ``{"choice":
            [text, ...]}``, ``{"lark": a Lark or GBNF grammar}`` or ``{"tags": structural tag}``;
            with the first also ``"whitespace"``, the regular expression between JSON's tokens;
            with any, ``"before"``.
        param: the request's parameter that asked for it.
    """

    form: bytes
    param: str

    @classmethod
    def of(cls, form: Mapping[str, Any], param: str) -> Grammar:
        """Of one of the forms as an object. Raises GrammarError when it is too large."""
        try:
            encoded = _encode(form)
        except RecursionError:
            raise GrammarError("it is nested too deeply") from None
        if len(encoded) > MOST_BYTES:
            raise GrammarError(f"it has more than {MOST_BYTES} bytes")
        return cls(encoded, param)

    def behind(self, before: Mapping[str, Any] | None) -> Grammar:
        """Of a text that may reason before: ``open`` and ``close`` stand around it.

        ``inside``: the reasoning has begun already; ``then`` follows it, in front of what this
        grammar is about. None: nothing comes before. Raises GrammarError when it is too large.
        """
        if before is None:
            return self
        return Grammar.of({**msgspec.json.decode(self.form), "before": before}, self.param)


def native(asked: Any, param: str = "grammar") -> Grammar:
    """TGI's ``{"type": "json" | "regex" | "json_schema", "value": ...}``. Raises GrammarError."""
    kind = _kind(asked)
    if kind in ("json", "json_object"):
        return Grammar.of({"json": _schema(_value(asked))}, param)
    if kind == "regex":
        return Grammar.of({"regex": _text(_value(asked), "`value`")}, param)
    if kind == "json_schema":
        return Grammar.of({"json": _named(_value(asked), "`value`")}, param)
    raise GrammarError(f"`type` must be json, regex or json_schema. Given: {kind}")


def response_format(asked: Any, param: str = "response_format") -> Grammar | None:
    """OpenAI's, TGI's, and what else servers of open models take; None: any text.

    https://platform.openai.com/docs/guides/structured-outputs. Raises GrammarError.
    """
    kind = _kind(asked)
    if kind == "text":
        return None
    if kind == "json_object":
        schema = _first(asked, "value", "schema")
        return Grammar.of({"json": _ANY_OBJECT if schema is None else _schema(schema)}, param)
    if kind == "json_schema":
        named = _first(asked, "json_schema", "value")
        return Grammar.of(
            {"json": _named(asked if named is None else named, "`json_schema`")}, param
        )
    if kind == "structural_tag":
        return structural_tag(asked, param)
    if kind == "grammar":
        return Grammar.of({"lark": _text(asked.get("grammar"), "`grammar`")}, param)
    if kind in ("json", "regex"):
        return native(asked, param)
    raise GrammarError(
        "`type` must be text, json_object, json_schema, json, regex, grammar or structural_tag. "
        f"Given: {kind}"
    )


def guided(name: str, asked: Any, whitespace: str | None = None) -> Grammar:
    """vLLM's ``guided_*``, and the members of its ``structured_outputs``. Raises GrammarError."""
    kind = name.removeprefix("guided_")
    if kind == "json":
        form: dict[str, Any] = {"json": _schema(asked)}
        if whitespace is not None:
            form["whitespace"] = whitespace
        return Grammar.of(form, name)
    if kind == "json_object":
        return Grammar.of({"json": _ANY_OBJECT}, name)
    if kind == "regex":
        return Grammar.of({"regex": _text(asked, "it")}, name)
    if kind == "grammar":
        return Grammar.of({"lark": _text(asked, "it")}, name)
    if kind == "choice":
        choices = asked if isinstance(asked, list) else []
        if not choices or not all(isinstance(choice, str) for choice in choices):
            raise GrammarError("it must be a list of texts")
        return Grammar.of({"choice": choices}, name)
    raise GrammarError("this kind of structured output is not supported")


def structured_outputs(asked: Mapping[str, Any]) -> Grammar | None:
    """vLLM's object of one member. Raises GrammarError."""
    given = {name: value for name, value in asked.items() if value not in (None, False)}
    whitespace = given.pop("whitespace_pattern", None)
    if whitespace is not None and not isinstance(whitespace, str):
        raise GrammarError("`whitespace_pattern` must be a text")
    if not given:
        return None
    if len(given) > 1:
        raise GrammarError(f"it must have one member. Given: {', '.join(given)}")
    ((kind, value),) = given.items()
    if kind == "structural_tag":
        grammar = structural_tag(_parsed(value) if isinstance(value, str) else value)
    else:
        try:
            grammar = guided(kind, value, whitespace)
        except GrammarError as error:
            raise GrammarError(f"`{kind}`: {error}") from error
    return Grammar(grammar.form, "structured_outputs")


def structural_tag(asked: Any, param: str = "response_format") -> Grammar:
    """Text with structured parts in it: tool calls above all.

    ``asked`` has ``structures``, each with a ``begin``, the JSON ``schema`` of what follows and
    an ``end``; and ``triggers``: wherever the text says one, a structure that begins with it
    must stand. That much is vLLM's. Beyond it, ``at_least`` 1 makes the whole text structures,
    ``between`` standing between two of them, ``first`` before and ``last`` behind all; and
    ``at_most`` 1 allows one alone. With ``first`` or ``last``, they may also follow each other
    in free text. ``otherwise`` is a Grammar of what the text is if it is not structures alone,
    behind ``otherwise_begin``. A structure that is not ``strict`` and whose schema cannot be
    compiled takes any object. Raises GrammarError.
    """
    if not isinstance(asked, Mapping):
        raise GrammarError("it must be an object")
    structures = asked.get("structures")
    if not isinstance(structures, list) or not structures:
        raise GrammarError("`structures` must be a list of at least one")
    otherwise = asked.get("otherwise")
    triggers = asked.get("triggers")
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError("`triggers` must be a list of texts")
    told: dict[str, Any] = {
        name: _text(asked.get(name, ""), f"`{name}`")
        for name in ("first", "between", "last", "otherwise_begin")
    }
    told["triggers"] = triggers
    told["at_least"] = 1 if asked.get("at_least") else 0
    told["at_most"] = 1 if asked.get("at_most") == 1 else None
    told["otherwise"] = (
        msgspec.json.decode(otherwise.form) if isinstance(otherwise, Grammar) else None
    )
    told["structures"] = []
    for place, each in enumerate(structures):
        if not isinstance(each, Mapping):
            raise GrammarError(f"`structures[{place}]` must be an object")
        begin = _text(each.get("begin"), f"`structures[{place}].begin`")
        anywhere = not told["at_least"] and otherwise is None
        if anywhere and not any((told["first"] + begin).startswith(t) for t in triggers):
            raise GrammarError(f"`structures[{place}].begin` begins with none of the `triggers`")
        schema = each.get("schema")
        told["structures"].append(
            {
                "name": str(each.get("name", "")),
                "begin": begin,
                "schema": _ANY_OBJECT if schema is None else _schema(schema),
                "strict": each.get("strict") is not False,
                "end": _text(each.get("end", ""), f"`structures[{place}].end`"),
            }
        )
    return Grammar.of({"tags": told}, param)


def _kind(asked: Any) -> str:
    if not isinstance(asked, Mapping):
        raise GrammarError("it must be an object")
    kind = asked.get("type")
    if not isinstance(kind, str):
        raise GrammarError("`type` is missing")
    return kind


def _value(asked: Mapping[str, Any]) -> Any:
    if asked.get("value") is None:
        raise GrammarError("`value` is missing")
    return asked["value"]


def _first(asked: Mapping[str, Any], *names: str) -> Any:
    return next((asked[name] for name in names if asked.get(name) is not None), None)


def _named(asked: Any, where: str) -> Any:
    """The schema of OpenAI's ``{"name", "schema", "strict"}``.

    Whether it says ``strict`` or not, the answer follows the schema.
    """
    if not isinstance(asked, Mapping):
        raise GrammarError(f"{where} must be an object")
    schema = asked.get("schema")
    if schema is None:
        raise GrammarError(f"{where} has no `schema`")
    return _schema(schema)


def _schema(asked: Any) -> Any:
    """A schema, or its JSON as a text."""
    if isinstance(asked, Mapping | str | bool):
        return asked
    raise GrammarError("a JSON schema must be an object, or a text that holds one")


def _text(asked: Any, where: str) -> str:
    if not isinstance(asked, str):
        raise GrammarError(f"{where} must be a text")
    return asked


def _parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"it is no JSON: {error}") from error
