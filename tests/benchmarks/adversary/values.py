"""Extreme values for a type of a schema, as JSON text: long, numerous, deep or unusual."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import inspect

from tests.benchmarks.adversary import hostile

MakeValues = Callable[[], Sequence[bytes]]


@dataclass(frozen=True)
class ValueSet:
    """Values that are sent one after the other and measured as one case.

    Attributes:
        kind: describes them in the report.
        values: returns them as JSON text; called when they are sent.
        separate: each is a case of its own, since it may use its own time limit (grammars).
    """

    kind: str
    values: MakeValues
    separate: bool = False


@functools.cache
def _random_text(characters: int = 5000) -> bytes:
    """Return letters of many scripts, emoji and combining marks, the same in every run."""
    generator = random.Random(0)
    ranges = ((0xA1, 0x24F), (0x300, 0x36F), (0x400, 0x52F), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF))
    points = (generator.randint(*generator.choice(ranges)) for _ in range(characters))
    return "".join(map(chr, points)).encode()


def alphabets() -> dict[str, bytes]:
    """Return the units that long strings repeat, by name, escaped for JSON strings."""
    return {
        "letters": b"a",
        "words": b"the quick brown fox jumps over the lazy dog ",
        "spaces": b" ",
        "newlines": rb"\n",
        "special tokens": b"<|im_start|>",
        "scripts": _random_text(),
        "zero-width": "\u200b".encode(),
        "escapes": rb"\u0001",
        "digits": b"1234567890",
    }


def string(unit: bytes, size: int) -> bytes:
    """Return a JSON string of at most ``size`` bytes that repeats ``unit``."""
    return b'"' + unit * max((size - 2) // len(unit), 0) + b'"'


def items(item: bytes, size: int) -> bytes:
    """Return a JSON array that repeats ``item`` within ``size`` bytes."""
    return b"[" + b",".join([item] * max((size - 1) // (len(item) + 1), 1)) + b"]"


def keys(size: int, value: bytes = b"1") -> bytes:
    """Return a JSON object with as many distinct keys as fit in ``size`` bytes."""
    each = len(value) + 11
    return b"{" + b",".join(b'"k%06x":%b' % (n, value) for n in range(max(size // each, 1))) + b"}"


def nested(depth: int, front: bytes = b"[", back: bytes = b"]", core: bytes = b"1") -> bytes:
    """Return ``core`` nested in ``depth`` brackets."""
    return front * depth + core + back * depth


ODD_STRINGS = (
    b'""',
    b'" "',
    rb'"\u0000"',
    rb'"\ud800"',
    rb'"\ud83d\ude00"',
    '"\ufeff\ufffe\u202e"'.encode(),
    b'"\xff\xfe"',
    b'"NaN"',
    b'"-1"',
    b'"/dev/zero"',
    b'"../../../../../../etc/passwd"',
    b'"http://127.0.0.1:1/a"',
    b'"%s%n%x{}{0}${a}"',
)
WHOLE_NUMBERS = tuple(
    str(number).encode()
    for number in (
        *(0, -1, 255, 256, 65536, 10**6, 10**9),
        *(2**bits + step for bits in (31, 32, 63, 64) for step in (-1, 0)),
        *(-(2**bits) + step for bits in (31, 32, 63, 64) for step in (-1, 0)),
        *(10**400, -(10**400)),
    )
)  # fmt: skip
FLOATS = (
    *(b"1e308", b"-1e308", b"1e-308", b"5e-324", b"3.5e38", b"3.4e38", b"-3.5e38", b"1e-46"),
    *(b"1e400", b"-1e400", b"-0.0", b"1e-400", b"NaN", b"Infinity", b"-Infinity"),
    b"0." + b"0" * 400 + b"1",
)
WRONG_TYPES = (b"null", b"true", b"0", b"1.5", b'"a"', b"[]", b"{}", b"[[]]", b'{"":null}', b"")


def accepted(type_: inspect.Type) -> set[str]:
    """Return the kinds of values that a type accepts: str, int, float, bool, list, dict, none."""
    if isinstance(type_, inspect.Metadata):
        return accepted(type_.type)
    if isinstance(type_, inspect.UnionType):
        return set().union(*map(accepted, type_.types))
    names: tuple[tuple[Any, str], ...] = (
        (inspect.StrType, "str"),
        (inspect.LiteralType, "str"),
        (inspect.IntType, "int"),
        (inspect.FloatType, "float"),
        (inspect.BoolType, "bool"),
        (inspect.NoneType, "none"),
        ((inspect.ListType, inspect.TupleType, inspect.VarTupleType), "list"),
        ((inspect.DictType, inspect.StructType), "dict"),
        ((inspect.AnyType, inspect.RawType), "any"),
    )
    for kind, name in names:
        if isinstance(type_, kind):
            return {"str", "int", "float", "bool", "list", "dict"} if name == "any" else {name}
    raise TypeError(f"no extreme values for {type_}")


def _is_free_form(type_: inspect.Type) -> bool:
    """Return whether a type accepts objects with arbitrary members."""
    if isinstance(type_, inspect.Metadata):
        return _is_free_form(type_.type)
    if isinstance(type_, inspect.UnionType):
        return any(map(_is_free_form, type_.types))
    if isinstance(type_, inspect.DictType):
        return _is_free_form(type_.value_type)
    return isinstance(type_, (inspect.AnyType, inspect.RawType))


def value_sets(
    type_: inspect.Type, size: int, item: Sequence[bytes] = (), full: bool = True
) -> Iterator[ValueSet]:
    """Yield all value sets for a field of type ``type_``.

    Args:
        size: bytes that the payload limit leaves for the value.
        item: valid items, if the type accepts lists.
        full: include values that exercise the code behind the field; otherwise, only what
            exercises decoding, and the largest value of each kind.
    """
    kinds = accepted(type_)
    yield ValueSet("wrong types", lambda: WRONG_TYPES)
    yield ValueSet("deep", lambda: list(_deep(size, full)))
    if "str" in kinds:
        yield from _strings(size, full)
    else:
        yield ValueSet("a long string", lambda: [string(b"a", size)])
    if kinds & {"int", "float"}:
        yield ValueSet("numbers", lambda: (*WHOLE_NUMBERS, *FLOATS))
        yield ValueSet("a long number", lambda: [b"1" * size, b"1." + b"1" * (size - 2)])
    if "list" in kinds:
        yield from _lists(size, item, full)
    elif full:
        yield ValueSet("a long list", lambda: [items(b"1", size)])
    if "dict" in kinds:
        yield from _objects(size, full, full and _is_free_form(type_))


def _strings(size: int, full: bool) -> Iterator[ValueSet]:
    for small in (20_000, 200_000) if full else ():
        if small < size:
            yield ValueSet(
                f"letters, {small // 1000} KB", lambda small=small: [string(b"a", small)]
            )
    units = alphabets()
    for name in units if full else ("letters", "words", "scripts", "special tokens"):
        yield ValueSet(f"long: {name}", lambda name=name: [string(units[name], size)])
    yield ValueSet("odd strings", lambda: ODD_STRINGS)
    if full:
        for name, texts in hostile.TEXTS.items():
            yield ValueSet(name, lambda texts=texts: [json.dumps(t).encode() for t in texts], True)


def _lists(size: int, item: Sequence[bytes], full: bool) -> Iterator[ValueSet]:
    many = list(dict.fromkeys((*item, *((b'"a"', b"1", b"[]", b"{}", b"[1]") if full else ()))))
    for each in many:
        yield ValueSet(f"many {each[:40].decode()}", lambda each=each: [items(each, size)])
    if full:
        for count in (256, 4096):
            one = string(b"a", size // count - 2)
            yield ValueSet(f"{count} long strings", lambda one=one: [items(one, size)])
        yield ValueSet("many numbers", lambda: [_counted(size)])


def _counted(size: int) -> bytes:
    """Return distinct numbers, which are not cached objects in CPython."""
    return b"[" + b",".join(b"%d" % n for n in range(100_000, 100_000 + size // 8)) + b"]"


def _objects(size: int, full: bool, free_form: bool) -> Iterator[ValueSet]:
    yield ValueSet("many keys", lambda: [keys(size)])
    yield ValueSet("a long key", lambda: [b"{" + string(b"a", size - 8) + b":1}"])
    if full:
        yield ValueSet("many keys of objects", lambda: [keys(size, b'{"a":[]}')])
        yield ValueSet("a long value", lambda: [b'{"a":' + string(b"a", size - 8) + b"}"])
        yield ValueSet("the same key", lambda: [b"{" + b",".join([b'"a":1'] * (size // 6)) + b"}"])
    for name, objects in hostile.objects().items() if free_form else ():
        yield ValueSet(
            name, lambda objects=objects: [json.dumps(o).encode() for o in objects], True
        )


def _deep(size: int, full: bool) -> Iterator[bytes]:
    for depth in (60, 500, 10_000, (size - 1) // 2) if full else ((size - 1) // 2,):
        yield nested(min(depth, (size - 1) // 2))
    for depth in (60, 500, (size - 1) // 6) if full else ():
        yield nested(depth, b'{"a":', b"}")
    if full:
        yield b"[" * size
