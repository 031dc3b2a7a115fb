"""KV blocks on a disk for one model: what their bytes depend on, and what they are not for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tgi_cli import kernels
from tgi_cli.config import EngineConfig
from tgi_cli.config.settings.engine import DEFAULT_KV_CACHE_DIR_SIZE
from tgi_cli.engine.block_files import BlockFiles
from tgi_cli.engine.disk_blocks import DiskBlocks
from tgi_cli.errors import ConfigError
from tgi_cli.hub.streamed_model import MARKER
from tgi_cli.kernels import build
from tgi_cli.process.units import format_size
from tgi_cli.version import __version__
from tgi_cli.worker.sizing.kv_cache import Capacity
from tgi_cli.worker.worker import ModelWorker

if TYPE_CHECKING:
    from tgi_cli.worker.tensor_parallel.worker import ShardedWorker

log = logging.getLogger(__name__)

_FORM = 1
"""Changes with the form of a block."""

_SETTINGS = (
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "quantize",
    "quantize_activations",
    "rope",
    "load_format",
    "decoder",
)
"""Settings that the keys and values of a token depend on."""

_WEIGHTS = ("config.json", MARKER, "*.safetensors", "*.gguf", "*quant*config.json", "*.py")
_BLOB = re.compile("[0-9a-f]{40,64}")

_READ_SHARE = 4
"""Part of the cache that may be read and not be in the cache yet: one of so many."""


def open_disk_blocks(worker: ModelWorker | ShardedWorker, capacity: Capacity) -> DiskBlocks | None:
    """What keeps the blocks of a worker that was warmed up; None without ``--kv-cache-dir``.

    Raises:
        ConfigError: the folder cannot be used.
    """
    config = capacity.config
    folder = config.kv_cache_dir
    if folder is None:
        return None
    if not isinstance(worker, ModelWorker):
        raise ConfigError("--kv-cache-dir needs one shard", "leave it or --num-shard off")
    limit = config.kv_cache_dir_size or DEFAULT_KV_CACHE_DIR_SIZE
    try:
        files = BlockFiles(folder.expanduser(), limit, _identity(config, worker))
    except OSError as error:
        raise ConfigError(
            f"--kv-cache-dir {folder} cannot be used: {error.strerror or error}",
            "name a folder that this user may write into",
        ) from error
    log.info(
        "KV blocks are kept in %s: %s of at most %s",
        folder,
        format_size(files.num_bytes),
        format_size(limit),
    )
    return DiskBlocks(
        files,
        worker.export_block,
        config.block_size,
        worker.attention.block_bytes,
        capacity.cache_bytes // _READ_SHARE,
        capacity.step_seconds / config.max_batch_prefill_tokens,
    )


def _identity(config: EngineConfig, worker: ModelWorker) -> bytes:
    """A hash of all that determines the bytes of a block, apart from its tokens and salt."""
    attention = worker.attention
    compiled = kernels.cpp_library() is not None
    about: dict[str, Any] = {
        "form": _FORM,
        "versions": [__version__, str(torch.__version__)],
        "kernels": [build.digest(), kernels.describe_kernels()] if compiled else [],
        "attention": [type(attention).__name__, *map(dataclasses.asdict, attention.specs)],
        "model": _model_files(config.model_path),
        "settings": {name: getattr(config, name) for name in _SETTINGS},
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).digest()


def _model_files(folder: Path) -> list[list[object]]:
    """Names and sizes of a model's files, and checksums or times: to read them takes seconds.

    The hub's cache names files by their checksums, which are the same on every machine.
    """
    found = []
    for path in sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)}):
        target = path.resolve()
        status = target.stat()
        blob = _BLOB.fullmatch(target.name)
        found.append([path.name, status.st_size, blob[0] if blob else status.st_mtime_ns])
    return found
