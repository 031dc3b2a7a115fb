"""Profiles that ``tgi warmup`` saves for later starts of the same model on the same machine.

There is a file for each key in ``$XDG_CACHE_HOME/tgi/limits``. A key contains everything that the
measurements depend on: the model's files, the device, versions and settings. A change of any of
these gives another key, so that a saved profile is never wrong, only unused. Unreadable files are
ignored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tgi_cli import kernels
from tgi_cli.config import EngineConfig
from tgi_cli.device import default_threads, describe
from tgi_cli.engine.step import StepTime
from tgi_cli.files import read_json
from tgi_cli.kernels import build
from tgi_cli.version import __version__
from tgi_cli.worker.sizing.image_cost import ImageCost

log = logging.getLogger(__name__)

_FORM = 2
_NOT_IN_KEY = frozenset(
    [
        "model_path",
        "model_id",
        "revision",
        "trust_remote_code",
        "load_format",
        "rope_scaling",
        "rope_factor",
        "disable_grammar_support",
        "cross_check",
        "measured_limits",
        "replicas",
        "explicit_limits",
        "json_output",
        "kv_cache_dir",
        "kv_cache_dir_size",
        "kv_offloading_size",
        "max_prefill_delay",
        "speculate",
        "drafts_from_answers",
    ]
)
"""Fields of a configuration that the figures do not depend on."""
_FILES = ("config.json", "*.safetensors", "*.gguf", "*quant*config.json", "*.py")
"""Files of a model's folder that the figures depend on."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedProfile:
    """Figures that do not depend on how much memory is free.

    Attributes:
        activation_bytes: upper bound of what a step takes beside weights and cache, of the shard
            where it is most; CUDA graphs included.
        graphs: whether decode steps can be recorded as graphs.
        step_seconds: estimate for the worst step on a CPU; 0 if unknown.
        max_total_tokens: limit that the memory allowed.
        step_times: durations of steps with and without drafts; empty if they were not measured.
        images: the cost of images; None if the model takes none.
        weight_bytes: bytes of the model's weights.
        block_bytes: bytes of a KV block over all shards.
        slot_bytes: bytes of a slot for recurrent states over all shards.
        when: seconds since the epoch.
    """

    activation_bytes: int
    graphs: bool
    step_seconds: float
    max_total_tokens: int
    step_times: tuple[StepTime, ...] = ()
    images: ImageCost | None = None
    weight_bytes: int = 0
    block_bytes: int = 0
    slot_bytes: int = 0
    when: float = 0.0

    @property
    def date(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.when))


def key_of(config: EngineConfig) -> dict[str, Any]:
    """All that the figures depend on, as JSON values.

    Args:
        config: as resolved, before warm-up lowers its limits.
    """
    device = describe(config.device)
    settings = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in _NOT_IN_KEY
    }
    return {
        "form": _FORM,
        "versions": {
            "tgi": __version__,
            "torch": str(torch.__version__),
            "transformers": _version("transformers"),
            "kernels": build.digest() if kernels.cpp_library() is not None else "",
        },
        "device": [device.kind, device.name, device.total_memory, device.count],
        "threads": default_threads(),
        "model": _files(config.model_path),
        "drafter": []
        if config.speculative_model is None
        else _files(Path(config.speculative_model)),
        "settings": settings,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # built-in families run without it
        return ""


def path_of(key: dict[str, Any]) -> Path:
    """The file of a key, whether there is one or not."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.blake2b(_encode(key), digest_size=12).hexdigest()
    return Path(base) / "tgi" / "limits" / f"{digest}.json"


def load(key: dict[str, Any]) -> SavedProfile | None:
    """The saved profile of a key, or None if there is none."""
    path = path_of(key)
    try:
        record = read_json(path)
        measured = record["measured"]
        times = tuple(StepTime(*time) for time in measured.pop("step_times", ()))
        images = measured.pop("images", None)
        cost = None if images is None else ImageCost(*images)
        profile = SavedProfile(**measured, step_times=times, images=cost)
        same = _encode(record["key"]) == _encode(key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("saved profile cannot be read: %s: %s", path, error)
        return None
    return profile if same else None


def save(key: dict[str, Any], profile: SavedProfile) -> Path:
    """Save a profile in place of an earlier one; returns the file. Raises OSError."""
    path = path_of(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    now = dataclasses.replace(profile, when=time.time())
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        record = {"key": key, "measured": dataclasses.asdict(now)}
        file.write(json.dumps(record, indent=1, default=str).encode())
    Path(file.name).replace(path)
    return path


def _encode(key: dict[str, Any]) -> bytes:
    """As JSON, in which tuples are lists."""
    return json.dumps(key, sort_keys=True, default=str).encode()


def _files(folder: Path) -> list[list[Any]]:
    """Name, size and time of the model's files; to read their content would take seconds."""
    found = {path for pattern in _FILES for path in folder.glob(pattern)}
    statuses = [(path.name, path.stat()) for path in sorted(found)]
    return [[name, status.st_size, status.st_mtime_ns] for name, status in statuses]
