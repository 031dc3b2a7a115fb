"""Name, memory and features of a device."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from tgi_cli.config import DeviceFacts
from tgi_cli.device.memory import total_memory
from tgi_cli.errors import ConfigError

_CPUINFO = Path("/proc/cpuinfo")

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""As Linux spells them: the first two on x86-64, the last on AArch64."""


def describe(kind: str | None) -> DeviceFacts:
    """The facts of a device: ``cpu`` or ``cuda``. Default: CUDA if it is available.

    Raises:
        ConfigError: the kind is unknown, or CUDA is unavailable.
    """
    if kind is None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        name, flags = _cpu()
        return DeviceFacts(
            kind="cpu",
            name=name,
            total_memory=total_memory(torch.device("cpu")),
            native_bfloat16=bool(flags & _BF16_FLAGS),
        )
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "no CUDA device is available to torch",
                "serve on the CPU, or install a CUDA build of torch and its driver",
            )
        return DeviceFacts(
            kind="cuda",
            name=torch.cuda.get_device_name(),
            total_memory=total_memory(torch.device("cuda")),
            native_bfloat16=torch.cuda.is_bf16_supported(including_emulation=False),
            count=torch.cuda.device_count(),
            chosen=devices_in_environment(torch.cuda.device_count()),
        )
    raise ConfigError(f"unknown device {kind!r}", "one of: cpu, cuda")


def devices_in_environment(count: int) -> int | None:
    """Number of devices that the environment names, as TGI counts them; None if it names none."""
    for variable in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        named = os.environ.get(variable, "").strip()
        if named in ("all", "void"):
            return count
        if named:
            return len([device for device in named.split(",") if device.strip()])
    return None


def _cpu() -> tuple[str, frozenset[str]]:
    """Name and feature flags of the processor; no flags if the system does not list them."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    flags = fields.get("flags") or fields.get("features") or ""
    return fields.get("model name") or platform.machine(), frozenset(flags.split())
