"""StarCoder 2 (https://arxiv.org/abs/2402.19173): Llama with layer norms and a plain MLP."""

from __future__ import annotations

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec
from tgi_cli.models.weight_map import PRE_NORMS, Names


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/starcoder2"""
    heads, kv_heads, head_dim = config_fields.heads(config, 2)
    context = config.positive("max_position_embeddings", 4096)
    bias = config.get("use_bias", bool, True)
    norm = NormSpec(config.get("norm_epsilon", float, 1e-5), "layer")
    mlp = MLPSpec(
        intermediate_size=config.positive("intermediate_size"),
        activation=config_fields.activation(config, default="gelu_pytorch_tanh"),
        gated=False,
        bias=bias,
    )
    windows = config_fields.windows(config, config.positive("num_hidden_layers"), context)
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(
                mixer=AttentionSpec(
                    num_heads=heads,
                    num_kv_heads=kv_heads,
                    head_dim=head_dim,
                    bias=bias,
                    output_bias=bias,
                    window=window,
                ),
                mlp=mlp,
                input_norm=norm,
                mlp_norm=norm,
            )
            for window in windows
        ),
        final_norm=norm,
        ropes=(config_fields.rope(config, head_dim, context),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, True),
        source=Names(
            modules={
                "mlp.up_proj": "mlp.c_fc",
                "mlp.down_proj": "mlp.c_proj",
                **PRE_NORMS,
            }
        ),
    )
