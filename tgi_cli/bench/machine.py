"""Describes the machine that a benchmark runs on."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("tgi-cli", "torch", "transformers", "tokenizers", "triton", "grpcio", "uvloop")
_SECONDS = 10


def describe() -> dict[str, Any]:
    """Processor, cores, memory, GPUs, system and versions, for ``BenchRun.machine``.

    Keys: ``processor``, ``cores``, ``memory_bytes``, ``gpus`` (list of names), ``system``,
    ``python``, ``packages`` (names to versions), ``hostname``. Never fails; unknown values
    are omitted.
    """
    found: dict[str, Any] = {
        "hostname": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": _cores(),
        "memory_bytes": _memory(),
        "gpus": _gpus(),
        "packages": _packages(),
    }
    return {name: value for name, value in found.items() if value not in (None, "")}


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
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


def _gpus() -> list[str]:
    """Name, memory and driver of each GPU, by nvidia-smi."""
    output = _output_of(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    return [line.strip() for line in output.splitlines() if line.strip()]


def _output_of(*command: str) -> str:
    """The output of a command, or nothing if it fails."""
    path = shutil.which(command[0])
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *command[1:]], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
