"""Files of a model: which ones serving needs, and whether a folder has all of them intact."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgi_cli.errors import CheckpointError, CorruptFileError, ModelError
from tgi_cli.files import CONFIG_BYTES, INDEX_BYTES
from tgi_cli.files import read_json as read_bounded
from tgi_cli.hub.safetensors_header import read_header

CONFIG_FILES = frozenset({"config.json", "generation_config.json"})
TOKENIZER_FILES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tekken.json",
        "chat_template.jinja",
        "chat_template.json",
    }
)
PROCESSOR_FILES = frozenset(
    {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
)
QUANTIZATION_FILES = frozenset({"quantize_config.json", "quant_config.json"})
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

SMALL_FILES = CONFIG_FILES | TOKENIZER_FILES | PROCESSOR_FILES | QUANTIZATION_FILES
_NOT_WEIGHTS = ("arguments", "args", "training")
"""Parts of names that mark leftovers of training rather than weights, as in TGI."""

_NAME_LENGTH = 255
"""Longest file name on common file systems."""

_SHARD = re.compile(r"^(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<rest>\..+)$")


@dataclass(frozen=True)
class FileSelection:
    """Files to fetch: first ``small`` ones, then ``weights``. ``skipped`` has a reason by name."""

    small: tuple[str, ...]
    weights: tuple[str, ...]
    skipped: dict[str, str]


def _stem(extension: str) -> str:
    return "pytorch_model" if extension == ".bin" else "model"


def index_name(extension: str) -> str:
    """Name of the index of sharded weights with this extension."""
    return f"{_stem(extension)}{extension}.index.json"


def is_weight_file(name: str, extension: str) -> bool:
    """Whether a file is a model's weights: in the root and not a leftover of training.

    >>> is_weight_file("model.safetensors", ".safetensors")
    True
    >>> is_weight_file("training_args.bin", ".bin")
    False
    """
    return (
        name.endswith(extension)
        and "/" not in name
        and not any(word in name for word in _NOT_WEIGHTS)
        and not name.startswith(("adapter_model", "optimizer", "scheduler"))
    )


def weight_files(names: Iterable[str], extension: str) -> tuple[list[str], dict[str, str]]:
    """Select the weights among ``names``; return them, and reasons for the others by name.

    A repository may hold the same weights several times: as Mistral's ``consolidated*``, as a
    variant (``model.fp16.safetensors``), or both whole and in shards. One copy is selected.
    """
    candidates = [name for name in names if is_weight_file(name, extension)]
    skipped = {
        name: "not the model's weights"
        for name in names
        if name.endswith(extension) and name not in candidates
    }
    stem = re.escape(_stem(extension))
    shard = re.compile(rf"{stem}-\d{{5}}-of-\d{{5}}{re.escape(extension)}")
    variant = re.compile(rf"{stem}(\.|-\d{{5}}-of-\d{{5}}\.)")
    whole = _stem(extension) + extension
    plain = {name for name in candidates if name == whole or shard.fullmatch(name)}
    selected = []
    for name in candidates:
        if plain and name.startswith("consolidated"):
            skipped[name] = "a copy of the same weights"
        elif plain and name not in plain and variant.match(name):
            skipped[name] = "a variant of the same weights"
        elif whole in plain and name in plain and name != whole:
            skipped[name] = f"the same weights as {whole}"
        else:
            selected.append(name)
    return sorted(selected), skipped


def select_files(names: Iterable[str], extension: str, trust_remote_code: bool) -> FileSelection:
    """Select the files of a model's repository; there may be no weights with ``extension``."""
    names = list(names)
    weights, skipped = weight_files(names, extension)
    small = []
    for name in names:
        if name in weights or name in skipped:
            continue
        if name.endswith(".py"):
            if trust_remote_code:
                small.append(name)
            else:
                skipped[name] = "code, and --trust-remote-code was not given"
        elif (
            name in SMALL_FILES
            or name == index_name(extension)
            or name == ADAPTER_CONFIG
            or (name.endswith((".model", ".spm", ".tiktoken")) and "/" not in name)
            or (name.startswith("additional_chat_templates/") and name.endswith(".jinja"))
        ):
            small.append(name)
        else:
            skipped[name] = "not needed to serve"
    return FileSelection(tuple(sorted(small)), tuple(weights), skipped)


def select_adapter_files(names: Iterable[str]) -> FileSelection:
    """Select the files of a PEFT adapter's repository: weights and tokenizer, not a base model."""
    names = list(names)
    weights = [name for name in ADAPTER_WEIGHTS if name in names][:1]
    small = [name for name in names if name in SMALL_FILES or name == ADAPTER_CONFIG]
    small += [name for name in names if name.endswith(".model") and "/" not in name]
    skipped = dict.fromkeys(set(names) - {*weights, *small}, "not needed to serve")
    return FileSelection(tuple(sorted(small)), tuple(weights), skipped)


