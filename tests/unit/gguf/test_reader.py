"""Headers of GGUF files: valid ones, and ones that lie."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tgi_cli.errors import CorruptFileError, TgiError, UnsupportedModelError
from tgi_cli.gguf.reader import GGUFFile, is_gguf, read_gguf, shard_paths
from tgi_cli.gguf.tensor_types import TENSOR_TYPES

UINT8, BOOL, UINT32, FLOAT32, STRING, ARRAY, UINT64 = 0, 7, 4, 6, 8, 9, 10

Tensor = tuple[str, Sequence[int], int, int]
"""Name, dimensions as stored, number of the type, offset."""


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values


def header(
    keys: Sequence[bytes] = (),
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    data: int = 0,
    alignment: int = 32,
) -> bytes:
    """A file's bytes; the numbers of keys and tensors may lie."""
    out = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    out += b"".join(keys)
    for name, dims, kind, offset in tensors:
        out += text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<IQ", kind, offset)
    return out + bytes(-len(out) % alignment) + bytes(data)


def read(path: Path, content: bytes) -> GGUFFile:
    path.write_bytes(content)
    return read_gguf(path)


ARCHITECTURE = key("general.architecture", STRING, text("llama"))


@pytest.mark.parametrize("version", [2, 3])
def test_values_and_tensors(version: int, tmp_path: Path) -> None:
    keys = [
        ARCHITECTURE,
        key("a.number", UINT32, struct.pack("<I", 7)),
        key("a.large", UINT64, struct.pack("<Q", 1 << 60)),
        key("a.real", FLOAT32, struct.pack("<f", 0.5)),
        key("a.flag", BOOL, b"\1"),
        key("a.words", ARRAY, array(STRING, 2, text("ä") + text(""))),
        key("a.counts", ARRAY, array(UINT32, 3, struct.pack("<3I", 1, 2, 3))),
        key("a.flags", ARRAY, array(BOOL, 2, b"\0\1")),
    ]
    tensors = [("token_embd.weight", (32, 3), 8, 0), ("output_norm.weight", (5,), 0, 128)]
    content = header(keys, tensors, version=version, data=128 + 20)
    file = read(tmp_path / "model.gguf", content)
    assert is_gguf(file.path)
    assert file.architecture == "llama"
    assert file.get("a.number", int, 0) == 7
    assert file.get("a.large", int, 0) == 1 << 60
    assert file.get("a.number", float, 0.0) == 7.0
    assert file.get("a.real", float, 0.0) == 0.5
    assert file.get("a.flag", bool, False) is True
    assert file.get("a.missing", str, "none") == "none"
    assert file.values("a.words", str) == ["ä", ""]
    assert file.values("a.counts", int) == [1, 2, 3]
    assert [*map(type, file.values("a.counts", float))] == [float] * 3
    assert file.values("a.flags", bool) == [False, True]
    table, norm = file.tensors.values()
    assert (table.shape, table.type.name, table.size) == ((3, 32), "Q8_0", 3 * 34)
    assert (norm.shape, norm.type.name, norm.elements) == ((5,), "F32", 5)
    assert norm.start == table.start + 128
    assert file.size == len(content)


@pytest.mark.parametrize(("name", "kind"), [("a.words", str), ("a.word", int), ("a.flag", int)])
def test_values_of_another_type(name: str, kind: type, tmp_path: Path) -> None:
    keys = [
        key("a.words", ARRAY, array(UINT8, 1, b"\1")),
        key("a.word", STRING, text("x")),
        key("a.flag", BOOL, b"\1"),
    ]
    file = read(tmp_path / "model.gguf", header(keys))
    with pytest.raises(CorruptFileError, match=name):
        file.values(name, kind) if name == "a.words" else file.get(name, kind, kind())


def test_alignment(tmp_path: Path) -> None:
    keys = [key("general.alignment", UINT32, struct.pack("<I", 256))]
    tensors = [("a", (4,), 0, 0), ("b", (4,), 0, 256)]
    file = read(tmp_path / "model.gguf", header(keys, tensors, alignment=256, data=512))
    assert [each.start % 256 for each in file.tensors.values()] == [0, 0]


