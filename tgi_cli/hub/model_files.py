"""Which files of a repository serving needs."""

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

_SMALL = CONFIG_FILES | TOKENIZER_FILES | PROCESSOR_FILES | QUANTIZATION_FILES
_NOT_WEIGHTS = ("arguments", "args", "training")
"""Parts of names that TGI takes for leftovers of training, not weights."""

_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<rest>\..+)$")


@dataclass(frozen=True)
class FileSelection:
    """The files to have, in the order to fetch them: ``small`` ones first, then ``weights``.

    ``skipped`` says of every other file why it stays where it is.
    """

    small: tuple[str, ...]
    weights: tuple[str, ...]
    skipped: dict[str, str]


def shard_family(name: str) -> tuple[str, int] | None:
    """(name with the number taken out, number of shards) of ``x-00001-of-00002.y``, else None."""
    if match := _SHARD.match(name):
        return f"{match['stem']}-of-{match['count']}{match['rest']}", int(match["count"])
    return None


def _stem(extension: str) -> str:
    return "pytorch_model" if extension == ".bin" else "model"


def index_name(extension: str) -> str:
    """The name of the index of sharded weights with this extension."""
    return f"{_stem(extension)}{extension}.index.json"


def is_weight_file(name: str, extension: str) -> bool:
    """Whether a name is a model's weights: in the repository's root and no leftover of training.

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
    """The weights among ``names``, and for every other file with the extension why it is none.

    A repository may hold the same weights several times: as Mistral's ``consolidated*``, as a
    variant (``model.fp16.safetensors``), or both whole and in shards. One copy is taken.
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
    kept = []
    for name in candidates:
        if plain and name.startswith("consolidated"):
            skipped[name] = "the same weights once more"
        elif plain and name not in plain and variant.match(name):
            skipped[name] = "a variant of the same weights"
        elif whole in plain and name in plain and name != whole:
            skipped[name] = f"the same weights as {whole}"
        else:
            kept.append(name)
    return sorted(kept), skipped


def select_files(names: Iterable[str], extension: str, trust_remote_code: bool) -> FileSelection:
    """Choose from a repository's file names; weights with ``extension`` may be none at all."""
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
            name in _SMALL
            or name == index_name(extension)
            or name == ADAPTER_CONFIG
            or (name.endswith((".model", ".tiktoken")) and "/" not in name)
            or (name.startswith("additional_chat_templates/") and name.endswith(".jinja"))
        ):
            small.append(name)
        else:
            skipped[name] = "not needed to serve"
    return FileSelection(tuple(sorted(small)), tuple(weights), skipped)


def select_adapter_files(names: Iterable[str]) -> FileSelection:
    """Choose the files of a PEFT adapter's repository: its weights, its tokenizer, no base."""
    names = list(names)
    weights = [name for name in ADAPTER_WEIGHTS if name in names][:1]
    small = [name for name in names if name in _SMALL or name == ADAPTER_CONFIG]
    small += [name for name in names if name.endswith(".model") and "/" not in name]
    taken = {*weights, *small}
    skipped = {name: "not needed to serve" for name in names if name not in taken}
    return FileSelection(tuple(sorted(small)), tuple(weights), skipped)


def is_adapter(names: Iterable[str]) -> bool:
    """Whether a repository or folder is a PEFT adapter: its weights and no model beside them."""
    names = set(names)
    return ADAPTER_CONFIG in names and not any(
        is_weight_file(name, extension) for name in names for extension in (".safetensors", ".bin")
    )


_NAME_LENGTH = 255
"""Of a file's name, on the file systems that there are."""


def read_json(path: Path, limit: int = CONFIG_BYTES) -> dict[str, Any]:
    """The object in a JSON file of ``limit`` bytes at most; CorruptFileError for anything else."""
    try:
        found = read_bounded(path, limit)
    except ValueError as error:
        raise CorruptFileError(f"{path} is not JSON: {error}", "fetch it again") from error
    if not isinstance(found, dict):
        raise CorruptFileError(f"{path} is not a JSON object", "fetch it again")
    return found


def file_names(folder: Path) -> list[str]:
    """The names of the files in a folder's root."""
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def has_weights(folder: Path, extension: str) -> bool:
    """Whether there are weights with this extension, whole or not."""
    return folder.is_dir() and bool(weight_files(file_names(folder), extension)[0])


def is_complete(folder: Path, extension: str) -> bool:
    """Whether ``check_model`` passes."""
    try:
        check_model(folder, extension)
    except (ModelError, CorruptFileError):
        return False
    return True


def check_model(folder: Path, extension: str) -> list[Path]:
    """Make sure that a folder holds a whole model; return its weight files.

    Raises:
        ModelError: no config.json, no weights.
        CheckpointError: shards are missing; the message names them.
        CorruptFileError: a file's size does not fit its header.
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
    _require(folder, _shards_wanted(folder, weights, extension))
    paths = [folder / name for name in weights]
    if extension == ".safetensors":
        for path in paths:
            check_safetensors(path)
    return paths


def check_adapter(folder: Path) -> Path:
    """Make sure that a folder holds a whole PEFT adapter; return its weight file."""
    read_json(folder / ADAPTER_CONFIG)
    for name in ADAPTER_WEIGHTS:
        path = folder / name
        if path.is_file():
            if name.endswith(".safetensors"):
                check_safetensors(path)
            return path
    raise ModelError(f"{folder} has an adapter_config.json and no adapter weights")


def weight_map(index: Path) -> dict[str, str]:
    """What an index says: the file of each tensor, all of them in the index's own folder.

    Raises:
        OSError: it cannot be read.
        CorruptFileError: it is no index, or names a file elsewhere.
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


def check_safetensors(path: Path) -> None:
    """Compare a safetensors file's header with its size, without reading the tensors.

    Layout: https://huggingface.co/docs/safetensors/index#format. Raises CorruptFileError.
    """
    read_header(path)


def _shards_wanted(folder: Path, weights: list[str], extension: str) -> set[str]:
    """The files that an index, or the names of shards, say there must be."""
    index = folder / index_name(extension)
    whole = any(shard_family(name) is None for name in weights)
    if index.is_file() and not whole:
        return set(weight_map(index).values())
    wanted = set()
    for name in weights:
        if family := shard_family(name):
            stem, _, rest = name.rpartition("-of-")
            stem = stem[: -len("00001")]
            wanted |= {f"{stem}{number:05d}-of-{rest}" for number in range(1, family[1] + 1)}
    return wanted


def _require(folder: Path, wanted: set[str]) -> None:
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
        raise CheckpointError(f"{folder} lacks {shown}", "copy or download the missing shards")


def missing_weights_error(what: object, extension: str, names: list[str]) -> ModelError:
    """The error for a folder or repository without weights, advice fitting what it has instead."""
    endings = {Path(name).suffix for name in names}
    if ".gguf" in endings:
        remedy = "GGUF is not read: name the model that the GGUF files were made from"
    elif extension != ".safetensors" and endings & {".safetensors", ".bin"}:
        remedy = "leave out --extension to take the weights that are there"
    else:
        remedy = "name a model, or a revision of it, that has .safetensors weights"
    return ModelError(f"{what} has no {extension} weights", remedy)
