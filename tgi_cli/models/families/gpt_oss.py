"""gpt-oss (https://arxiv.org/abs/2508.10925).

Every other layer has a window, every head a sink. Experts have biases and an activation of their
own; checkpoints have all of a layer's in one tensor, gates and ups in turns, in four bits as
published; GGUF files have them apart.
"""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoESpec, NormSpec
from tgi_cli.models.weight_map import PRE_NORMS, Names, Source, pick

NAMES = Names(modules=PRE_NORMS)

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What an absent ``rope_parameters`` means."""

_ROWS = {"gate_proj": itemgetter(slice(0, None, 2)), "up_proj": itemgetter(slice(1, None, 2))}
"""Outputs of gate_up_proj, of which they are the even and the odd ones."""


def read(config: ModelConfig) -> DecoderSpec:
    """https://huggingface.co/docs/transformers/main/en/model_doc/gpt_oss"""
    for key, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if (given := config.get(key, float, value)) != value:
            raise UnsupportedModelError(f"{key} {given} is not supported, only {value}")
    num_heads, num_kv_heads, head_dim = config_fields.heads(config, 8)
    context = config.positive("max_position_embeddings", 131072)
    num_layers = config.positive("num_hidden_layers")
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    norm = NormSpec(config.get("rms_norm_eps", float, 1e-5))
    bias = config.get("attention_bias", bool, True)
    experts = MoESpec(
        num_experts=config.positive("num_local_experts", 128),
        top_k=config.positive("num_experts_per_tok", 4),
        intermediate_size=config.positive("intermediate_size"),
        activation="clamped_swiglu",
        router="topk_softmax",
        router_bias=True,
        expert_bias=True,
    )
    rope = config_fields.rope_parameters(config, 150000.0)
    if not config.get("rope_parameters", dict, {}) and not config.get("rope_scaling", dict, {}):
        rope = _ROPE | rope
    method = config.get("quantization_config", dict, {}).get("quant_method")
    return DecoderSpec(
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        max_position_embeddings=context,
        layers=tuple(
            LayerSpec(
                mixer=AttentionSpec(
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    bias=bias,
                    output_bias=bias,
                    window=window,
                    sinks=True,
                ),
                mlp=experts,
                input_norm=norm,
                mlp_norm=norm,
            )
            for window in config_fields.windows(config, num_layers, context, 128, kinds)
        ),
        final_norm=norm,
        ropes=(config_fields.rope_spec(config, head_dim, context, rope),),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        source=NAMES if config.is_gguf else partial(_source, method == "mxfp4"),
    )


def _source(quantized: bool, name: str) -> Source:
    layer, experts, rest = name.partition(".experts.")
    if not experts:
        return NAMES(name)
    expert, module, parameter = rest.split(".")
    stored = f"{layer}.experts.{'down_proj' if module == 'down_proj' else 'gate_up_proj'}"
    rows = _ROWS.get(module)
    one = partial(pick, int(expert))
    if parameter == "bias":
        return Source((f"{stored}_bias",), rows, join=one)
    if not quantized:
        return Source((stored,), rows, transposed=True, join=one)
    # Rows are picked before they are unpacked.
    return Source(
        (f"{stored}_blocks", f"{stored}_scales"), join=partial(_unpack, int(expert), rows)
    )


def _unpack(expert: int, rows: Any, blocks: Any, scales: Any) -> Any:
    from tgi_cli.quantization import mxfp4

    blocks, scales = blocks[expert], scales[expert]
    return mxfp4.read(*(map(rows, (blocks, scales)) if rows else (blocks, scales)))
