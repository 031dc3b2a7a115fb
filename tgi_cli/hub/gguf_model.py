"""Resolves GGUF files to folders that can be served."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from tgi_cli.errors import ModelError
from tgi_cli.gguf.reader import GGUFFile, read_gguf
from tgi_cli.hub import model_files
from tgi_cli.hub.derived_folders import (
    beside_cache,
    create_once,
    files_key,
    keep_last_used,
)
from tgi_cli.hub.gguf_files import (
    GGUF,
    GGUFVariant,
    choose_variant,
    gguf_variants,
    image_encoders,
)
from tgi_cli.hub.repository import Repository
from tgi_cli.version import __version__

logger = logging.getLogger(__name__)

_FORM = "2"
"""Changes with what is written into the folder."""

_KEPT = 64
"""Folders that are kept; each has a few megabytes and links to the file."""


def names_of(folder: Path) -> list[str]:
    """The GGUF files of a folder and its subfolders, by their paths in it."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() == GGUF)
    return sorted(path.relative_to(folder).as_posix() for path in found if path.is_file())


def from_file(path: Path, tokenizer: Path | None = None) -> Path:
    """The folder from which the model in a file is served; created if necessary.

    The tokenizer and the chat template beside it take precedence over those of its metadata, if it
    is the only model there.

    Args:
        tokenizer: a folder with the tokenizer to use instead.

    Raises:
        OSError: the file cannot be read.
        CorruptFileError: it is not GGUF, is truncated or contradicts itself, or parts are missing.
        ModelError: the model cannot be served.
        HubError: the folder cannot be written.
    """
    folder = path.absolute().parent
    names = [each.name for each in folder.iterdir() if each.suffix.lower() == GGUF]
    alone = len(gguf_variants(names)) == 1
    return _served(path, folder if alone else None, tokenizer)


def from_folder(folder: Path, tag: str | None, tokenizer: Path | None = None) -> Path:
    """The same for a folder with the GGUF files of a model, of which ``tag`` or a name chooses one.

    Raises:
        OSError, CorruptFileError, ModelError, HubError: as :func:`from_file` and
            :func:`choose_variant`.
    """
    if _is_made(folder) and tokenizer is None:
        return folder
    names = names_of(folder)
    variant = choose_variant(str(folder), names, tag, lambda name: (folder / name).stat().st_size)
    _log_choice(str(folder), variant, names)
    return _served(folder / variant.names[0], folder, tokenizer)


def from_repository(
    repository: Repository,
    tag: str | None,
    fetch: Callable[[tuple[tuple[str, ...], ...]], Path],
    tokenizer: Path | None = None,
) -> Path:
    """The same for a repository, whose files ``fetch`` downloads into a folder, in groups.

    Raises:
        HubError, ModelError: as :func:`from_file`, :func:`choose_variant` and ``fetch``.
    """
    names = list(repository.files)
    variant = choose_variant(
        repository.model_id, names, tag, lambda name: repository.files[name].size
    )
    _log_choice(repository.model_id, variant, names)
    small = model_files.select_files(names, GGUF, False).small
    folder = fetch((small, variant.names))
    return _served(folder / variant.names[0], folder, tokenizer)


def _is_made(folder: Path) -> bool:
    """Whether a folder was made by :func:`create_once`, for a GGUF file."""
    if not all((folder / name).is_file() for name in ("config.json", "tokenizer_config.json")):
        return False
    quantization = model_files.read_json(folder / "config.json").get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "gguf"


def _log_choice(source: str, variant: GGUFVariant, names: Iterable[str]) -> None:
    parts = f" and {len(variant.names) - 1} more parts" if variant.names[1:] else ""
    logger.info("%s: %s%s", source, variant.names[0], parts)
    for name in image_encoders(names):
        logger.info("%s is ignored: images are not supported with GGUF", name)


def _served(path: Path, companions: Path | None, tokenizer: Path | None) -> Path:
    from tgi_cli.gguf.model_folder import companion_names, write_model_folder

    file = read_gguf(path, vocabulary=False)
    sources = [each.resolve() for each in file.shards]
    for folder in filter(None, (companions, tokenizer)):
        sources += [folder / name for name in companion_names(folder)]
    key = files_key(sources, __version__, _FORM, str(tokenizer), str(companions))
    stem = re.sub(r"[^\w.-]", "-", file.shards[0].stem)[:100]

    def fill(scratch: Path) -> None:
        write_model_folder(read_gguf(path), scratch, companions, tokenizer)

    folders = beside_cache("tgi-gguf")
    made = create_once(folders / f"{stem}-{key}", fill, _check)
    keep_last_used(made, _KEPT)
    return made


def _check(folder: Path) -> GGUFFile:
    found = [path for path in folder.iterdir() if path.suffix.lower() == GGUF]
    if not found:
        raise ModelError(f"{folder} has no GGUF file")
    return read_gguf(found[0], vocabulary=False)
