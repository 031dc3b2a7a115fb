"""Versions, processor and GPUs of this machine, for `tgi serve --env`. Imports no torch."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from tgi_cli.version import __version__

log = logging.getLogger(__name__)

_PACKAGES = ("torch", "transformers", "tokenizers", "huggingface-hub", "safetensors", "grpcio")
_QUERY = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
_SECONDS = 10.0
"""Timeout of nvidia-smi."""


def machine() -> dict[str, str]:
    """Names and values, in display order."""
    found = {"tgi": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["platform"] = platform.platform()
    found["cpu"] = f"{_processor()}, {_cores()} cores"
    found["docker label"] = os.environ.get("DOCKER_LABEL") or "none"
    found["gpus"] = _gpus()
    return found


def log_machine() -> None:
    """Log them as one record."""
    lines = [f"{name}: {value}" for name, value in machine().items()]
    log.info("environment:\n  %s", "\n  ".join(lines))


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line)
    return next(names, platform.machine())


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "no nvidia-smi"
    try:
        done = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
    return "; ".join(line.strip() for line in done.stdout.splitlines()) or "none"
