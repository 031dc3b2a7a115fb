"""Every field of every request has a bound of its length, number, range or depth."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import msgspec
import pytest
from msgspec import Meta, inspect

from tgi_cli.router import api, bounds
from tgi_cli.router.api.schemas import platforms, tgi
from tgi_cli.router.app import ROUTES

MARKS = {
    "payload": (inspect.StrType,),
    "values": (inspect.AnyType, inspect.DictType, inspect.ListType),
    "checked": (inspect.IntType,),
}
"""What stands for a bound on each kind of type: see :mod:`tgi_cli.router.bounds`."""


def decoded() -> set[Any]:
    """The types that all routes decode, and those of the decoders of their modules."""
    modules = [
        importlib.import_module(f"{api.__name__}.{module.name}")
        for module in pkgutil.iter_modules(api.__path__)
    ]
    decoders = {
        value.type
        for module in modules
        for value in vars(module).values()
        if isinstance(value, msgspec.json.Decoder)
    }
    operations = [endpoint.operation for endpoint in ROUTES]
    return decoders | {kind for each in operations for kind in (*each.body, *each.referenced)}


def unbounded(kind: inspect.Type, where: str, seen: set[type], mark: str = "") -> Iterator[str]:
    """The places within a type that have no bound."""
    if isinstance(kind, inspect.Metadata):
        mark = (kind.extra or {}).get("bound", "")
        yield from unbounded(kind.type, where, seen, mark)
    elif mark and isinstance(kind, MARKS[mark]):
        pass
    elif isinstance(kind, inspect.StructType):
        if kind.cls not in seen:
            seen.add(kind.cls)
            for field in kind.fields:
                name = f"{kind.cls.__name__}.{field.name}"
                yield from unbounded(field.type, name, seen, "")
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from unbounded(one, where, seen, mark)
    elif isinstance(kind, inspect.StrType):
        if kind.max_length is None and kind.pattern is None:
            yield f"{where}: str"
    elif isinstance(kind, inspect.IntType):
        if {kind.ge, kind.gt} == {None} or {kind.le, kind.lt} == {None}:
            yield f"{where}: int"
    elif isinstance(kind, inspect.ListType):
        if kind.max_length is None:
            yield f"{where}: list"
        yield from unbounded(kind.item_type, f"{where}[]", seen, "")
    elif isinstance(kind, inspect.TupleType):
        for index, item in enumerate(kind.item_types):
            yield from unbounded(item, f"{where}[{index}]", seen, "")
    elif isinstance(kind, inspect.DictType):
        if kind.max_length is None:
            yield f"{where}: dict"
        yield from unbounded(kind.key_type, f"{where} (key)", seen, "")
        yield from unbounded(kind.value_type, f"{where}{{}}", seen, "")
    elif not isinstance(
        kind,
        inspect.BoolType | inspect.FloatType | inspect.NoneType | inspect.LiteralType
        | inspect.EnumType | inspect.RawType,
    ):  # fmt: skip
        yield f"{where}: {type(kind).__name__}"


def found(kind: Any) -> list[str]:
    """The places of a type that have no bound."""
    return list(unbounded(inspect.type_info(kind), "", set()))


def test_every_field_of_every_request_has_a_bound() -> None:
    types = decoded()
    assert len(types) >= 14
    assert {tgi.GenerateRequest, platforms.VertexInstance, platforms.InferRequest} <= {
        kind for kind in types if isinstance(kind, type)
    }
    places = {place for kind in types for place in found(kind)}
    assert not places, "\n".join(sorted(places))


class Inner(msgspec.Struct):
    text: str
    count: int | None
    fine: bounds.Name | bounds.Text | bounds.Signed32 | None


class Outer(msgspec.Struct):
    inner: list[Inner]
    named: dict[str, float]
    anything: Any
    many: Annotated[list[bounds.Text], Meta(max_length=3)]
    half: Annotated[int, Meta(ge=0)]
    wrong: Annotated[str, Meta(extra={"bound": "values"})]
    right: bounds.Json | None
    known: bounds.JsonObject | bounds.TokenIds | None
    biases: bounds.LogitBias | bounds.LogitBiasPairs
    pair: tuple[int, float]


def test_unbounded_fields_are_detected() -> None:
    assert found(Outer) == [
        "Outer.inner: list",
        "Inner.text: str",
        "Inner.count: int",
        "Outer.named: dict",
        "Outer.named (key): str",
        "Outer.anything: AnyType",
        "Outer.half: int",
        "Outer.wrong: str",
        "Outer.pair[0]: int",
    ]


@pytest.mark.parametrize(
    ("route", "body", "cause"),
    [
        ("/generate", {"parameters": {"adapter_id": "a" * 513}}, "length <= 512"),
        ("/generate", {"parameters": {"stop": ["a" * 1025]}}, "length <= 1024"),
        ("/generate", {"parameters": {"stop": ["a"] * 1025}}, "length <= 1024"),
        ("/vertex", {"instances": [{}] * 4097}, "length <= 4096"),
        ("/v2/models/m/infer", {"inputs": [], "id": "a" * 513}, "length <= 512"),
        (
            "/v2/models/m/infer",
            {"inputs": [{"name": "a", "shape": [1] * 17, "datatype": "a", "data": []}]},
            "length <= 16",
        ),
    ],
)
async def test_bounds_are_in_the_error(
    client: httpx.AsyncClient, route: str, body: dict[str, Any], cause: str
) -> None:
    answer = await client.post(route, json={"inputs": "a", **body})
    assert answer.status_code == 422
    assert cause in answer.text


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "stop": "a" * 1025}, "stop"),
        ("/v1/completions", {"prompt": "a", "stop": ["a"] * 1025}, "stop"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["a"] * 257}, "bad_words"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["a" * 257]}, "bad_words"),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": [5] * 4097}, "allowed_token_ids"),
        ("/v1/completions", {"prompt": "a", "n": 1 << 31}, "n"),
        ("/v1/completions", {"prompt": "a", "cache_salt": "a" * 513}, "cache_salt"),
        ("/v1/chat/completions", {"messages": [{}] * 10_001}, "messages"),
        ("/v1/chat/completions", {"messages": [], "tools": [{}] * 1025}, "tools"),
        ("/v1/chat/completions", {"messages": [{"role": "a" * 513}]}, "messages"),
        ("/v1/responses", {"input": [{}] * 20_001}, "input"),
        ("/v1/responses", {"input": "a", "include": ["a"] * 1025}, "include"),
    ],
)
async def test_bounds_are_in_openais_errors(
    client: httpx.AsyncClient, route: str, body: dict[str, Any], param: str
) -> None:
    answer = await client.post(route, json=body)
    assert answer.status_code in (400, 422)
    assert f"`$.{param}" in answer.text or answer.json()["error"]["param"].startswith(param)
