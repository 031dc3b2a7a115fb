"""Values that are too long, too many, too deep or odd, as JSON text, for a type of a schema."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import inspect

from tests.benchmarks.adversary import hostile

Values = Callable[[], Sequence[bytes]]


@dataclass(frozen=True)
class Shot:
    """Values that are sent one after the other and measured together.

    Attributes:
        kind: what is extreme about them.
        values: makes them, as JSON text; called when they are sent.
        apart: they may cost their declared time (a grammar's), so each is measured for itself.
    """

    kind: str
    values: Values
    apart: bool = False


@functools.cache
def _random_text(characters: int = 5000) -> bytes:
    """Letters of many scripts, emoji and combining marks, the same in every run."""
    dice = random.Random(0)
    ranges = ((0xA1, 0x24F), (0x300, 0x36F), (0x400, 0x52F), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF))
    points = (dice.randint(*dice.choice(ranges)) for _ in range(characters))
    return "".join(map(chr, points)).encode()


def alphabets() -> dict[str, bytes]:
    """What a long string repeats, by name, as inside of JSON's quotes."""
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
    """A JSON string of at most ``size`` bytes that repeats ``unit``."""
    return b'"' + unit * max((size - 2) // len(unit), 0) + b'"'


def items(item: bytes, size: int) -> bytes:
    """A JSON array of as many ``item`` as ``size`` bytes hold."""
    return b"[" + b",".join([item] * max((size - 1) // (len(item) + 1), 1)) + b"]"


def keys(size: int, value: bytes = b"1") -> bytes:
    """An object of as many different keys as ``size`` bytes hold."""
    each = len(value) + 11
    return b"{" + b",".join(b'"k%06x":%b' % (n, value) for n in range(max(size // each, 1))) + b"}"


def nested(depth: int, front: bytes = b"[", back: bytes = b"]", core: bytes = b"1") -> bytes:
    """``core`` within ``depth`` brackets."""
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
    """Names of the kinds of values that a type takes: str, int, float, bool, list, dict, any."""
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
        ((inspect.ListType, inspect.VarTupleType), "list"),
        ((inspect.DictType, inspect.StructType), "dict"),
        ((inspect.AnyType, inspect.RawType), "any"),
    )
    for kind, name in names:
        if isinstance(type_, kind):
            return {"str", "int", "float", "bool", "list", "dict"} if name == "any" else {name}
    raise TypeError(f"no values are known for {type_}")


def _free(type_: inspect.Type) -> bool:
    """Whether a place takes objects of any members."""
    if isinstance(type_, inspect.Metadata):
        return _free(type_.type)
    if isinstance(type_, inspect.UnionType):
        return any(map(_free, type_.types))
    if isinstance(type_, inspect.DictType):
        return _free(type_.value_type)
    return isinstance(type_, (inspect.AnyType, inspect.RawType))


def shots(
    type_: inspect.Type, size: int, item: Sequence[bytes] = (), whole: bool = True
) -> Iterator[Shot]:
    """All for a place that takes ``type_`` and leaves ``size`` bytes.

    Args:
        item: valid items, where it takes a list.
        whole: also what only matters to the code that handles this field; without, what the
            way to it may cost: decoding, and the largest of each kind.
    """
    kinds = accepted(type_)
    yield Shot("wrong types", lambda: WRONG_TYPES)
    yield Shot("deep", lambda: list(_deep(size, whole)))
    if "str" in kinds:
        yield from _strings(size, whole)
    else:
        yield Shot("a long string", lambda: [string(b"a", size)])
    if kinds & {"int", "float"}:
        yield Shot("numbers", lambda: (*WHOLE_NUMBERS, *FLOATS))
        yield Shot("a long number", lambda: [b"1" * size, b"1." + b"1" * (size - 2)])
    if "list" in kinds:
        yield from _lists(size, item, whole)
    elif whole:
        yield Shot("a long list", lambda: [items(b"1", size)])
    if "dict" in kinds:
        yield from _objects(size, whole, whole and _free(type_))


def _strings(size: int, whole: bool) -> Iterator[Shot]:
    for small in (20_000, 200_000) if whole else ():
        if small < size:
            yield Shot(f"letters, {small // 1000} KB", lambda small=small: [string(b"a", small)])
    units = alphabets()
    for name in units if whole else ("letters", "words", "scripts", "special tokens"):
        yield Shot(f"long: {name}", lambda name=name: [string(units[name], size)])
    yield Shot("odd strings", lambda: ODD_STRINGS)
    if whole:
        for name, texts in hostile.TEXTS.items():
            yield Shot(name, lambda texts=texts: [json.dumps(t).encode() for t in texts], True)


def _lists(size: int, item: Sequence[bytes], whole: bool) -> Iterator[Shot]:
    many = list(dict.fromkeys((*item, *((b'"a"', b"1", b"[]", b"{}", b"[1]") if whole else ()))))
    for each in many:
        yield Shot(f"many {each[:40].decode()}", lambda each=each: [items(each, size)])
    if whole:
        for count in (256, 4096):
            one = string(b"a", size // count - 2)
            yield Shot(f"{count} long strings", lambda one=one: [items(one, size)])
        yield Shot("many numbers", lambda: [_counted(size)])


def _counted(size: int) -> bytes:
    """Different numbers: they can be no cached objects."""
    return b"[" + b",".join(b"%d" % n for n in range(100_000, 100_000 + size // 8)) + b"]"


def _objects(size: int, whole: bool, free: bool) -> Iterator[Shot]:
    yield Shot("many keys", lambda: [keys(size)])
    yield Shot("a long key", lambda: [b"{" + string(b"a", size - 8) + b":1}"])
    if whole:
        yield Shot("many keys of objects", lambda: [keys(size, b'{"a":[]}')])
        yield Shot("a long value", lambda: [b'{"a":' + string(b"a", size - 8) + b"}"])
        yield Shot("the same key", lambda: [b"{" + b",".join([b'"a":1'] * (size // 6)) + b"}"])
    for name, objects in hostile.objects().items() if free else ():
        yield Shot(name, lambda objects=objects: [json.dumps(o).encode() for o in objects], True)


def _deep(size: int, whole: bool) -> Iterator[bytes]:
    for depth in (60, 500, 10_000, (size - 1) // 2) if whole else ((size - 1) // 2,):
        yield nested(min(depth, (size - 1) // 2))
    for depth in (60, 500, (size - 1) // 6) if whole else ():
        yield nested(depth, b'{"a":', b"}")
    if whole:
        yield b"[" * size
