"""Folders with a model in them: are the files there, and whole?"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tgi_cli.errors import CheckpointError, CorruptFileError, ModelError
from tgi_cli.hub import files

_HEADER_LIMIT = 100_000_000
"""Bytes; safetensors itself refuses longer headers."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CorruptFileError if it holds anything else."""
    try:
        found = json.loads(path.read_bytes())
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


def check_safetensors(path: Path) -> None:
    """Compare a safetensors file's header with its size, without reading the tensors.

    Layout: https://huggingface.co/docs/safetensors/index#format. Raises CorruptFileError.
    """
    size = path.stat().st_size
    remedy = f"delete {path} and fetch it again"
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= _HEADER_LIMIT:
            raise CorruptFileError(f"{path} is not a safetensors file", remedy)
        if length > size - 8:
            raise CorruptFileError(
                f"{path} is truncated: {size} bytes, and its header alone has {length}", remedy
            )
        header = stream.read(length)
    try:
        entries = json.loads(header)
        ends = [
            int(entry["data_offsets"][1])
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CorruptFileError(f"the header of {path} cannot be read", remedy) from error
    wanted = 8 + length + max(ends, default=0)
    if size < wanted:
        raise CorruptFileError(f"{path} is truncated: {size} of {wanted} bytes", remedy)
    if size > wanted:
        raise CorruptFileError(f"{path} has {size - wanted} bytes more than its header", remedy)


def _shards_wanted(folder: Path, weights: list[str], extension: str) -> set[str]:
    """The files that an index, or the names of shards, say there must be."""
    index = folder / files.index_of(extension)
    whole = any(files.shard_family(name) is None for name in weights)
    if index.is_file() and not whole:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CorruptFileError(f"{index} has no weight_map", "fetch it again")
        return {str(name) for name in weight_map.values()}
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
