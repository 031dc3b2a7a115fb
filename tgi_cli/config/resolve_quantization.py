"""Resolves how weights and activations are quantized."""

from __future__ import annotations

from tgi_cli.config.schema import DeviceFacts, ModelFacts
from tgi_cli.config.settings.model import ON_THE_FLY
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


def resolve_activations(
    requested: bool | None, model: ModelFacts, dtype: str, multiplies_bytes: bool
) -> bool:
    """Whether to round activations to 8 bits for products with integers.

    By default, only those with the weights of GGUF files, which llama.cpp multiplies alike.

    Args:
        multiplies_bytes: whether the device has kernels for it.

    Raises:
        ConfigError: it is requested for a GGUF file without integers.
    """
    if requested is None:
        return model.integer_blocks and dtype == "bfloat16" and multiplies_bytes
    if requested and model.quantization == "gguf" and not model.integer_blocks:
        raise ConfigError(
            "--quantize-activations: the file has no weights in integers of 8 bits or fewer",
            "leave it off",
        )
    return requested
