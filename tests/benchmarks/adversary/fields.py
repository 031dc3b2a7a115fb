"""Enumerate every field of every request schema, with a request body around each.

Routes and body types come from the OpenAPI document (``tgi_cli.router.api.openapi``) and fields
from those types, so that new routes and fields are covered without changes here.
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
LONG_RESPONSES = frozenset({*TOKEN_COUNTS, "min_tokens", "n", "best_of"})
"""Fields with which a client may request a response that takes long."""

_VALUES_BY_NAME: dict[str, bytes] = {
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
"""Valid values of fields whose type does not determine one."""

_VALUES_BY_FIELD: dict[tuple[str, str], bytes] = {
    ("ContentPart", "type"): b'"text"',
    ("Prediction", "type"): b'"content"',
    ("InferRequest", "inputs"): b"",
}
"""The same, for a field of one type. Empty if the type determines a value."""

_PREREQUISITES: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "a"}}]},
    "tool_prompt": {"tools": [{"type": "function", "function": {"name": "a"}}]},
    "best_of": {"do_sample": True},
    "top_k": {"temperature": 0.5},
    "seed": {"temperature": 0.5},
    "echo": {"logprobs": 1},
}
"""Other fields that a field requires to take effect; those that its type has are added."""
_ALWAYS: dict[str, dict[str, bytes]] = {
    "Message": {"content": b'"a"'},
    "ContentPart": {"text": b'"a"'},
}
"""Fields that a type needs in practice beyond its required ones."""
_SHARED_SCHEMA_ROUTES = ("/", "/invocations", "/tokenize", "/chat_tokenize")
"""Routes whose schemas belong to other routes, which are tested first and in full."""


@dataclass(frozen=True)
class Field:
    """One field of a request body.

    Attributes:
        path: such as ``messages[].content[].text``.
        type: accepted type.
        around: returns the body with the given JSON text as the value of this field.
        items: valid list items as JSON text, if it accepts a list.
        owner: type and field in the source, which identify a field that several routes share.
    """

    path: str
    type: inspect.Type
    around: Around
    items: tuple[bytes, ...]
    owner: str

    @property
    def name(self) -> str:
        """Name of the field without its path."""
        return self.path.rpartition(".")[2].rstrip("[]{}")


@dataclass(frozen=True)
class Target:
    """A method of a route; ``bodies`` are the accepted body types, empty without a body."""

    method: str
    path: str
    bodies: tuple[Any, ...]

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    def fields(self) -> Iterator[Field]:
        """Yield every field of all body types, including nested ones."""
        for body in self.bodies:
            type_ = inspect.type_info(body)
            label = f"{body.__name__}: " if len(self.bodies) > 1 else ""
            yield from _nested_fields(type_, label, lambda raw: raw, {}, body.__name__)

    def samples(self) -> Iterator[bytes]:
        """Yield a valid body of each type."""
        for body in self.bodies:
            yield sample(inspect.type_info(body))


def targets() -> list[Target]:
    """Return all routes, those that share another route's schema last."""
    found = [
        Target(
            method,
            path.replace("{model}", "a").replace("{version}", "1"),
            endpoint.operation.body,
        )
        for (method, path), endpoint in endpoints_of(ROUTES).items()
    ]
    return sorted(found, key=lambda target: target.path in _SHARED_SCHEMA_ROUTES)


def sample(type_: inspect.Type, owner: str = "", name: str = "") -> bytes:
    """Return a small valid value as JSON text."""
    known = _VALUES_BY_FIELD.get((owner, name), _VALUES_BY_NAME.get(name, b""))
    if known:
        return known
    type_ = _resolved(type_)
    if isinstance(type_, inspect.StructType):
        return _object(_minimal(type_))
    if isinstance(type_, inspect.LiteralType):
        return json.dumps(type_.values[0]).encode()
    if isinstance(type_, inspect.ListType):
        return b"[" + sample(type_.item_type) + b"]"
    if isinstance(type_, inspect.TupleType):
        return b"[" + b",".join(map(sample, type_.item_types)) + b"]"
    if isinstance(type_, inspect.UnionType):
        real = [each for each in type_.types if not isinstance(each, inspect.NoneType)]
        return sample(real[0])
    kinds = accepted(type_)
    for kind, value in (("str", b'"a"'), ("int", b"1"), ("float", b"0.5"), ("bool", b"true")):
        if kind in kinds:
            return value
    return b"{}"


