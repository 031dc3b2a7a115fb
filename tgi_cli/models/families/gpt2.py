"""GPT-2 (https://openai.com/index/better-language-models) and GPT-BigCode (SantaCoder, StarCoder).

Learned positions, layer norms, a plain MLP; queries, keys and values in one tensor, which GPT-2
stores transposed. GPT-BigCode (https://arxiv.org/abs/2301.03988) shares one key-value head.
"""

from __future__ import annotations

from collections.abc import Mapping

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec
from tgi_cli.models.weight_map import ModuleSource, Names, interleaved, stacked


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/gpt2 and .../gpt_bigcode"""
    big_code = config.architecture == "GPTBigCodeForCausalLM"
    config_fields.refuse(config, "add_cross_attention")
    hidden = config.positive(config_fields.stated(config, "n_embd", "hidden_size"))
    heads = config.positive(config_fields.stated(config, "n_head", "num_attention_heads"))
    if hidden % heads:
        raise config.invalid(f"{heads} heads cannot share a width of {hidden}")
    head_dim = hidden // heads
    multi_query = big_code and config.get("multi_query", bool, True)
    positions = config.positive(
        config_fields.stated(config, "n_positions", "max_position_embeddings")
    )
    norm = NormSpec(config.get("layer_norm_epsilon", float, 1e-5), "layer")
    mlp = MLPSpec(
        intermediate_size=config.positive("n_inner", 4 * hidden),
        activation=config_fields.activation(
            config, "activation_function", "gelu_pytorch_tanh" if big_code else "gelu_new"
        ),
        gated=False,
        bias=True,
    )
    scale = head_dim**-0.5 if config.get("scale_attn_weights", bool, True) else 1.0
    by_layer = config.get("scale_attn_by_inverse_layer_idx", bool, False)
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden,
        max_position_embeddings=positions,
        layers=tuple(
            LayerSpec(
                mixer=AttentionSpec(
                    num_heads=heads,
                    num_kv_heads=1 if multi_query else heads,
                    head_dim=head_dim,
                    rope=None,
                    bias=True,
                    output_bias=True,
                    scale=scale / (index + 1) if by_layer else scale,
                ),
                mlp=mlp,
                input_norm=norm,
                mlp_norm=norm,
            )
            for index in range(
                config.positive(config_fields.stated(config, "n_layer", "num_hidden_layers"))
            )
        ),
        final_norm=norm,
        learned_positions=positions,
        tie_word_embeddings=config.get("tie_word_embeddings", bool, True),
        source=_names(hidden, heads, head_dim, multi_query, transposed=not big_code),
        ignored=(r".*\.attn\.(masked_)?bias",),
    )


def _names(hidden: int, heads: int, head_dim: int, multi_query: bool, transposed: bool) -> Names:
    packed: Mapping[str, ModuleSource]
    if multi_query or transposed:
        kv = head_dim if multi_query else hidden
        sizes = {"self_attn.q_proj": hidden, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        packed = stacked(sizes, "attn.c_attn", transposed)
    else:
        members = {f"self_attn.{name}_proj": slice(i, i + 1) for i, name in enumerate("qkv")}
        packed = interleaved(heads, members, head_dim, "attn.c_attn")
    return Names(
        layers="transformer.h",
        modules={
            **packed,
            "self_attn.o_proj": ModuleSource("attn.c_proj", transposed=transposed),
            "mlp.up_proj": ModuleSource("mlp.c_fc", transposed=transposed),
            "mlp.down_proj": ModuleSource("mlp.c_proj", transposed=transposed),
            "input_norm": "ln_1",
            "mlp_norm": "ln_2",
        },
        top={
            "model.embed_tokens": "transformer.wte",
            "model.embed_positions": "transformer.wpe",
            "model.norm": "transformer.ln_f",
        },
    )
