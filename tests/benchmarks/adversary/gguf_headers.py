"""GGUF files that are cut, damaged or lie about themselves, and headers of any size.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from functools import partial

from tgi_cli.gguf.reader import MAGIC, GGUFFile

_UINT32, _STRING, _ARRAY, _UINT64 = 4, 8, 9, 10
_LENGTHS = (0, 1, 1 << 16, 1 << 20, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_DAMAGED = 120
"""Files with random bytes in their headers."""
_EMOJI = "\U0001f916".encode()
"""A character for which Python keeps a whole text with four bytes per character."""


def headers(file: GGUFFile) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield variants of a file's bytes by kind."""
    data = file.path.read_bytes()
    first = min(file.tensors.values(), key=lambda tensor: tensor.start)
    for eighth in range(8):
        yield f"{eighth}/8 of its header", partial(_cut, data, first.start * eighth // 8)
        yield (
            f"{eighth}/8 of its weights",
            partial(_cut, data, first.start + (len(data) - first.start) * eighth // 8),
        )
    yield "without its last byte", partial(_cut, data, len(data) - 1)
    yield "with a megabyte more", lambda: data + bytes(1 << 20)
    for version in (0, 1, 4, 3 << 24, (1 << 32) - 1):
        yield f"version {version}", partial(_patched, data, 4, struct.pack("<I", version))
    places = {
        "tensors": 8,
        "keys": 16,
        "bytes of the first key": 24,
        "bytes of the first tensor's name": data.index(_text(first.name)),
        "the first tensor's width": data.index(_text(first.name)) + len(_text(first.name)) + 4,
    }
    tokens = data.find(_text("tokenizer.ggml.tokens"))
    if tokens >= 0:
        tokens += len(_text("tokenizer.ggml.tokens")) + 8
        places |= {"tokens": tokens, "bytes of the first token": tokens + 8}
    for what, offset in places.items():
        (stated,) = struct.unpack_from("<Q", data, offset)
        for length in dict.fromkeys((*_LENGTHS, stated + 1, max(stated - 1, 0))):
            value = struct.pack("<Q", min(length, (1 << 64) - 1))
            yield f"{what}: {length}", partial(_patched, data, offset, value)
    for seed in range(_DAMAGED):
        yield f"random bytes, seed {seed}", partial(_damaged, data, first.start, seed)
    yield from _LARGE.items()


def _cut(data: bytes, size: int) -> bytes:
    return data[:size]


def _patched(data: bytes, offset: int, value: bytes) -> bytes:
    return data[:offset] + value + data[offset + len(value) :]


def _damaged(data: bytes, end: int, seed: int) -> bytes:
    """The file with one to four random bytes in its header, most of them where numbers are."""
    generator = random.Random(seed)
    found = bytearray(data)
    near = [place for place in range(end) if data[place] < 32]
    for _ in range(1 + seed % 4):
        place = generator.choice(near) if generator.random() < 0.8 else generator.randrange(end)
        found[place] = generator.choice((0, 1, 8, 9, 127, 255, generator.randrange(256)))
    return bytes(found)


def _text(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _key(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values


def _texts(count: int, prefix: str = "") -> bytes:
    """An array of short texts, which are all different."""
    values = (_text(prefix + format(number, "x")) for number in range(count))
    return _array(_STRING, count, b"".join(values))


def _file(keys: list[bytes], tensors: list[bytes] | None = None, data: int = 0) -> bytes:
    """A file of version 3 that names an architecture."""
    keys = [_key("general.architecture", _STRING, _text("llama")), *keys]
    tensors = tensors or []
    out = MAGIC + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join((*keys, *tensors))
    return out + bytes(-len(out) % 32) + bytes(data)


def _tokens(count: int) -> bytes:
    """A file with so many tokens, rows of the embedding and merges."""
    rows = _text("token_embd.weight") + struct.pack("<I2QIQ", 2, 32, count, 8, 0)
    keys = [
        _key("tokenizer.ggml.model", _STRING, _text("gpt2")),
        _key("tokenizer.ggml.pre", _STRING, _text("gpt-2")),
        _key("tokenizer.ggml.tokens", _ARRAY, _texts(count)),
        _key("tokenizer.ggml.merges", _ARRAY, _texts(count, "a ")),
    ]
    return _file(keys, [rows], 34 * count)


def _names(count: int, size: int) -> bytes:
    """A file with so many tensors of one number, whose names have so many bytes."""
    tensors = [
        _text(f"{number:0{size}}") + struct.pack("<IQIQ", 1, 1, 0, 32 * number)
        for number in range(count)
    ]
    return _file([], tensors, 32 * count)


_LARGE: dict[str, Callable[[], bytes]] = {
    "a million tokens and merges": lambda: _tokens((1 << 20) - 1),
    "4 million tokens": lambda: _file([_key("tokenizer.ggml.tokens", _ARRAY, _texts(1 << 22))]),
    "4 million tags": lambda: _file([_key("general.tags", _ARRAY, _texts(1 << 22))]),
    "4 million numbers": lambda: _file(
        [_key("llama.a", _ARRAY, _array(_UINT64, 1 << 22, b"\xff" * (1 << 25)))]
    ),
    "a quarter of a million tags": lambda: _file([_key("general.tags", _ARRAY, _texts(1 << 18))]),
    "4 million empty arrays": lambda: _file(
        [_key("general.tags", _ARRAY, _array(_ARRAY, 1 << 22, _array(_UINT32, 0, b"") * (1 << 22)))]
    ),
    "a text of 240 MB": lambda: _file(
        [_key("general.name", _STRING, _text(b"a" * (240 << 20) + _EMOJI))]
    ),
    "a text of 15 MB": lambda: _file(
        [_key("general.name", _STRING, _text(b"a" * (15 << 20) + _EMOJI))]
    ),
    "tokens of 31 MB": lambda: _file(
        [
            _key(
                "tokenizer.ggml.tokens",
                _ARRAY,
                _array(_STRING, 31, _text(b"a" * ((1 << 20) - 100) + _EMOJI) * 31),
            )
        ]
    ),
    "65,000 keys": lambda: _file(
        [_key(f"a.{number}", _STRING, _text("a")) for number in range(65_000)]
    ),
    "65,000 keys of 3 KB": lambda: _file(
        [_key(f"{number:03000}", _STRING, _text("a")) for number in range(65_000)]
    ),
    "65,000 tensors": lambda: _names(65_000, 100),
    "250,000 tensors": lambda: _names(250_000, 60),
    "60,000 tensors with names of 1 KB": lambda: _names(60_000, 1000),
}