def _nested_fields(
    type_: inspect.Type, path: str, around: Around, structs: Mapping[str, Any], owner: str
) -> Iterator[Field]:
    """Yield the fields within a value of ``type_``."""
    type_ = _resolved(type_)
    if isinstance(type_, inspect.UnionType):
        for each in type_.types:
            yield from _nested_fields(each, path, around, structs, owner)
    elif isinstance(type_, (inspect.ListType, inspect.VarTupleType)):

        def in_list(raw: bytes) -> bytes:
            return around(b"[" + raw + b"]")

        yield from _field_and_nested(type_.item_type, f"{path}[]", in_list, structs, f"{owner}[]")
    elif isinstance(type_, inspect.TupleType):
        samples = [sample(item) for item in type_.item_types]
        for index, item in enumerate(type_.item_types):

            def in_tuple(raw: bytes, index: int = index) -> bytes:
                values = [*samples[:index], raw, *samples[index + 1 :]]
                return around(b"[" + b",".join(values) + b"]")

            name = f"[{index}]"
            yield from _field_and_nested(item, path + name, in_tuple, structs, owner + name)
    elif isinstance(type_, inspect.DictType):

        def in_object(raw: bytes) -> bytes:
            return around(b'{"a":' + raw + b"}")

        yield from _field_and_nested(
            type_.value_type, f"{path}{{}}", in_object, structs, f"{owner}{{}}"
        )
    elif isinstance(type_, inspect.StructType) and type_.cls.__name__ not in structs:
        own = type_.cls.__name__
        inner = {**structs, own: type_}
        prefix = f"{path}." if path and not path.endswith(" ") else path
        for field in type_.fields:
            name = field.encode_name
            others = _minimal(type_) | _prerequisites(type_, name)

            def in_struct(raw: bytes, name: str = name, others: Any = others) -> bytes:
                return around(_object({**others, name: raw}))

            yield from _field_and_nested(
                field.type, prefix + name, in_struct, inner, f"{own}.{name}"
            )


def _field_and_nested(
    type_: inspect.Type, path: str, around: Around, structs: Mapping[str, Any], owner: str
) -> Iterator[Field]:
    # Values of a free-form object are unbounded in depth and not part of the schema.
    if owner.endswith("{}") and isinstance(_resolved(type_), inspect.AnyType):
        return
    name = owner.partition(".")[2]
    yield Field(path, type_, around, _items(type_, name), owner)
    yield from _nested_fields(type_, path, around, structs, owner)


def _items(type_: inspect.Type, name: str) -> tuple[bytes, ...]:
    """Return valid items of the lists that a field accepts."""
    type_ = _resolved(type_)
    if isinstance(type_, inspect.UnionType):
        return tuple(item for each in type_.types for item in _items(each, name))
    if not isinstance(type_, (inspect.ListType, inspect.VarTupleType)):
        return ()
    if name == "input":
        return (b'{"role":"user","content":"a"}',)
    item = _resolved(type_.item_type)
    if isinstance(item, inspect.UnionType):
        return tuple(map(sample, item.types))
    return (sample(item),)


def _resolved(type_: inspect.Type) -> inspect.Type:
    """Unwrap metadata; for raw JSON, return the type that its JSON schema describes."""
    if not isinstance(type_, inspect.Metadata):
        return type_
    if isinstance(type_.type, inspect.RawType) and type_.extra_json_schema:
        return _of_schema(type_.extra_json_schema)
    return _resolved(type_.type)


def _of_schema(schema: Mapping[str, Any]) -> inspect.Type:
    """Convert the subset of JSON schema that the OpenAPI document uses to a type."""
    if "$ref" in schema:
        types = {kind.__name__: kind for kind in _body_types()}
        return inspect.type_info(types[schema["$ref"].rpartition("/")[2]])
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


def _body_types() -> Iterator[Any]:
    for endpoint in ROUTES:
        yield from endpoint.operation.referenced
        yield from endpoint.operation.body


def _minimal(type_: inspect.StructType) -> dict[str, bytes]:
    """Return the required fields, and a limit of the output tokens if the type has one."""
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


def _prerequisites(type_: inspect.StructType, name: str) -> dict[str, bytes]:
    names = {field.encode_name for field in type_.fields}
    others = {key: value for key, value in _PREREQUISITES.get(name, {}).items() if key in names}
    return {key: json.dumps(value).encode() for key, value in others.items()}


def _object(members: Mapping[str, bytes]) -> bytes:
    return b"{" + b",".join(json.dumps(k).encode() + b":" + v for k, v in members.items()) + b"}"
