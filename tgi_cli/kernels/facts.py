"""Properties of a device, with those of the kernels for it."""

from __future__ import annotations

from dataclasses import replace

from tgi_cli.config import DeviceFacts
from tgi_cli.device import describe
from tgi_cli.kernels.library import cpp_library


def describe_device(kind: str | None) -> DeviceFacts:
    """The facts of a device: ``cpu`` or ``cuda``. Default: CUDA if it is available.

    It loads the kernels for the CPU. Raises as :func:`tgi_cli.device.describe`.
    """
    facts = describe(kind)
    return replace(facts, kernels=facts.kind == "cpu" and cpp_library() is not None)