def is_adapter(names: Iterable[str]) -> bool:
    """Whether a repository or folder is a PEFT adapter without a model."""
    names = set(names)
    return ADAPTER_CONFIG in names and not any(
        is_weight_file(name, extension) for name in names for extension in (".safetensors", ".bin")
    )


def read_json(path: Path, limit: int = CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON object of at most ``limit`` bytes; CorruptFileError for anything else."""
    try:
        found = read_bounded(path, limit)
    except ValueError as error:
        raise CorruptFileError(f"{path} is not valid JSON: {error}", "fetch it again") from error
    if not isinstance(found, dict):
        raise CorruptFileError(f"{path} is not a JSON object", "fetch it again")
    return found


def file_names(folder: Path) -> list[str]:
    """Names of the files in a folder, subfolders excluded."""
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def has_weights(folder: Path, extension: str) -> bool:
    """Whether a folder has weights with this extension, complete or not."""
    return folder.is_dir() and bool(weight_files(file_names(folder), extension)[0])


def is_complete(folder: Path, extension: str) -> bool:
    """Whether ``check_model`` passes."""
    try:
        check_model(folder, extension)
    except (ModelError, CorruptFileError):
        return False
    return True


def check_model(folder: Path, extension: str) -> list[Path]:
    """Check that a folder holds a complete model; return its weight files.

    Raises:
        ModelError: config.json or the weights are missing.
        CheckpointError: shards are missing; the message lists them.
        CorruptFileError: a file's size contradicts its header.
    """
    names = file_names(folder) if folder.is_dir() else []
    if "config.json" not in names:
        raise ModelError(
            f"{folder} has no config.json",
            "name a folder that save_pretrained wrote, or a model id",
        )
    read_json(folder / "config.json")
    weights, _ = weight_files(names, extension)
    if not weights:
        raise missing_weights_error(folder, extension, names)
    required = _required_shards(folder, weights, extension)
    missing = sorted(name for name in required if not (folder / name).is_file())
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
        raise CheckpointError(f"{folder} lacks {shown}", "copy or download the missing shards")
    paths = [folder / name for name in weights]
    if extension == ".safetensors":
        for path in paths:
            read_header(path)
    return paths


def check_adapter(folder: Path) -> Path:
    """Check that a folder holds a complete PEFT adapter; return its weight file."""
    read_json(folder / ADAPTER_CONFIG)
    for name in ADAPTER_WEIGHTS:
        path = folder / name
        if path.is_file():
            if name.endswith(".safetensors"):
                read_header(path)
            return path
    raise ModelError(f"{folder} has an adapter_config.json and no adapter weights")


def weight_map(index: Path) -> dict[str, str]:
    """Read an index: the file name of each tensor, in the index's own folder.

    Raises:
        OSError: the index cannot be read.
        CorruptFileError: the content is not a valid index, or names a file elsewhere.
    """
    found = read_json(index, INDEX_BYTES).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CorruptFileError(f"{index} has no weight_map", "fetch it again")
    for name in set(map(str, found.values())):
        if Path(name).name != name or name == ".." or "\0" in name or len(name) > _NAME_LENGTH:
            shown = name[:_NAME_LENGTH]
            raise CorruptFileError(
                f"{index} names a file that is not beside it: {shown!r}", "fetch it again"
            )
    return {str(tensor): str(name) for tensor, name in found.items()}


def _required_shards(folder: Path, weights: list[str], extension: str) -> set[str]:
    """The files that the index, or the numbering of shards, requires."""
    index = folder / index_name(extension)
    if index.is_file() and all(_SHARD.match(name) for name in weights):
        return set(weight_map(index).values())
    required = set()
    for name in weights:
        if match := _SHARD.match(name):
            for number in range(1, int(match["count"]) + 1):
                required.add(f"{match['stem']}-{number:05d}-of-{match['count']}{match['rest']}")
    return required


def missing_weights_error(source: object, extension: str, names: list[str]) -> ModelError:
    """Build the error for a folder or repository without weights, with advice on what it has."""
    endings = {Path(name).suffix for name in names}
    if ".gguf" in endings:
        remedy = "its GGUF files are not a language model's: name another repository"
    elif extension != ".safetensors" and endings & {".safetensors", ".bin"}:
        remedy = "leave out --extension to take the weights that are there"
    else:
        remedy = "name a model, or a revision of it, that has .safetensors weights"
    return ModelError(f"{source} has no {extension} weights", remedy)
