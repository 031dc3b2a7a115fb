"""Maps architecture names to the families that implement them.

The names are those of ``architectures`` in config.json. Families read it without torch: neither
the list of supported models nor a model's facts need it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tgi_cli.config import ModelFacts
from tgi_cli.errors import ConfigError, ModelError
from tgi_cli.gguf.model_config import METHOD as GGUF
from tgi_cli.models.config import ModelConfig, shown_error
from tgi_cli.models.families.wrapped import wraps_family
from tgi_cli.models.image_support import takes_images
from tgi_cli.models.size_check import check_sizes
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LatentSpec
from tgi_cli.models.weight_files import gguf_headers

if TYPE_CHECKING:
    from tgi_cli.quantization.formats import CheckpointFormat

FAMILIES = {
    "BambaForCausalLM": "bamba",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV32ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "FalconForCausalLM": "falcon",
    "Gemma2ForCausalLM": "gemma",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GemmaForCausalLM": "gemma",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma3nForConditionalGeneration": "gemma3n",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Glm4MoeLiteForCausalLM": "deepseek",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeHybridForCausalLM": "granite_hybrid",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2",
    "Lfm3ForCausalLM": "lfm3",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "KimiLinearForCausalLM": "kimi_linear",
    "LlamaForCausalLM": "llama",
    "MinistralForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
    "NemotronHForCausalLM": "nemotron_h",
    "Olmo2ForCausalLM": "olmo",
    "Olmo3ForCausalLM": "olmo",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen",
    "Qwen2MoeForCausalLM": "qwen_moe",
    "Qwen2VLForConditionalGeneration": "qwen_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen_vl",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3VLForConditionalGeneration": "qwen_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen_vl",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
    "YoutuForCausalLM": "deepseek",
}
"""Architectures to modules of :mod:`tgi_cli.models.families`."""

_UNPACKED = {("gpt_oss", "mxfp4")}
"""Families, and the quantization methods whose weights they read themselves."""


def is_builtin(config: ModelConfig) -> bool:
    """Whether a family here defines the architecture; any other runs transformers' code."""
    return config.architecture in FAMILIES or wraps_family(config)


def has_encoder(config: ModelConfig) -> bool:
    """Whether the architecture has an encoder and a decoder."""
    own = is_builtin(config) or config.architecture.endswith("ForCausalLM")
    return config.raw.get("is_encoder_decoder") is True and not own


def reads_quantized(config: ModelConfig) -> bool:
    """Whether the checkpoint is quantized and read tensor by tensor.

    Either the model's family reads it, or the file states the type of each tensor (GGUF).
    """
    method = (config.quantization or {}).get("quant_method")
    return method == GGUF or (FAMILIES.get(config.architecture), method) in _UNPACKED


def checkpoint_format(config: ModelConfig) -> CheckpointFormat | None:
    """How the checkpoint's weights are quantized as several tensors each; None if they are not.

    Raises:
        UnsupportedModelError: in a way that cannot be read.
    """
    stated = config.quantization
    if stated is None:
        return None
    if reads_quantized(config):
        return None
    from tgi_cli.quantization.detect import detect_format  # imports torch

    return detect_format(stated)


def quantization_name(config: ModelConfig) -> str | None:
    """The method's value of ``--quantize``, if it has one. Raises as checkpoint_format."""
    layout, stated = checkpoint_format(config), config.quantization
    if layout is not None:
        return layout.name
    return None if stated is None else str(stated.get("quant_method"))


def _has_integers(config: ModelConfig) -> bool:
    """Whether weights are stored in integers of 8 bits or fewer. Raises as checkpoint_format."""
    if config.is_gguf:
        found = gguf_headers(config.path)
        return found is not None and found.has_integers
    layout = checkpoint_format(config)
    return layout is not None and layout.has_integers


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """Let the architecture's family read the configuration.

    Raises:
        UnsupportedModelError: it cannot be run; the message names the architecture or option.
        ModelError: config.json lacks a value or has an invalid one.
    """
    quantized = checkpoint_format(config) is not None
    check_sizes(config.path, config.raw, quantized or config.quantization is not None, builtin=True)
    name = FAMILIES.get(config.architecture, "wrapped")
    family = import_module(f"tgi_cli.models.families.{name}")
    try:
        spec: DecoderSpec = family.read(config)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ModelError(
            f"{config.file} makes no sense ({shown_error(error)})",
            "download the model again, or correct it",
        ) from error
    return spec


def model_facts(config: ModelConfig) -> ModelFacts:
    """The facts that the engine needs before it loads a checkpoint. Raises as decoder_spec.

    For architectures without a built-in family, it imports transformers and torch.
    """
    if has_encoder(config):
        from tgi_cli.models.hf.encoder_decoder import encoder_decoder_facts

        facts = encoder_decoder_facts(config)
    elif is_builtin(config):
        facts = _builtin_facts(config)
    else:
        from tgi_cli.models.hf.model import transformers_facts

        facts = transformers_facts(config)
    return replace(
        facts,
        quantization=quantization_name(config),
        integer_weights=_has_integers(config),
        takes_images=takes_images(config),
    )


def _builtin_facts(config: ModelConfig) -> ModelFacts:
    spec = decoder_spec(config)
    mixers = [layer.mixer for layer in spec.layers]
    attentions = [mixer for mixer in mixers if isinstance(mixer, AttentionSpec)]
    latents = [mixer for mixer in mixers if isinstance(mixer, LatentSpec)]
    cached: list[AttentionSpec | LatentSpec] = [*attentions, *latents]
    return ModelFacts(
        architecture=config.architecture,
        model_type=config.get("model_type", str, ""),
        dtype=config.dtype,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
        eos_token_ids=config.eos_token_ids(spec.vocab_size),
        kv_bytes_per_token=sum(mixer.kv_numbers for mixer in cached),
        num_heads=min((mixer.num_heads for mixer in cached), default=None),
        num_kv_heads=min((a.num_kv_heads for a in attentions), default=None),
    )


def scale_rope(config: ModelConfig, rope: tuple[str, float] | None) -> ModelConfig:
    """Replace the scaling of a configuration's positions; the context grows by the factor.

    Args:
        config: configuration of a built-in family.
        rope: ``linear`` or ``dynamic``, and the factor; None leaves ``config`` as it is.

    Raises:
        ConfigError: its positions cannot be scaled.
    """
    if rope is None:
        return config
    kind, factor = rope
    if not is_builtin(config) or not decoder_spec(config).ropes:
        raise ConfigError(
            f"--rope-scaling is not for {config.architecture}: it is not run with rotary embedding "
            "of our own",
            "leave --rope-scaling and --rope-factor off",
        )
    context = decoder_spec(config).max_position_embeddings
    raw = dict(config.raw)
    raw["rope_parameters"] = _unscaled(config.get("rope_parameters", dict, {}))
    raw["rope_scaling"] = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": context,
    }
    raw.pop("original_max_position_embeddings", None)
    raw["max_position_embeddings"] = math.floor(context * factor)
    extended = replace(config, raw=raw)
    if decoder_spec(extended).max_position_embeddings != raw["max_position_embeddings"]:
        raise ConfigError(
            f"--rope-scaling is not for {config.architecture}: its context cannot be extended",
            "leave --rope-scaling and --rope-factor off",
        )
    return extended


def _unscaled(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters without a scaling; they may be nested below each kind of layer."""
    unscaled = ("rope_theta", "partial_rotary_factor")
    return {
        key: _unscaled(value) if isinstance(value, dict) else value
        for key, value in parameters.items()
        if isinstance(value, dict) or key in unscaled
    }
