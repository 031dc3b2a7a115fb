"""GPT-NeoX (https://arxiv.org/abs/2204.06745): Pythia, Dolly, StableLM's first.

Parallel attention and MLP with a norm each, rotary angles for a part of each head, queries, keys
and values of a head side by side in one tensor.
"""

from __future__ import annotations

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec
from tgi_cli.models.weight_map import PRE_NORMS, Names, interleaved


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/gpt_neox"""
    heads, _, head_dim = config_fields.heads(config)
    context = config.positive("max_position_embeddings", 2048)
    rope = config_fields.rope_parameters(config, config.get("rotary_emb_base", float, 10000.0))
    partial = rope.get("partial_rotary_factor", config.get("rotary_pct", float, 0.25))
    norm = NormSpec(config.get("layer_norm_eps", float, 1e-5), "layer")
    bias = config.get("attention_bias", bool, True)
    layer = LayerSpec(
        mixer=AttentionSpec(
            num_heads=heads, num_kv_heads=heads, head_dim=head_dim, bias=bias, output_bias=bias
        ),
        mlp=MLPSpec(
            intermediate_size=config.positive("intermediate_size"),
            activation=config_fields.activation(config, default="gelu"),
            gated=False,
            bias=True,
        ),
        input_norm=norm,
        mlp_norm=norm,
        parallel=config.get("use_parallel_residual", bool, True),
    )
    members = {f"self_attn.{name}_proj": slice(i, i + 1) for i, name in enumerate("qkv")}
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=(layer,) * config.positive("num_hidden_layers"),
        final_norm=norm,
        ropes=(config_fields.rope_spec(config, int(head_dim * float(partial)), context, rope),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=Names(
            layers="gpt_neox.layers",
            modules={
                **interleaved(heads, members, head_dim, "attention.query_key_value"),
                "self_attn.o_proj": "attention.dense",
                "mlp.up_proj": "mlp.dense_h_to_4h",
                "mlp.down_proj": "mlp.dense_4h_to_h",
                **PRE_NORMS,
            },
            top={
                "model.embed_tokens": "gpt_neox.embed_in",
                "model.norm": "gpt_neox.final_layer_norm",
                "lm_head": "embed_out",
            },
        ),
        ignored=(r".*\.attention\.(masked_)?bias", r"embed_out\.weight"),
    )
