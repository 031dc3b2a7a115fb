"""Nemotron-H and Nemotron 3 (https://arxiv.org/abs/2504.03624, https://arxiv.org/abs/2512.20848).

A layer is one block: Mamba-2, attention without positions, a feed-forward block or experts, which
may have inputs and outputs of their own, smaller width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.deepseek_fields import grouped_experts
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, MoESpec, NormSpec
from tgi_cli.models.state_fields import mamba_modules, nemotron_mamba
from tgi_cli.models.weight_map import Names, Source, StackedExperts, has_stacked_experts, has_tensor

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504,
    "num_attention_heads": 32, "head_dim": 128, "max_position_embeddings": 4096,
    "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True, "topk_method": "noaux_tc",
}  # fmt: skip
_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_MODULES = {
    "input_norm": "norm",
    "mlp_norm": "norm",
    **{f"self_attn.{name}_proj": f"mixer.{name}_proj" for name in "qkvo"},
    **{f"mlp.{name}_proj": f"mixer.{name}_proj" for name in ("up", "down")},
    **{f"mlp.experts.*.{name}_proj": f"mixer.experts.*.{name}_proj" for name in ("up", "down")},
    **{f"mlp.shared_expert.{n}_proj": f"mixer.shared_experts.{n}_proj" for n in ("up", "down")},
    "mlp.router": "mixer.gate",
    "mlp.router.correction": "mixer.gate.e_score_correction_bias",
    "mlp.latent_down": "mixer.fc1_latent_proj",
    "mlp.latent_up": "mixer.fc2_latent_proj",
}


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/nemotron_h"""
    config = config_fields.filled(config, _DEFAULTS)
    config_fields.refuse(config, "attention_bias")
    num_heads, num_kv_heads, head_dim = config_fields.heads(config, 8)
    norm = NormSpec(config.get("layer_norm_epsilon", float, 1e-5))
    ssm = nemotron_mamba(config, norm.eps)
    mlp = MLPSpec(
        intermediate_size=config.positive("intermediate_size"),
        activation=config_fields.activation(config, "mlp_hidden_act", "relu2"),
        gated=False,
        bias=config.get("mlp_bias", bool, False),
    )
    attention = AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rope=None
    )
    kinds = _kinds(config)
    if "moe" in kinds:
        config_fields.refuse(config, "mlp_bias")
    layers = {
        "linear_attention": LayerSpec(mixer=ssm, mlp=None, input_norm=norm),
        "full_attention": LayerSpec(mixer=attention, mlp=None, input_norm=norm),
        "mlp": LayerSpec(mixer=None, mlp=mlp, mlp_norm=norm),
        "moe": LayerSpec(mixer=None, mlp=_experts(config, mlp.activation), mlp_norm=norm),
    }
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=config.positive("max_position_embeddings"),
        layers=tuple(layers[kind] for kind in kinds),
        final_norm=norm,
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=_source(config, mamba_modules(ssm, "mixer")),
        ignored=(r"mtp\..*",),
    )


def _experts(config: ModelConfig, activation: str) -> MoESpec:
    latent = config.raw.get("moe_latent_size")
    return replace(
        grouped_experts(config, softmax=False),
        activation=activation,
        shared_intermediate_size=config.positive("moe_shared_expert_intermediate_size"),
        gated=False,
        latent_size=None if latent is None else config.positive("moe_latent_size"),
    )


def _kinds(config: ModelConfig) -> list[str]:
    key = config_fields.stated(config, "layers_block_type", "layer_types")
    pattern = config.get("hybrid_override_pattern", str, "ME*-")
    if config.raw.get(key) is None and not set(pattern) <= set(_KINDS):
        raise config.invalid(f"'hybrid_override_pattern' is {pattern!r:.60}, not of M, E, * and -")
    named = config.get(key, list, [_KINDS[letter] for letter in pattern if letter in _KINDS])
    return config_fields.layer_kinds(config, named, tuple(_KINDS.values()), key)


def _source(config: ModelConfig, mamba: dict[str, Any]) -> Callable[[str], Source]:
    """Published names, or those that transformers 5 has in memory."""
    top = "model" if has_tensor(config.path, "model.embeddings.weight") else "backbone"
    names = Names(
        layers=f"{top}.layers",
        modules=_MODULES | mamba,
        top={"model.embed_tokens": f"{top}.embeddings", "model.norm": f"{top}.norm_f"},
    )
    if not has_stacked_experts(config.path):
        return names
    experts = "mixer.experts"
    return StackedExperts(names, f"{experts}.up_proj", f"{experts}.down_proj", gates=False)
