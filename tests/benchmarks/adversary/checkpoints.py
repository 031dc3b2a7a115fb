"""Checkpoints and adapters with one extreme value or malformed file each."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.adversary import hostile

NUMBERS: tuple[str, ...] = (
    *("0", "-1", "1.5", "1000000000000", str(2**63), "1e308", "NaN", "1" + "0" * 400),
)
OTHERS: tuple[str, ...] = ("null", "true", "[]", '{"a":[1]}', "[1]", '"a"')
LARGE: dict[str, Callable[[], str]] = {
    "a string of 5 MB": lambda: '"' + "a" * 5_000_000 + '"',
    "a million numbers": lambda: "[" + "1," * 999_999 + "1]",
}
ABSENT = {
    "config.json": (
        *("rope_scaling", "rope_theta", "sliding_window", "layer_types", "max_window_layers"),
        *("quantization_config", "num_local_experts", "num_experts_per_tok", "auto_map"),
        *("partial_rotary_factor", "attention_multiplier", "logits_scaling", "text_config"),
        *("torch_dtype", "pretraining_tp", "eos_token_id", "pad_token_id"),
    ),
    "generation_config.json": (
        *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
        *("max_new_tokens", "max_length", "do_sample", "eos_token_id", "suppress_tokens"),
        *("bad_words_ids", "stop_strings"),
    ),
    "tokenizer_config.json": (
        *("chat_template", "added_tokens_decoder", "model_max_length", "auto_map"),
        *("additional_special_tokens", "truncation_side", "padding_side"),
    ),
    "adapter_config.json": (
        *("rank_pattern", "alpha_pattern", "modules_to_save", "use_rslora", "layers_to_transform"),
        *("layers_pattern", "exclude_modules", "target_parameters", "layer_replication"),
    ),
}
"""Optional fields that the miniature's files do not have."""
WEIGHTS = "model-00001-of-00002.safetensors"
CONFIGS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"),
    *("adapter_config.json", "model.safetensors.index.json"),
)
_MAX_KEYS = 40
"""Most keys of one object to vary; tokenizer.json has one per word."""


@dataclass(frozen=True)
class Case:
    """One modified checkpoint or adapter.

    Attributes:
        file: name of the modified file.
        field: path of the modified field, or the affected part of the file in parentheses.
        kind: what replaces it.
        write: writes the modified file into a folder.
    """

    file: str
    field: str
    kind: str
    write: Callable[[Path], None]


