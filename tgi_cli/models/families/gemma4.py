"""Gemma 4 (https://ai.google.dev/gemma/docs/core/model_card_4): of all its models, the text part.

Layers with a window and without have heads of different sizes; the last layers may attend to the
caches of the last ones of their kind before them. The small models have an embedding of each token
for every layer, the sparse one experts beside an MLP. Norms multiply by their weight.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models import config_fields
from tgi_cli.models.config import TEXT_ALONE, ModelConfig, text_part
from tgi_cli.models.families.gemma import SANDWICH
from tgi_cli.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MLPAndExpertsSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
    PerLayerSpec,
)
from tgi_cli.models.weight_map import Names, Source, StackedExperts

FULL, SLIDING = "full_attention", "sliding_attention"

PER_LAYER = {
    "per_layer.gate": "per_layer_input_gate",
    "per_layer.projection": "per_layer_projection",
    "per_layer.norm": "post_per_layer_input_norm",
}
_MODULES = (
    SANDWICH
    | PER_LAYER
    | {
        "scalar": "layer_scalar",
        "mlp.dense_norm": "pre_feedforward_layernorm",
        "mlp.dense.gate_proj": "mlp.gate_proj",
        "mlp.dense.up_proj": "mlp.up_proj",
        "mlp.dense.down_proj": "mlp.down_proj",
        "mlp.dense_output_norm": "post_feedforward_layernorm_1",
        "mlp.moe_norm": "pre_feedforward_layernorm_2",
        "mlp.moe_output_norm": "post_feedforward_layernorm_2",
        "mlp.moe.expert_scales": "router.per_expert_scale",
        "mlp.moe.router": "router.proj",
    }
)
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
}
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
OTHER_PARTS = (
    r"(model\.)?(vision_tower|audio_tower|vision_embedder|embed_vision|embed_audio)\..*",
    r".*\.k_norm\.weight|.*\.[kv]_proj\.weight",  # of layers that read another's cache
)


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/gemma4"""
    seeing = config.architecture != "Gemma4ForCausalLM"
    if seeing:
        config = text_part(config, tied=True)
    config = config_fields.filled(config, _DEFAULTS)
    if config.raw.get("use_bidirectional_attention") == "all":
        raise UnsupportedModelError(f"{config.architecture} with attention that is not causal")
    context, num_layers = config.positive("max_position_embeddings"), config.positive("num_hidden_layers")
    default = [FULL if (layer + 1) % 6 == 0 else SLIDING for layer in range(num_layers)]
    kinds = [*config_fields.layer_kinds(config, default)[:-1], FULL]
    attentions = _attentions(config, kinds, context)
    norm = NormSpec(config.get("rms_norm_eps", float))
    hidden, width = config.positive("hidden_size"), config.get("hidden_size_per_layer_input", int, 0)
    activation = config_fields.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    mlp = MLPSpec(intermediate_size=config.positive("intermediate_size"), activation=activation)
    wide = replace(mlp, intermediate_size=2 * mlp.intermediate_size)
    doubled = config.get("use_double_wide_mlp", bool, False)
    experts = _experts(config, mlp, norm.eps) if config.raw.get("enable_moe_block") else None
    layers = [
        LayerSpec(
            mixer=attention,
            mlp=experts or (wide if doubled and attention.cache is not None else mlp),
            input_norm=norm,
            mixer_output_norm=norm,
            mlp_norm=None if experts else norm,
            mlp_output_norm=norm,
            output_scalar=True,
            per_layer=PerLayerSpec(
                vocab_size=config.positive("vocab_size_per_layer_input"),
                width=width,
                eps=norm.eps,
                activation=activation,
            )
            if width
            else None,
        )
        for attention in attentions
    ]
