"""Describes this machine, for saved runs of ``tgi bench`` and for ``tgi serve --env``."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = (
    *("tgi-cli", "torch", "transformers", "tokenizers", "triton", "grpcio", "uvloop"),
    *("huggingface-hub", "safetensors"),
)
_SECONDS = 10
_GPU_QUERY = "--query-gpu=name,memory.total,driver_version"


def describe() -> dict[str, Any]:
    """Processor, cores, memory, GPUs, system and versions.

    Keys: ``processor``, ``cores``, ``memory_bytes``, ``gpus`` (name, memory and driver of each, by
    nvidia-smi), ``system``, ``python``, ``packages`` (names to versions), ``hostname``. Never
    fails; unknown values are omitted.
    """
    found: dict[str, Any] = {
        "hostname": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": _cores(),
        "memory_bytes": _memory(),
        "gpus": _output_of("nvidia-smi", _GPU_QUERY, "--format=csv,noheader").splitlines(),
        "packages": _packages(),
    }
    return {name: value for name, value in found.items() if value not in (None, "")}


def has_gpu() -> bool:
    """Whether nvidia-smi finds a GPU."""
    return bool(_output_of("nvidia-smi", _GPU_QUERY, "--format=csv,noheader"))


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    if platform.system() == "Darwin":
        return _output_of("sysctl", "-n", "machdep.cpu.brand_string")
    return platform.processor() or platform.machine()


def _cores() -> int | None:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _output_of(*command: str) -> str:
    """The output of a command, or nothing if it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=True
        ).stdout.strip()
    return ""


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