def field_paths(
    value: Any, path: tuple[Any, ...] = (), depth: int = 3
) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of the fields of a JSON value; for lists, only of the first item."""
    if depth == 0:
        return
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)[:_MAX_KEYS]
    elif isinstance(value, list):
        keys = [0] if value else []
    for key in keys:
        yield (*path, key)
        yield from field_paths(value[key], (*path, key), depth - 1)


def with_field(value: Any, path: tuple[Any, ...], raw: str) -> str:
    """Return ``value`` as JSON with the field at ``path`` replaced by the JSON text ``raw``."""
    placeholder = "\0placeholder\0"
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = placeholder
    return json.dumps(copy).replace(json.dumps(placeholder), raw)


def cases(base: Path, adapter: Path) -> Iterator[Case]:
    """Yield all cases; adapter files have names that start with "adapter"."""
    for name in CONFIGS:
        file = (adapter if name.startswith("adapter") else base) / name
        if file.is_file():
            yield from _fields(name, json.loads(file.read_text(encoding="utf-8")))
        yield from _whole(name)
    for name in (WEIGHTS, "adapter_model.safetensors"):
        file = (adapter if name.startswith("adapter") else base) / name
        yield from _headers(name, file)
        yield from _whole(name)
    for number, text in enumerate(hostile.TEMPLATES):
        yield Case(
            "chat_template.jinja",
            "",
            f"template [{number}]",
            _text_writer("chat_template.jinja", text),
        )
        content = json.dumps({"chat_template": text})
        yield Case(
            "tokenizer_config.json",
            "chat_template",
            f"template [{number}]",
            _text_writer("tokenizer_config.json", content),
        )
    large = "{% if 1 %}a{% endif %}" * 200_000
    yield Case("chat_template.jinja", "", "4 MB", _text_writer("chat_template.jinja", large))
    nested = "{% if 1 %}" * 3000 + "{% endif %}" * 3000
    yield Case("chat_template.jinja", "", "3,000 deep", _text_writer("chat_template.jinja", nested))


def _fields(name: str, value: Any) -> Iterator[Case]:
    paths = list(field_paths(value, depth=2 if name == "tokenizer.json" else 3))
    paths += [(key,) for key in ABSENT.get(name, ()) if key not in value]
    for path in paths:
        field = ".".join(map(str, path))
        for raw in (*NUMBERS, *OTHERS):
            yield Case(name, field, raw[:24], field_writer(name, value, path, lambda raw=raw: raw))
        for kind, make in LARGE.items():
            yield Case(name, field, kind, field_writer(name, value, path, make))


def _whole(name: str) -> Iterator[Case]:
    def link(target: str) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(target)

        return write

    def fifo(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    def folder_instead(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    for kind, text in (
        ("empty", ""),
        ("invalid JSON", "{"),
        ("a list", "[]"),
        ("a number", "1"),
        ("null", "null"),
        ("200,000 opening brackets", "[" * 200_000),
        ("200,000 nested objects", '{"a":' * 200_000),
        ("20 MB of spaces", " " * 20_000_000),
        ("a number of 5 MB", "1" * 5_000_000),
    ):
        yield Case(name, "(file)", kind, _text_writer(name, text))
    yield Case(name, "(file)", "invalid UTF-8", lambda f: _write(f / name, b'{"a":"\xff\xfe"}'))
    for target in ("/dev/zero", "/dev/null", "/dev/stdin", "absent", name):
        yield Case(name, "(file)", f"symlink to {target}", link(target))
    yield Case(name, "(file)", "FIFO", fifo)
    yield Case(name, "(file)", "directory", folder_instead)


def _headers(name: str, file: Path) -> Iterator[Case]:
    """Vary the header of a safetensors file: https://huggingface.co/docs/safetensors."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    rest = data[8 + length :]
    first = next(key for key in header if key != "__metadata__")

    def replaced(text: str, size: int | None = None) -> Callable[[Path], None]:
        head = text.encode()
        whole = struct.pack("<Q", len(head) if size is None else size) + head + rest
        return lambda folder: _write(folder / name, whole)

    for path in (("dtype",), ("shape",), ("shape", 0), ("data_offsets",), ("data_offsets", 1)):
        for raw in (*NUMBERS, *OTHERS, f"[{10**12},{10**12}]", f"[0,{2**63}]", '"F4"'):
            text = with_field(header, (first, *path), raw)
            yield Case(name, ".".join(map(str, path)), raw[:24], replaced(text))
    text = json.dumps(header)
    for size in (0, 1, 2**31, 2**63, 2**64 - 1):
        yield Case(name, "(length)", str(size), replaced(text, size))
    many = {**header, **{f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                         for n in range(100_000)}}  # fmt: skip
    yield Case(name, "(tensors)", "100,000 empty tensors", replaced(json.dumps(many)))
    yield Case(name, "(tensors)", "200,000 brackets", replaced("[" * 200_000))
    yield Case(name, "(file)", "truncated", lambda f: _write(f / name, data[: len(data) // 2]))


def _text_writer(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: _write(folder / name, text.encode())


def field_writer(
    name: str, value: Any, path: tuple[Any, ...], make: Callable[[], str]
) -> Callable[[Path], None]:
    """Return what writes ``value`` into a folder, with another value of one field."""
    return lambda folder: _write(folder / name, with_field(value, path, make()).encode())


def _write(file: Path, content: bytes) -> None:
    file.unlink(missing_ok=True)  # it may be a link to the miniature's file
    file.write_bytes(content)


def linked_copy(base: Path, out: Path) -> Path:
    """Create the folder ``out`` with hard links to the files of ``base``."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for file in base.iterdir():
        os.link(file, out / file.name)
    return out
