"""The machine that a benchmark ran on."""

from __future__ import annotations

from typing import Any


def describe() -> dict[str, Any]:
    """Processor, cores, memory, GPUs, system and versions, for ``Run.machine``.

    Keys: ``processor``, ``cores``, ``memory_bytes``, ``gpus`` (list of names), ``system``,
    ``python``, ``packages`` (names to versions), ``hostname``. Never fails; what cannot be found
    out is missing.
    """
    raise NotImplementedError
