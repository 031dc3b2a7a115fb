"""Folders of models that are made from others: converted weights, and weights of another folder."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from tgi_cli.errors import ModelNotFoundError
from tgi_cli.hub import child_process, model_files
from tgi_cli.hub.cache import require_space
from tgi_cli.hub.derived_folders import beside_cache, create_once, files_key
from tgi_cli.process.units import format_size

logger = logging.getLogger(__name__)

SAFETENSORS = ".safetensors"

OVERRIDE = "WEIGHTS_CACHE_OVERRIDE"
"""TGI's variable: a folder with weights that replace the model's."""


def convert_folder(folder: Path) -> Path:
    """Convert .bin weights inside their folder or, if it is read-only, beside the cache."""
    if os.access(folder, os.W_OK):
        _convert(folder, folder)
        model_files.check_model(folder, SAFETENSORS)
        return folder
    # The key changes with the files, so that no stale conversion is served.
    sources = [folder / name for name in model_files.file_names(folder)]
    target = beside_cache("tgi-converted") / f"{folder.resolve().name}-{files_key(sources)}"

    def fill(scratch: Path) -> None:
        for name in model_files.select_files(model_files.file_names(folder), ".bin", True).small:
            shutil.copyfile(folder / name, scratch / name)
        _convert(folder, scratch)

    return create_once(target, fill, check_complete)


def combine(folder: Path, weights: Path) -> Path:
    """Make a folder of links: weights of one folder, all other files of another."""
    if not weights.is_dir():
        raise ModelNotFoundError(
            f"{OVERRIDE} names {weights}, which is not a folder",
            "name the folder that holds the safetensors, or leave it off",
        )
    ends = (SAFETENSORS, f"{SAFETENSORS}.index.json")
    own = [name for name in model_files.file_names(weights) if name.endswith(ends)]
    rest = [name for name in model_files.file_names(folder) if not name.endswith((*ends, ".bin"))]
    sources = [*(folder / name for name in rest), *(weights / name for name in own)]
    target = beside_cache("tgi-combined") / f"{folder.name}-{files_key(sources)}"

    def fill(scratch: Path) -> None:
        for source in sources:
            (scratch / source.name).symlink_to(source.resolve())

    return create_once(target, fill, check_complete)


def check_complete(folder: Path) -> object:
    """Raise unless a folder has a model with safetensors; see :func:`model_files.check_model`."""
    return model_files.check_model(folder, SAFETENSORS)


def _convert(source: Path, target: Path) -> None:
    weights = model_files.check_model(source, ".bin")
    size = sum(path.stat().st_size for path in weights)
    require_space(target, size, f"the conversion of {source.name}")
    logger.info("converting %d .bin files (%s) to safetensors", len(weights), format_size(size))
    child_process.run("tgi_cli.hub.convert", source, target)
