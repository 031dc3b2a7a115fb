"""Which format a checkpoint is in, from what its configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tgi_cli.errors import ModelError, UnsupportedModelError

if TYPE_CHECKING:
    from tgi_cli.quantization.formats import CheckpointFormat

_ELSEWHERE = "serve a checkpoint in bfloat16, or one quantized with gptq, awq or compressed-tensors"

_REFUSED = {
    "exl2": "exl2 mixes widths within a matrix, for kernels of exllamav2 that only CUDA has",
    "exl3": "exl3 is a trellis code, for kernels of exllamav3 that only CUDA has",
    "marlin": "weights in Marlin's order are laid out for one CUDA kernel",
}
"""Formats that people have, and why they are not read."""


def method_of(config: Mapping[str, Any]) -> str:
    """The method that a quantization config names, or that its other keys show."""
    method = config.get("quant_method") or config.get("method")
    if isinstance(method, str):
        return method.lower().replace("_", "-")
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    return "awq" if "w_bit" in config else "gptq" if "bits" in config else "an unnamed method"


def recognise(config: Mapping[str, Any]) -> CheckpointFormat:
    """The format that a ``quantization_config`` describes.

    Raises:
        UnsupportedModelError: it cannot be read; the message says why.
        ModelError: the configuration makes no sense.
    """
    method = method_of(config)
    layout = config.get("checkpoint_format", config.get("format"))
    if layout == "marlin" or config.get("is_marlin_format"):
        method = "marlin"
    if method in _REFUSED:
        raise UnsupportedModelError(
            f"weights quantized with {method} are not supported: {_REFUSED[method]}", _ELSEWHERE
        )
    if method not in _FORMATS:
        raise UnsupportedModelError(
            f"weights quantized with {method} are not supported", _ELSEWHERE
        )
    try:
        return _FORMATS[method](config)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(
            f"the checkpoint's quantization_config makes no sense ({error!r})",
            "download the model again, or correct it",
        ) from error


def _gptq(config: Mapping[str, Any]) -> CheckpointFormat:
    from tgi_cli.quantization.gptq import GPTQ

    return GPTQ(config)


_FORMATS: dict[str, Callable[[Mapping[str, Any]], CheckpointFormat]] = {"gptq": _gptq}
