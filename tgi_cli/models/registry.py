"""Architecture names to the families that implement them.

The names are those of ``architectures`` in config.json. Families are torch-free readers of it:
knowing what is supported, and a model's facts, takes no torch.
"""

from __future__ import annotations

from importlib import import_module

from tgi_cli.config import ModelFacts
from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import DecoderSpec

FAMILIES = {
    "FalconForCausalLM": "falcon",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GemmaForCausalLM": "gemma",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MinistralForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo",
    "Olmo3ForCausalLM": "olmo",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen",
    "Qwen2MoeForCausalLM": "qwen_moe",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen_moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}
"""Architectures to modules of :mod:`tgi_cli.models.families`."""

_UNPACKED = {("gpt_oss", "mxfp4")}
"""Families and the quantized weights that they read into dense ones."""


def supported() -> str:
    """One line for the remedy of an error."""
    return f"supported: {', '.join(sorted(FAMILIES))}"


def check_supported(config: ModelConfig) -> None:
    """Refuse, by name, what cannot be run.

    Raises:
        UnsupportedModelError: the architecture, or a quantization of its weights.
    """
    if config.architecture not in FAMILIES:
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
        if (FAMILIES[config.architecture], method) in _UNPACKED:
            return
        raise UnsupportedModelError(
            f"weights quantized with {method or 'an unnamed method'} are not supported",
            "serve a checkpoint in float32, bfloat16 or float16",
        )


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """What the family reads from the configuration.

    Raises:
        UnsupportedModelError: it cannot be run; the message names the architecture or option.
        ModelError: config.json lacks a value or has one that cannot be.
    """
    check_supported(config)
    family = import_module(f"tgi_cli.models.families.{FAMILIES[config.architecture]}")
    spec: DecoderSpec = family.read(config)
    return spec


def model_facts(config: ModelConfig) -> ModelFacts:
    """What the engine must know of a checkpoint before it loads it. Raises as decoder_spec."""
    spec = decoder_spec(config)
    attentions = [layer.attention for layer in spec.layers]
    return ModelFacts(
        architecture=config.architecture,
        model_type=config.get("model_type", str, ""),
        dtype=config.dtype,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
        eos_token_ids=config.eos_token_ids,
        kv_bytes_per_token=2 * sum(a.num_kv_heads * a.head_dim for a in attentions),
    )
