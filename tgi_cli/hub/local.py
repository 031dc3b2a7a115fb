"""Folders with a model in them: are the files there, and whole?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tgi_cli.errors import CheckpointError, CorruptFileError, ModelError
from tgi_cli.files import CONFIG_BYTES, INDEX_BYTES
from tgi_cli.files import read_json as read_bounded
from tgi_cli.hub import files, headers

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


def names_in(folder: Path) -> list[str]:
    """The names of the files in a folder's root."""
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def has_weights(folder: Path, extension: str) -> bool:
    """Whether there are weights with this extension, whole or not."""
    return folder.is_dir() and bool(files.weight_files(names_in(folder), extension)[0])


def is_complete(folder: Path, extension: str) -> bool:
    """Whether ``check`` has nothing to say."""
    try:
        check(folder, extension)
    except (ModelError, CorruptFileError):
        return False
    return True


def check(folder: Path, extension: str) -> list[Path]:
    """Make sure that a folder holds a whole model; return its weight files.

    Raises:
        ModelError: no config.json, no weights.
        CheckpointError: shards are missing; the message names them.
        CorruptFileError: a file's size does not fit its header.
    """
    names = names_in(folder) if folder.is_dir() else []
    if "config.json" not in names:
        raise ModelError(
            f"{folder} has no config.json",
            "name a folder that save_pretrained wrote, or a model id",
        )
    read_json(folder / "config.json")
    weights, _ = files.weight_files(names, extension)
    if not weights:
        raise no_weights(folder, extension, names)
    _require(folder, _shards_wanted(folder, weights, extension))
    paths = [folder / name for name in weights]
    if extension == ".safetensors":
        for path in paths:
            check_safetensors(path)
    return paths


def check_adapter(folder: Path) -> Path:
    """Make sure that a folder holds a whole PEFT adapter; return its weight file."""
    read_json(folder / files.ADAPTER_CONFIG)
    for name in files.ADAPTER_WEIGHTS:
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
    headers.read_header(path)


def _shards_wanted(folder: Path, weights: list[str], extension: str) -> set[str]:
    """The files that an index, or the names of shards, say there must be."""
    index = folder / files.index_of(extension)
    whole = any(files.shard_family(name) is None for name in weights)
    if index.is_file() and not whole:
        return set(weight_map(index).values())
    wanted = set()
    for name in weights:
        if family := files.shard_family(name):
            stem, _, rest = name.rpartition("-of-")
            stem = stem[: -len("00001")]
            wanted |= {f"{stem}{number:05d}-of-{rest}" for number in range(1, family[1] + 1)}
    return wanted


def _require(folder: Path, wanted: set[str]) -> None:
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
        raise CheckpointError(f"{folder} lacks {shown}", "copy or download the missing shards")


def no_weights(what: object, extension: str, names: list[str]) -> ModelError:
    """The error for a folder or repository without weights, advice fitting what it has instead."""
    endings = {Path(name).suffix for name in names}
    if ".gguf" in endings:
        remedy = "GGUF is not read: name the model that the GGUF files were made from"
    elif extension != ".safetensors" and endings & {".safetensors", ".bin"}:
        remedy = "leave out --extension to take the weights that are there"
    else:
        remedy = "name a model, or a revision of it, that has .safetensors weights"
    return ModelError(f"{what} has no {extension} weights", remedy)
