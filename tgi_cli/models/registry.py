"""Architecture names to the classes that implement them.

The names are those of ``architectures`` in config.json. Classes are imported when they are
asked for: knowing what is supported takes no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tgi_cli.config import ModelFacts
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.shape import DecoderShape

if TYPE_CHECKING:
    from tgi_cli.models.base import CausalLM

ARCHITECTURES = {
    "LlamaForCausalLM": "tgi_cli.models.llama:LlamaForCausalLM",
    "MinistralForCausalLM": "tgi_cli.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "tgi_cli.models.llama:LlamaForCausalLM",
}


def supported() -> str:
    """One line for the remedy of an error."""
    return f"supported: {', '.join(sorted(ARCHITECTURES))}"


def check_supported(config: ModelConfig) -> None:
    """Refuse, by name, what cannot be run.

    Raises:
        UnsupportedModelError: the architecture, or a quantization of its weights.
    """
    if config.architecture not in ARCHITECTURES:
        if "auto_map" in config.raw:
            even = ", which is not run even with --trust-remote-code"
            raise UnsupportedModelError(
                f"architecture {config.architecture} is defined by code that comes with the "
                f"checkpoint{even if config.trust_remote_code else ''}",
                supported(),
            )
        raise UnsupportedModelError(
            f"architecture {config.architecture} is not supported", supported()
        )
    quantization = config.raw.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise UnsupportedModelError(
            f"weights quantized with {method or 'an unnamed method'} are not supported",
            "serve a checkpoint in float32, bfloat16 or float16",
        )


def model_class(config: ModelConfig) -> type[CausalLM]:
    """The class that implements the architecture. Raises UnsupportedModelError."""
    check_supported(config)
    module, _, name = ARCHITECTURES[config.architecture].partition(":")
    found: type[CausalLM] = getattr(import_module(module), name)
    return found


def model_facts(config: ModelConfig) -> ModelFacts:
    """What the engine must know of a checkpoint before it loads it.

    Raises:
        UnsupportedModelError: it cannot be run; the message names the architecture or option.
        ModelError: config.json lacks a value or has one that cannot be.
    """
    check_supported(config)
    shape = DecoderShape.read(config)
    return ModelFacts(
        architecture=config.architecture,
        model_type=config.get("model_type", str, ""),
        dtype=config.dtype,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_position_embeddings,
        eos_token_ids=config.eos_token_ids,
        kv_bytes_per_token=2 * shape.num_layers * shape.num_kv_heads * shape.head_dim,
    )