LIES = {
    "nothing": (b"", "not a GGUF file"),
    "another file": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    "a cut header": (header([ARCHITECTURE])[:40], "truncated"),
    "more keys than there are": (header([ARCHITECTURE], num_keys=2), "without a name"),
    "very many keys": (header([ARCHITECTURE], num_keys=1 << 60), "keys"),
    "very many tensors": (header([ARCHITECTURE], num_tensors=1 << 60), "tensors"),
    "a long key": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(100),
        "name of 4611686018427387904 bytes",
    ),
    "a long value": (header([key("a", STRING, struct.pack("<Q", 1 << 50))]), "truncated"),
    "an array without an end": (
        header([key("a", ARRAY, array(UINT8, 1 << 62, b""))]),
        "keys with more values",
    ),
    "an array that is cut": (header([key("a", ARRAY, array(UINT64, 1 << 17, b""))]), "truncated"),
    "texts that are cut": (header([key("a", ARRAY, array(STRING, 1 << 17, b""))]), "truncated"),
    "arrays of arrays": (
        header([key("a", ARRAY, array(ARRAY, 1 << 17, array(UINT8, 0, b"") * (1 << 17)))]),
        "array of arrays",
    ),
    "an unknown type of value": (header([key("a", 77, b"")]), "type 77"),
    "an unknown type of values": (header([key("a", ARRAY, array(77, 1, b""))]), "type 77"),
    "a key twice": (header([ARCHITECTURE, ARCHITECTURE]), "twice"),
    "bytes that are no text": (header([key("a", STRING, text(b"\xff\xfe"))]), "UTF-8"),
    "an alignment of 3": (
        header([key("general.alignment", UINT32, struct.pack("<I", 3))]),
        "alignment",
    ),
    "an alignment of 0": (
        header([key("general.alignment", UINT32, struct.pack("<I", 0))]),
        "alignment",
    ),
    "a truncated file": (header((), [("a", (1024,), 0, 0)], data=100), "truncated"),
    "a huge tensor": (header((), [("a", (1 << 40, 1 << 40), 0, 0)], data=100), "truncated"),
    "an offset beyond the end": (header((), [("a", (4,), 0, 1 << 60)], data=100), "truncated"),
    "a tensor with a long name": (header((), [("a" * 129, (4,), 0, 0)], data=100), "of 129 bytes"),
    "many dimensions": (header((), [("a", (1,) * 9, 0, 0)], data=100), "9 dimensions"),
    "a dimension of 0": (header((), [("a", (32, 0), 8, 0)], data=100), r"\[0, 32\]"),
    "half a block": (header((), [("a", (48, 2), 8, 0)], data=200), r"\[2, 48\]"),
    "a tensor out of line": (header((), [("a", (4,), 0, 3)], data=100), "not aligned"),
    "a tensor twice": (header((), [("a", (4,), 0, 0), ("a", (4,), 0, 32)], data=100), "twice"),
    "tensors in one place": (
        header((), [("a", (16,), 0, 0), ("b", (16,), 0, 32)], data=200),
        "overlaps",
    ),
}


def words(count: int) -> bytes:
    """An array of texts of six letters."""
    return array(STRING, count, text("abcdef") * count)


TOKENS, JSON = "tokenizer.ggml.tokens", "tokenizer.huggingface.json"

EXCESSES: dict[str, tuple[Callable[[], bytes], str]] = {
    "texts": (
        lambda: key("general.tags", ARRAY, words((1 << 18) + 1)),
        "keys with more values",
    ),
    "tokens": (
        lambda: key(TOKENS, ARRAY, words((1 << 21) + 1)),
        "arrays of a tokenizer with more values",
    ),
    "numbers": (
        lambda: key("llama.a", ARRAY, array(UINT64, 1 << 19, bytes(1 << 22))),
        "keys with more values",
    ),
    "a text that is large in memory": (
        lambda: key("general.name", STRING, text("a" * (16 << 20) + "\U0001f916")),
        "keys with more bytes",
    ),
    "tokens that are large in memory": (
        lambda: key(TOKENS, ARRAY, array(STRING, 1, text("a" * (33 << 20) + "\U0001f916"))),
        "arrays of a tokenizer with more bytes",
    ),
    "a tokenizer.json": (
        lambda: key(JSON, STRING, text(bytes(41 << 20))),
        f"a {JSON} with more bytes",
    ),
    "names": (
        lambda: b"".join(text(f"{number:04}" * 4000) + bytes(5) for number in range(1100)),
        "keys with more bytes",
    ),
}
"""Keys that no model has: their bytes, and the error."""


