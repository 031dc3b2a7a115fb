"""The files of a checkpoint, and the tensors that their headers list. No torch.

https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from tgi_cli.errors import CheckpointError, CorruptFileError
from tgi_cli.gguf.reader import GGUFFile, read_gguf, shard_paths
from tgi_cli.hub.model_files import weight_map
from tgi_cli.hub.safetensors_header import TensorEntry, read_header

INDEX = "model.safetensors.index.json"


def weight_files(path: Path) -> dict[Path, list[str] | None]:
    """The files of the checkpoint in a folder; empty without weights.

    Each has the names of the tensors that the index lists for it; without an index, None.

    Raises:
        CheckpointError: the index cannot be read.
    """
    index, single = path / INDEX, path / "model.safetensors"
    if not index.is_file():
        return {single: None} if single.is_file() else {}
    listed: dict[Path, list[str] | None] = {}
    try:
        for name, file in weight_map(index).items():
            names = listed.setdefault(path / file, [])
            assert names is not None
            names.append(name)
    except (OSError, CorruptFileError) as error:
        raise unreadable(index, error) from error
    return listed


def file_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a file, sorted by name.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        return dict(sorted(read_header(file).items()))
    except (OSError, CorruptFileError) as error:
        raise unreadable(file, error) from error


def gguf_headers(path: Path) -> GGUFFile | None:
    """The headers of the GGUF file, or of its parts, in a folder; None if it has none.

    Raises:
        CheckpointError: the file cannot be read, or there are several.
        UnsupportedModelError: it is of a kind that is not supported.
    """
    found = [(file, file.stat()) for file in sorted(path.glob("*.gguf")) if file.is_file()]
    if not found:
        return None
    parts = {shard_paths(file) for file, _ in found}
    if len(parts) > 1:
        names = ", ".join(each[0].name for each in sorted(parts)[:3])
        raise CheckpointError(f"{path} has several GGUF files: {names}", "name one of them")
    # Read whenever the configuration is, and the headers of a large vocabulary take a second.
    state = frozenset((file.name, one.st_size, one.st_mtime_ns) for file, one in found)
    return _gguf_headers(found[0][0], state)


@lru_cache(maxsize=4)
def _gguf_headers(file: Path, state: frozenset[tuple[str, int, int]]) -> GGUFFile:
    """The same, cached; ``state`` changes with the files."""
    try:
        return read_gguf(file, vocabulary=False)
    except (OSError, CorruptFileError) as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: Exception | str) -> CheckpointError:
    """The error of a file that cannot be read."""
    why = str(error)
    if why.startswith(f"{file} "):
        why = f"it {why.removeprefix(f'{file} ')}"
    return CheckpointError(
        f"{file} cannot be read: {why}", "the file is incomplete or damaged: download it again"
    )
