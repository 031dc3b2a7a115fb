"""Checkpoints and adapters whose files say absurd things, one at a time."""

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
"""Fields that a file may have and the miniature has not."""
WEIGHTS = "model-00001-of-00002.safetensors"
CONFIGS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"),
    *("adapter_config.json", "model.safetensors.index.json"),
)
_NESTED_MOST = 40
"""Fields of a file's own, within others; tokenizer.json has as many as there are words."""


@dataclass(frozen=True)
class Case:
    """One folder. ``file`` and ``field``: what is absurd; ``write`` puts it into the folder."""

    file: str
    field: str
    kind: str
    write: Callable[[Path], None]


def places(value: Any, path: tuple[Any, ...] = (), depth: int = 3) -> Iterator[tuple[Any, ...]]:
    """Paths of the fields of a JSON value; of lists the first item's alone."""
    if depth == 0:
        return
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)[:_NESTED_MOST]
    elif isinstance(value, list):
        keys = [0] if value else []
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key), depth - 1)


def changed(value: Any, path: tuple[Any, ...], raw: str) -> str:
    """The JSON of ``value`` with ``raw`` JSON in the place of a field."""
    mark = "\0here\0"
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = mark
    return json.dumps(copy).replace(json.dumps(mark), raw)


def cases(base: Path, adapter: Path) -> Iterator[Case]:
    """All; files of the adapter are told by their names."""
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
            "chat_template.jinja", "", f"template [{number}]", _text("chat_template.jinja", text)
        )
        content = json.dumps({"chat_template": text})
        yield Case(
            "tokenizer_config.json",
            "chat_template",
            f"template [{number}]",
            _text("tokenizer_config.json", content),
        )
    large = "{% if 1 %}a{% endif %}" * 200_000
    yield Case("chat_template.jinja", "", "4 MB", _text("chat_template.jinja", large))
    nested = "{% if 1 %}" * 3000 + "{% endif %}" * 3000
    yield Case("chat_template.jinja", "", "3,000 deep", _text("chat_template.jinja", nested))


def _fields(name: str, value: Any) -> Iterator[Case]:
    paths = list(places(value, depth=2 if name == "tokenizer.json" else 3))
    paths += [(key,) for key in ABSENT.get(name, ()) if key not in value]
    for path in paths:
        field = ".".join(map(str, path))
        for raw in (*NUMBERS, *OTHERS):
            yield Case(name, field, raw[:24], _later(name, value, path, lambda raw=raw: raw))
        for kind, make in LARGE.items():
            yield Case(name, field, kind, _later(name, value, path, make))


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
        ("no JSON", "{"),
        ("a list", "[]"),
        ("a number", "1"),
        ("null", "null"),
        ("a bracket 200,000 times", "[" * 200_000),
        ("objects 200,000 deep", '{"a":' * 200_000),
        ("20 MB of spaces", " " * 20_000_000),
        ("a number of 5 MB", "1" * 5_000_000),
    ):
        yield Case(name, "(file)", kind, _text(name, text))
    yield Case(name, "(file)", "no UTF-8", lambda f: _put(f / name, b'{"a":"\xff\xfe"}'))
    for target in ("/dev/zero", "/dev/null", "/dev/stdin", "absent", name):
        yield Case(name, "(file)", f"a link to {target}", link(target))
    yield Case(name, "(file)", "a pipe", fifo)
    yield Case(name, "(file)", "a folder", folder_instead)


def _headers(name: str, file: Path) -> Iterator[Case]:
    """The header of safetensors: https://huggingface.co/docs/safetensors (8 bytes of length)."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    rest = data[8 + length :]
    first = next(key for key in header if key != "__metadata__")

    def replaced(text: str, size: int | None = None) -> Callable[[Path], None]:
        head = text.encode()
        whole = struct.pack("<Q", len(head) if size is None else size) + head + rest
        return lambda folder: _put(folder / name, whole)

    for path in (("dtype",), ("shape",), ("shape", 0), ("data_offsets",), ("data_offsets", 1)):
        for raw in (*NUMBERS, *OTHERS, f"[{10**12},{10**12}]", f"[0,{2**63}]", '"F4"'):
            text = changed(header, (first, *path), raw)
            yield Case(name, ".".join(map(str, path)), raw[:24], replaced(text))
    text = json.dumps(header)
    for size in (0, 1, 2**31, 2**63, 2**64 - 1):
        yield Case(name, "(length)", str(size), replaced(text, size))
    many = {**header, **{f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                         for n in range(100_000)}}  # fmt: skip
    yield Case(name, "(tensors)", "100,000 empty ones", replaced(json.dumps(many)))
    yield Case(name, "(tensors)", "200,000 brackets", replaced("[" * 200_000))
    yield Case(name, "(file)", "cut", lambda f: _put(f / name, data[: len(data) // 2]))


def _text(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: _put(folder / name, text.encode())


def _later(
    name: str, value: Any, path: tuple[Any, ...], make: Callable[[], str]
) -> Callable[[Path], None]:
    return lambda folder: _put(folder / name, changed(value, path, make()).encode())


def _put(file: Path, content: bytes) -> None:
    file.unlink(missing_ok=True)  # it may be a link to the miniature's
    file.write_bytes(content)


def folder_of(base: Path, out: Path) -> Path:
    """A folder with links to the files of another."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for file in base.iterdir():
        os.link(file, out / file.name)
    return out