@pytest.mark.parametrize("name", EXCESSES)
@pytest.mark.parametrize("vocabulary", [True, False])
def test_what_is_more_than_any_model_has_takes_no_memory(
    name: str, vocabulary: bool, tmp_path: Path
) -> None:
    make, why = EXCESSES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(header([make()], num_keys=1100 if name == "names" else 1))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError, match=why):
            read_gguf(path, vocabulary=vocabulary)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_the_largest_vocabularies_are_read(tmp_path: Path) -> None:
    count = 400_000
    keys = [
        ARCHITECTURE,
        key(TOKENS, ARRAY, words(count)),
        key("tokenizer.ggml.token_type", ARRAY, array(UINT8, count, bytes(count))),
        key("tokenizer.ggml.merges", ARRAY, words(2 * count)),
        key("tokenizer.ggml.scores", ARRAY, array(FLOAT32, count, bytes(4 * count))),
    ]
    file = read(tmp_path / "model.gguf", header(keys))
    assert len(file.values("tokenizer.ggml.merges", str)) == 2 * count
    assert len(file.values("tokenizer.ggml.scores", float)) == count


@pytest.mark.parametrize("name", LIES)
def test_headers_that_lie(name: str, tmp_path: Path) -> None:
    content, why = LIES[name]
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError, match=why) as error:
            read(tmp_path / "model.gguf", content)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in error.value.cause
    assert error.value.remedy


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (header(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header((), [("a", (32,), 99, 0)], data=100), "number 99"),
        (header((), [("a", (32,), 31, 0)], data=100), "Q4_0_4_4"),
    ],
)
def test_what_is_not_supported(content: bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        read(tmp_path / "model.gguf", content)


def test_every_cut_of_a_file_is_an_error(tmp_path: Path) -> None:
    keys = [ARCHITECTURE, key("a.words", ARRAY, array(STRING, 2, text("ab") + text("c")))]
    content = header(keys, [("a", (32,), 8, 0)], data=34)
    for end in range(len(content) - 1):
        with pytest.raises(TgiError):
            read(tmp_path / "model.gguf", content[:end])


def shard(number: int, count: int, names: Sequence[str], total: int) -> bytes:
    keys = [
        key("split.no", UINT32, struct.pack("<I", number)),
        key("split.count", UINT32, struct.pack("<I", count)),
        key("split.tensors.count", UINT32, struct.pack("<I", total)),
    ]
    if number == 0:
        keys.append(ARCHITECTURE)
    tensors = [(name, (8,), 0, 32 * index) for index, name in enumerate(names)]
    return header(keys, tensors, data=32 * len(names))


def test_parts(tmp_path: Path) -> None:
    files = [tmp_path / f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for number, file in enumerate(files):
        file.write_bytes(shard(number, 3, [f"t{number}", f"u{number}"], 6))
    assert shard_paths(files[1]) == tuple(files)
    for file in files:  # whichever is named
        found = read_gguf(file)
        assert found.path == files[0]
        assert found.architecture == "llama"
        assert list(found.tensors) == ["t0", "u0", "t1", "u1", "t2", "u2"]
        assert found.tensors["u1"].file == files[1]
        assert found.size == sum(each.stat().st_size for each in files)
    files[1].write_bytes(shard(2, 3, ["t1", "u1"], 6))
    with pytest.raises(CorruptFileError, match="is part 3 by its header, and part 2 by its name"):
        read_gguf(files[0])
    first = files[0].read_bytes()
    files[0].write_bytes(shard(1, 3, ["t0", "u0"], 6))
    with pytest.raises(CorruptFileError, match="is part 2 by its header, and part 1 by its name"):
        read_gguf(files[1])
    files[0].write_bytes(first)
    files[1].write_bytes(shard(1, 3, ["t0", "u1"], 6))
    with pytest.raises(CorruptFileError, match="t0 is in an earlier part"):
        read_gguf(files[0])
    files[1].write_bytes(shard(1, 3, ["t1"], 6))
    with pytest.raises(CorruptFileError, match="5 of 6 tensors"):
        read_gguf(files[0])
    files[1].unlink()
    with pytest.raises(CorruptFileError, match=r"m-00002-of-00003\.gguf"):
        read_gguf(files[0])
    alone = tmp_path / "alone.gguf"
    files[0].rename(alone)
    with pytest.raises(CorruptFileError, match="one of 3 files by its header"):
        read_gguf(alone)


def test_the_vocabulary_can_be_left_out(tmp_path: Path) -> None:
    tokens = array(STRING, 2, text("a") + text("b"))
    keys = [
        ARCHITECTURE,
        key("tokenizer.ggml.tokens", ARRAY, tokens),
        key("tokenizer.ggml.token_type", ARRAY, array(UINT32, 2, struct.pack("<2I", 1, 1))),
        key("tokenizer.ggml.flags", ARRAY, array(BOOL, 2, b"\0\1")),
        key("tokenizer.huggingface.json", STRING, text("{}")),
        key("tokenizer.ggml.eos_token_id", UINT32, struct.pack("<I", 1)),
        key("a.words", ARRAY, tokens),
    ]
    content = header(keys, [("a", (32,), 8, 0)], data=34)
    whole = read(tmp_path / "model.gguf", content)
    file = read_gguf(whole.path, vocabulary=False)
    assert file.metadata == {
        "general.architecture": "llama",
        "tokenizer.ggml.eos_token_id": 1,
        "a.words": ["a", "b"],
    }
    assert file.tensors == whole.tensors
    for end in range(len(content) - 1):
        whole.path.write_bytes(content[:end])
        with pytest.raises(TgiError):
            read_gguf(whole.path, vocabulary=False)
    for lie in (array(STRING, 1 << 20, b""), array(UINT64, 1 << 62, b""), array(77, 1, b"")):
        whole.path.write_bytes(header([key("tokenizer.a", ARRAY, lie)]))
        with pytest.raises(CorruptFileError):
            read_gguf(whole.path, vocabulary=False)


def test_texts_are_read_in_pieces_of_any_size(tmp_path: Path) -> None:
    words = [f"word {number}" for number in range(40_000)] + ["", "\u00e9" * 300_000, "last"]
    data = array(STRING, len(words), b"".join(map(text, words)))
    keys = [
        key("tokenizer.ggml.tokens", ARRAY, data),
        key("a.words", ARRAY, data),
        key("a.number", UINT32, struct.pack("<I", 7)),
    ]
    content = header([ARCHITECTURE, *keys], [("a", (32,), 8, 0)], data=34)
    whole = read(tmp_path / "model.gguf", content)
    assert whole.metadata["tokenizer.ggml.tokens"] == words
    file = read_gguf(whole.path, vocabulary=False)
    assert file.metadata == {"general.architecture": "llama", "a.words": words, "a.number": 7}
    assert file.tensors == whole.tensors


def test_a_number_that_cannot_be_a_part(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match="a part which cannot be") as error:
        shard_paths(tmp_path / "m-00004-of-00003.gguf")
    assert error.value.remedy == "rename it"


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    import os

    path = tmp_path / "model.gguf"
    os.mkfifo(path)
    with pytest.raises(CorruptFileError):
        read_gguf(path)


def test_types_are_those_of_the_gguf_package() -> None:
    import gguf

    known = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    known[9] = (32, 36)  # Q8_1, never stored: ggml's block has two halves, the package's two floats
    assert {n: (t.elements, t.size) for n, t in TENSOR_TYPES.items() if n in known} == known
    names = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    assert {n: t.name for n, t in TENSOR_TYPES.items() if n in names} == names
