"""The safetensors files of a checkpoint, and the tensors that their headers list. No torch.

https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

from pathlib import Path

from tgi_cli.errors import CheckpointError, CorruptFileError
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


def unreadable(file: Path, error: Exception | str) -> CheckpointError:
    """The error of a file that cannot be read."""
    why = str(error)
    if why.startswith(f"{file} "):
        why = f"it {why.removeprefix(f'{file} ')}"
    return CheckpointError(
        f"{file} cannot be read: {why}", "the file is incomplete or damaged: download it again"
    )
