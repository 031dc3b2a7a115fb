"""Falcon (https://arxiv.org/abs/2311.16867): 7B's multi-query form, 40B's and 180B's grouped one.

Queries, keys and values are in one tensor, the query heads of a group before its key and value.
Falcon RW has a bias by distance (ALiBi) instead of rotary angles; its slopes have the precision of
bfloat16, as where it was trained, while distances are exact.
"""

from __future__ import annotations

import math

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec
from tgi_cli.models.weight_map import Names, interleaved


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/falcon"""
    hidden = config.positive("hidden_size")
    heads = config.positive(config_fields.stated(config, "num_attention_heads", "n_head"))
    head_dim = hidden // heads
    grouped = config.get("new_decoder_architecture", bool, False)
    multi_query = config.get("multi_query", bool, True)
    kv_heads = heads
    if grouped:
        kv_heads = config.positive(config_fields.stated(config, "num_kv_heads", "n_head_kv"), heads)
    elif multi_query:
        kv_heads = 1
    parallel = config.get("parallel_attn", bool, True)
    if grouped and not parallel:
        raise UnsupportedModelError(
            f"new_decoder_architecture without parallel_attn is not supported for "
            f"{config.architecture}"
        )
    two_norms = grouped and config.get("num_ln_in_parallel_attn", int, 2) == 2
    context = config.positive("max_position_embeddings", 2048)
    bias = config.get("bias", bool, False)
    norm = NormSpec(config.get("layer_norm_epsilon", float, 1e-5), "layer")
    alibi = config.get("alibi", bool, False)
    layer = LayerSpec(
        mixer=AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=None if alibi else 0,
            bias=bias,
            output_bias=bias,
            slopes=_slopes(heads, head_dim**-0.5) if alibi else (),
        ),
        mlp=MLPSpec(
            intermediate_size=config.positive("ffn_hidden_size", 4 * hidden),
            activation=config_fields.activation(config, "activation", "gelu"),
            gated=False,
            bias=bias,
        ),
        input_norm=norm,
        mlp_norm=norm if two_norms or not parallel else None,
        parallel=parallel,
    )
    members = {
        "self_attn.q_proj": slice(0, -2),
        "self_attn.k_proj": slice(-2, -1),
        "self_attn.v_proj": slice(-1, None),
    }
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden,
        max_position_embeddings=context,
        layers=(layer,)
        * config.positive(config_fields.stated(config, "num_hidden_layers", "n_layer")),
        final_norm=norm,
        ropes=() if alibi else (config_fields.rope(config, head_dim, context),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, True),
        source=Names(
            layers="transformer.h",
            modules={
                **interleaved(kv_heads, members, head_dim, "self_attention.query_key_value"),
                "self_attn.o_proj": "self_attention.dense",
                "mlp.up_proj": "mlp.dense_h_to_4h",
                "mlp.down_proj": "mlp.dense_4h_to_h",
                "input_norm": "ln_attn" if two_norms else "input_layernorm",
                "mlp_norm": "ln_mlp" if two_norms else "post_attention_layernorm",
            },
            top={
                "model.embed_tokens": "transformer.word_embeddings",
                "model.norm": "transformer.ln_f",
            },
        ),
    )


def _slopes(num_heads: int, factor: float) -> tuple[float, ...]:
    """ALiBi's, rounded to bfloat16, times a factor."""
    return tuple(
        factor * round(slope * 2.0**-exponent * 256) / 256 * 2.0**exponent
        for slope in config_fields.alibi_slopes(num_heads)
        for exponent in (math.frexp(slope)[1],)
    )
