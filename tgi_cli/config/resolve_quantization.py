"""Resolves how weights and activations are quantized."""

from __future__ import annotations

from tgi_cli.config.schema import DeviceFacts, ModelFacts, ServeConfig
from tgi_cli.config.settings.model import INTEGERS_ON_THE_FLY, ON_THE_FLY
from tgi_cli.errors import ConfigError


def resolve_quantize(requested: str | None, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The format into which to quantize unquantized weights, or None.

    Raises:
        ConfigError: the requested format contradicts the checkpoint or the device.
    """
    found = model.quantization
    if requested is None:
        return None
    if requested == "marlin" and device.kind != "cuda":
        raise ConfigError("--quantize marlin names kernels of CUDA GPUs", "leave it off")
    if found is None and requested in ON_THE_FLY:
        return requested
    if requested != found and not (requested == "marlin" and found in ("gptq", "awq")):
        weights = f"is quantized with {found}" if found else "has unquantized weights"
        raise ConfigError(
            f"--quantize {requested} contradicts the checkpoint, which {weights}",
            f"leave it off; for unquantized weights: {', '.join(ON_THE_FLY)}",
        )
    return None


def has_integers(serve: ServeConfig, model: ModelFacts) -> bool:
    """Whether weights are in integers of 8 bits or fewer: as stored, or quantized as loaded."""
    quantized_on_load = model.quantization is None and serve.quantize in INTEGERS_ON_THE_FLY
    return model.integer_weights or quantized_on_load or serve.head_bits == 8


def resolve_activations(
    serve: ServeConfig, model: ModelFacts, dtype: str, multiplies_bytes: bool
) -> bool:
    """Whether to round activations to 8 bits for products with integers.

    By default, wherever there are kernels for it, whatever precision of activations a checkpoint's
    scheme names.

    Args:
        multiplies_bytes: whether the device has these kernels.

    Raises:
        ConfigError: it is requested for a model without integers.
    """
    requested, integers = serve.quantize_activations, has_integers(serve, model)
    if requested is None:
        return integers and dtype == "bfloat16" and multiplies_bytes
    if requested and not integers:
        raise ConfigError(
            "--quantize-activations: the model has no weights in integers of 8 bits or fewer",
            "leave it off" if model.quantization else "add --quantize int8, or leave it off",
        )
    return requested
