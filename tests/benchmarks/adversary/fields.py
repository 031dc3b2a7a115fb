"""Every field of every schema of every route, and a body around each of them.

Routes and their bodies are those of the API's own document (``tgi_cli.router.api.openapi``), and
fields those of the types that it names: a new one is covered without a word here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import inspect

from tests.benchmarks.adversary.values import accepted
from tgi_cli.router.api.openapi import endpoints_of
from tgi_cli.router.app import ROUTES

Around = Callable[[bytes], bytes]

TOKEN_COUNTS = ("max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens")
LONG_ANSWERS = frozenset({*TOKEN_COUNTS, "min_tokens", "n", "best_of"})
"""Fields by which a client may ask for an answer that takes long."""

_NAMED: dict[str, bytes] = {
    "role": b'"user"',
    "content": b'"a"',
    "datatype": b'"BYTES"',
    "shape": b"[1]",
    "data": b'["a"]',
    "prompt": b'"a"',
    "input": b'"a"',
    "inputs": b'"a"',
    "grammar": b'{"type":"json","value":{"type":"object"}}',
    "type": b'"function"',
}
"""What is valid where the type alone does not tell."""

_OF: dict[tuple[str, str], bytes] = {
    ("ContentPart", "type"): b'"text"',
    ("InferRequest", "inputs"): b"",
}
"""The same for one type's field; empty: the type tells."""

_BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "a"}}]},
    "tool_prompt": {"tools": [{"type": "function", "function": {"name": "a"}}]},
    "best_of": {"do_sample": True},
    "top_k": {"temperature": 0.5},
    "seed": {"temperature": 0.5},
    "echo": {"logprobs": 1},
}
_ALWAYS: dict[str, dict[str, bytes]] = {
    "Message": {"content": b'"a"'},
    "ContentPart": {"text": b'"a"'},
}
"""What a type needs in practice beside the fields that it requires."""
_LATE = ("/", "/invocations", "/tokenize", "/chat_tokenize")
"""Routes whose schemas belong to others: those are where a field is looked at as a whole."""
"""What a field needs beside it to be looked at; of these, those that its type has."""


@dataclass(frozen=True)
class Field:
    """One place of a body.

    Attributes:
        path: as ``messages[].content[].text``.
        type: what it takes.
        around: the body with a value, in JSON, in this place.
        items: valid items in JSON, where it takes a list.
        owner: type and field in the source, by which fields of several routes are the same.
    """

    path: str
    type: inspect.Type
    around: Around
    items: tuple[bytes, ...]
    owner: str

    @property
    def name(self) -> str:
        """Of the field itself."""
        return self.path.rpartition(".")[2].rstrip("[]{}")


@dataclass(frozen=True)
class Target:
    """A method of a route; ``bodies`` are types that it takes, none for a route without body."""

    method: str
    path: str
    bodies: tuple[Any, ...]

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    def fields(self) -> Iterator[Field]:
        """Every field of all bodies, those within others too."""
        for body in self.bodies:
            type_ = inspect.type_info(body)
            label = f"{body.__name__}: " if len(self.bodies) > 1 else ""
            yield from _within(type_, label, lambda raw: raw, {}, body.__name__)

    def samples(self) -> Iterator[bytes]:
        """A valid body of each type."""
        for body in self.bodies:
            yield sample(inspect.type_info(body))


def targets() -> list[Target]:
    """All routes; those that a schema is made for come before those that take it too."""
    found = [
        Target(
            method,
            path.replace("{model}", "a").replace("{version}", "1"),
            endpoint.operation.body,
        )
        for (method, path), endpoint in endpoints_of(ROUTES).items()
    ]
    return sorted(found, key=lambda target: target.path in _LATE)


def sample(type_: inspect.Type, owner: str = "", name: str = "") -> bytes:
    """A small valid value."""
    named = _OF.get((owner, name), _NAMED.get(name, b""))
    if named:
        return named
    type_ = _told(type_)
    if isinstance(type_, inspect.StructType):
        return _object(_minimal(type_))
    if isinstance(type_, inspect.LiteralType):
        return json.dumps(type_.values[0]).encode()
    if isinstance(type_, inspect.ListType):
        return b"[" + sample(type_.item_type) + b"]"
    if isinstance(type_, inspect.UnionType):
        real = [each for each in type_.types if not isinstance(each, inspect.NoneType)]
        return sample(real[0])
    kinds = accepted(type_)
    for kind, value in (("str", b'"a"'), ("int", b"1"), ("float", b"0.5"), ("bool", b"true")):
        if kind in kinds:
            return value
    return b"{}"


