"""Detects a checkpoint's format from its ``quantization_config``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tgi_cli.errors import ModelError, UnsupportedModelError
from tgi_cli.quantization import bitsandbytes, fp8
from tgi_cli.quantization.awq import AWQ
from tgi_cli.quantization.bitsandbytes import Bitsandbytes
from tgi_cli.quantization.compressed_tensors import CompressedTensors
from tgi_cli.quantization.formats import CheckpointFormat
from tgi_cli.quantization.fp8 import FP8
from tgi_cli.quantization.gptq import GPTQ
from tgi_cli.quantization.nvfp4 import ModelOpt
from tgi_cli.quantization.quantized import Quantizer
from tgi_cli.quantization.quantized_weight import quantize_int8

_REMEDY = "serve a checkpoint in bfloat16, or one quantized with gptq, awq or compressed-tensors"

FORMATS: dict[str, Callable[[Mapping[str, Any]], CheckpointFormat]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
    "bitsandbytes": Bitsandbytes,
    "modelopt": ModelOpt,
    "modelopt-fp4": ModelOpt,
}
"""Formats by ``quant_method``."""

_REFUSED = {
    "exl2": "exl2 mixes widths within a matrix, for kernels of exllamav2 that only CUDA has",
    "exl3": "exl3 is a trellis code, for kernels of exllamav3 that only CUDA has",
    "marlin": "weights in Marlin's order are laid out for one CUDA kernel",
}
"""Known formats that are not supported, with reasons."""


def method_name(config: Mapping[str, Any]) -> str:
    """The method that a quantization config names or, without a name, implies."""
    method = config.get("quant_method") or config.get("method")
    if isinstance(method, str):
        return method.lower().replace("_", "-")
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    return "awq" if "w_bit" in config else "gptq" if "bits" in config else "an unnamed method"


def detect_format(config: Mapping[str, Any]) -> CheckpointFormat:
    """Detect the format that a ``quantization_config`` describes.

    Raises:
        UnsupportedModelError: the format is not supported.
        ModelError: the config is invalid.
    """
    method = method_name(config)
    layout = config.get("checkpoint_format", config.get("format"))
    if layout == "marlin" or config.get("is_marlin_format"):
        method = "marlin"
    if method in _REFUSED:
        raise UnsupportedModelError(
            f"weights quantized with {method} are not supported: {_REFUSED[method]}", _REMEDY
        )
    if method not in FORMATS:
        raise UnsupportedModelError(f"weights quantized with {method} are not supported", _REMEDY)
    try:
        return FORMATS[method](config)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ModelError(
            f"the checkpoint's quantization_config is invalid ({error!r:.200})",
            "download the model again, or correct it",
        ) from error


def quantizer_for(name: str) -> Quantizer:
    """The quantizer for plain weights, by its name in
    :data:`tgi_cli.config.settings.model.ON_THE_FLY`.
    """
    if name == "fp8":
        return fp8.quantize
    if name.startswith("bitsandbytes-"):
        return partial(bitsandbytes.quantize, name.removeprefix("bitsandbytes-"))
    return quantize_int8


def method_notice(name: str) -> str | None:
    """A log line about a method on the fly whose name belongs to another library, or None."""
    if name in ("eetq", "bitsandbytes"):
        return (
            f"--quantize {name}: 8-bit integers with a scale per output, as --quantize int8, "
            "computed by our kernels"
        )
    return None
