"""Which cores or GPUs each replica of a model server gets."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tgi_cli.config import DeviceFacts, ServeConfig
from tgi_cli.errors import ConfigError
from tgi_cli.process.cores import Core, usable_cores
from tgi_cli.process.spawn import run_in_fork

log = logging.getLogger(__name__)

GPUS = "CUDA_VISIBLE_DEVICES"
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Files of the drivers of NVIDIA, of AMD, and of Windows for its subsystem for Linux."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one replica runs.

    Attributes:
        cpus: Logical CPUs that its threads may use; empty for all.
        gpus: Value of CUDA_VISIBLE_DEVICES, or empty to leave it as it is.
    """

    cpus: tuple[int, ...] = ()
    gpus: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """Its environment variables."""
        return {GPUS: self.gpus} if self.gpus else {}

    def __str__(self) -> str:
        if self.gpus:
            return f"GPU {self.gpus}"
        return f"CPU {_ranges(self.cpus)}" if self.cpus else "any core"


def place_replicas(config: ServeConfig) -> list[Placement]:
    """Divide the GPUs that torch sees among the replicas, or the cores if there are none.

    Cores of one socket stay together as far as possible; a core is not divided. What a control
    group's quota does not allow is not handed out.

    Raises:
        ConfigError: There are fewer GPUs than the replicas need.
    """
    if config.replicas == 1:
        return [Placement()]
    if _may_have_gpus():
        device = run_in_fork(_describe_device)
        if device.kind == "cuda":
            return _divide_gpus(config, device)
    return _divide_cores(config.replicas, usable_cores())


def _may_have_gpus() -> bool:
    """Whether it is worth seconds to have torch look for GPUs."""
    return sys.platform != "linux" or any(Path(device).exists() for device in _GPU_DEVICES)


def _describe_device() -> DeviceFacts:
    from tgi_cli.device import describe

    return describe(None)


def _divide_gpus(config: ServeConfig, device: DeviceFacts) -> list[Placement]:
    replicas, count = config.replicas, device.count
    named = [name.strip() for name in os.environ.get(GPUS, "").split(",") if name.strip()]
    if len(named) != count:  # unset, or "all"
        named = [str(index) for index in range(count)]
    # As one model server takes all GPUs that were selected, replicas take equal parts of them.
    takes_all = config.sharded or (config.sharded is None and device.chosen is not None)
    stages = config.pipeline_parallel_size
    each = config.num_shard or (max(1, count // replicas // stages) if takes_all else 1)
    each *= stages
    if replicas * each > count:
        shards = f" of {each} shards" if each > 1 else ""
        if stages > 1:
            shards = f" of {stages} stages with {each // stages} shards each"
        raise ConfigError(
            f"--replicas {replicas}{shards} need {replicas * each} GPUs, and there are {count}",
            "lower --replicas or --num-shard",
        )
    return [
        Placement(gpus=",".join(named[index * each : (index + 1) * each]))
        for index in range(replicas)
    ]


def _divide_cores(replicas: int, cores: list[Core]) -> list[Placement]:
    if len(cores) < replicas:
        log.warning(
            "%d replicas share %s: they compute in turns, and are no faster than one",
            replicas,
            "1 core" if len(cores) == 1 else f"{len(cores)} cores",
        )
        return [Placement()] * replicas
    bounds = [index * len(cores) // replicas for index in range(replicas + 1)]
    return [
        Placement(cpus=tuple(sorted(cpu for core in cores[start:end] for cpu in core.cpus)))
        for start, end in pairwise(bounds)
    ]


def _ranges(numbers: tuple[int, ...]) -> str:
    """Numbers in ascending order, as ``0-3,8``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