def _within(
    type_: inspect.Type, path: str, around: Around, structs: Mapping[str, Any], owner: str
) -> Iterator[Field]:
    """Fields of what a place takes."""
    type_ = _told(type_)
    if isinstance(type_, inspect.UnionType):
        for each in type_.types:
            yield from _within(each, path, around, structs, owner)
    elif isinstance(type_, (inspect.ListType, inspect.VarTupleType)):

        def in_list(raw: bytes) -> bytes:
            return around(b"[" + raw + b"]")

        yield from _place(type_.item_type, f"{path}[]", in_list, structs, f"{owner}[]")
    elif isinstance(type_, inspect.DictType):

        def in_object(raw: bytes) -> bytes:
            return around(b'{"a":' + raw + b"}")

        yield from _place(type_.value_type, f"{path}{{}}", in_object, structs, f"{owner}{{}}")
    elif isinstance(type_, inspect.StructType) and type_.cls.__name__ not in structs:
        own = type_.cls.__name__
        inner = {**structs, own: type_}
        front = f"{path}." if path and not path.endswith(" ") else path
        for field in type_.fields:
            name = field.encode_name
            beside = _minimal(type_) | _beside(type_, name)

            def in_struct(raw: bytes, name: str = name, beside: Any = beside) -> bytes:
                return around(_object({**beside, name: raw}))

            yield from _place(field.type, front + name, in_struct, inner, f"{own}.{name}")


def _place(
    type_: inspect.Type, path: str, around: Around, structs: Mapping[str, Any], owner: str
) -> Iterator[Field]:
    # Of unbounded depth, and values of a free object are not the schema's.
    if owner.endswith("{}") and isinstance(_told(type_), inspect.AnyType):
        return
    name = owner.partition(".")[2]
    yield Field(path, type_, around, _items(type_, name), owner)
    yield from _within(type_, path, around, structs, owner)


def _items(type_: inspect.Type, name: str) -> tuple[bytes, ...]:
    """Valid items of the lists that a place takes."""
    type_ = _told(type_)
    if isinstance(type_, inspect.UnionType):
        return tuple(item for each in type_.types for item in _items(each, name))
    if not isinstance(type_, (inspect.ListType, inspect.VarTupleType)):
        return ()
    if name == "input":
        return (b'{"role":"user","content":"a"}',)
    item = _told(type_.item_type)
    if isinstance(item, inspect.UnionType):
        return tuple(map(sample, item.types))
    return (sample(item),)


def _told(type_: inspect.Type) -> inspect.Type:
    """The type itself; of raw JSON, and of what only carries a description, what it is read as."""
    if not isinstance(type_, inspect.Metadata):
        return type_
    if isinstance(type_.type, inspect.RawType) and type_.extra_json_schema:
        return _of_schema(type_.extra_json_schema)
    return _told(type_.type)


def _of_schema(schema: Mapping[str, Any]) -> inspect.Type:
    """The type that a JSON schema describes, as far as the API's document needs it."""
    if "$ref" in schema:
        known = {kind.__name__: kind for kind in _known()}
        return inspect.type_info(known[schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return inspect.UnionType(tuple(map(_of_schema, schema["anyOf"])))
    simple: dict[str, inspect.Type] = (
        {
            "array": inspect.ListType(_of_schema(schema.get("items", {}))),
            "object": inspect.DictType(inspect.StrType(), inspect.AnyType()),
            "string": inspect.StrType(),
            "integer": inspect.IntType(),
            "number": inspect.FloatType(),
            "boolean": inspect.BoolType(),
            "null": inspect.NoneType(),
        }
        if "type" in schema
        else {}
    )
    return simple.get(schema.get("type", ""), inspect.AnyType())


def _known() -> Iterator[Any]:
    for endpoint in ROUTES:
        yield from endpoint.operation.referenced
        yield from endpoint.operation.body


def _minimal(type_: inspect.StructType) -> dict[str, bytes]:
    """Required fields, and a bound of the answer's length where there is one."""
    own = type_.cls.__name__
    found = {
        field.encode_name: sample(field.type, own, field.encode_name)
        for field in type_.fields
        if field.required
    }
    found |= _ALWAYS.get(own, {})
    names = {field.encode_name for field in type_.fields}
    if "parameters" in names and "inputs" in names:
        found["parameters"] = b'{"max_new_tokens":2}'
    for name in TOKEN_COUNTS:
        if name in names:
            return found | {name: b"2"}
    return found


def _beside(type_: inspect.StructType, name: str) -> dict[str, bytes]:
    names = {field.encode_name for field in type_.fields}
    beside = {key: value for key, value in _BESIDE.get(name, {}).items() if key in names}
    return {key: json.dumps(value).encode() for key, value in beside.items()}


def _object(members: Mapping[str, bytes]) -> bytes:
    return b"{" + b",".join(json.dumps(k).encode() + b":" + v for k, v in members.items()) + b"}"
