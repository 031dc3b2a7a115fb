"""A hash of everything that determines the bytes of KV blocks, except their tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch

from tgi_cli import kernels
from tgi_cli.attention import PagedAttention
from tgi_cli.config import EngineConfig
from tgi_cli.hub.streamed_model import MARKER
from tgi_cli.kernels import build
from tgi_cli.version import __version__

_FORM = 1
"""Version of the form of a block."""

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


def block_identity(config: EngineConfig, attention: PagedAttention) -> bytes:
    """A hash of all that determines the bytes of a block, apart from its tokens and salt."""
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
