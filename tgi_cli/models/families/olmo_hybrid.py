"""OLMo Hybrid (https://huggingface.co/allenai/Olmo-Hybrid-7B).

Three layers of Gated DeltaNet, with norms before their blocks and gains up to 2, to one of OLMo's
attention, with norms after them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.delta_fields import SeparateConvs, delta_spec
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, DeltaSpec, LayerSpec, MLPSpec, NormSpec
from tgi_cli.models.weight_map import Names, has_tensor

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "max_position_embeddings": 65536,
    "linear_conv_kernel_dim": 4,
}
_GATED_NORM_EPS = 1e-5


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/olmo_hybrid"""
    config = config_fields.filled(config, _DEFAULTS)
    num_heads, num_kv_heads, head_dim = config_fields.heads(config)
    context = config.positive("max_position_embeddings")
    norm = NormSpec(config.get("rms_norm_eps", float, 1e-6))
    bias = config.get("attention_bias", bool, False)
    rotated = config_fields.rope_parameters(config)["rope_theta"] is not None
    mlp = MLPSpec(
        intermediate_size=config.positive("intermediate_size"),
        activation=config_fields.activation(config),
    )
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=0 if rotated else None,
        bias=bias,
        output_bias=bias,
        qk_norm_eps=norm.eps,
        qk_norm="wide",
    )
    delta = _delta(config, num_heads)
    layers = {
        "full_attention": LayerSpec(
            mixer=attention, mlp=mlp, mixer_output_norm=norm, mlp_output_norm=norm
        ),
        "linear_attention": LayerSpec(mixer=delta, mlp=mlp, input_norm=norm, mlp_norm=norm),
    }
    num_layers = config.positive("num_hidden_layers")
    turns = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)]
    if num_layers < 4:
        turns[-1] = "full_attention"
    kinds = config_fields.layer_kinds(config, turns, tuple(layers))
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(layers[kind] for kind in kinds),
        final_norm=norm,
        ropes=(config_fields.rope(config, head_dim, context),) if rotated else (),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=SeparateConvs(_names(config, kinds), delta),
    )


def _delta(config: ModelConfig, num_heads: int) -> DeltaSpec:
    heads = config.positive("linear_num_key_heads", num_heads)
    share = 3 * config.positive("hidden_size") // (4 * heads)
    key_dim = config.positive("linear_key_head_dim", max(share, 1))
    sizes = {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": config.positive("linear_num_value_heads", num_heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": config.positive("linear_value_head_dim", 2 * key_dim),
    }
    gain = 2.0 if config.get("linear_allow_neg_eigval", bool, True) else 1.0
    return delta_spec(replace(config, raw=config.raw | sizes), _GATED_NORM_EPS, gain=gain)


def _names(config: ModelConfig, kinds: list[str]) -> Names:
    """As published; transformers 5 writes a norm of attention layers by another one's name."""
    after = "post_attention_layernorm"
    layer = kinds.index("full_attention") if "full_attention" in kinds else 0
    published = has_tensor(config.path, f"model.layers.{layer}.{after}.weight")
    return Names(
        modules={
            "input_norm": "attention_layer_norm",
            "mlp_norm": "feedforward_layer_norm",
            "mixer_output_norm": after if published else "feedforward_layer_norm",
            "mlp_output_norm": "post_feedforward_layernorm",
            "linear_attn.z_proj": "linear_attn.g_proj",
            "linear_attn.norm": "linear_attn.o_norm",
            "linear_attn.out_proj": "linear_attn.o_proj",
        }
    )
