"""Names of Gemma's models in GGUF files.

https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

from __future__ import annotations

from tgi_cli.gguf.keys import ArchitectureKeys
from tgi_cli.gguf.name_parts import (
    BLOCKS,
    TOP,
    FileModule,
    NameTable,
    norm_less_one,
    with_fused,
)

_SANDWICH = {
    "post_attention_norm": FileModule("post_attention_layernorm"),
    "ffn_norm": FileModule("pre_feedforward_layernorm"),
    "post_ffw_norm": FileModule("post_feedforward_layernorm"),
}
_PER_LAYER = {
    "inp_gate": FileModule("per_layer_input_gate"),
    "proj": FileModule("per_layer_projection"),
    "post_norm": FileModule("post_per_layer_input_norm"),
}
_PER_LAYER_TOP = {
    "per_layer_token_embd": FileModule("model.embed_tokens_per_layer"),
    "per_layer_model_proj": FileModule("model.per_layer_model_projection"),
    "per_layer_proj_norm": FileModule("model.per_layer_projection_norm"),
}
_STREAMS = {
    "altup_correct_coef": FileModule("altup.correction_coefs"),
    "altup_correct_scale": FileModule("altup.correct_output_scale", bare=True),
    "altup_predict_coef": FileModule("altup.prediction_coefs"),
    "altup_router": FileModule("altup.modality_router"),
    "altup_router_norm": FileModule("altup.router_norm"),
    "laurel_l": FileModule("laurel.linear_left"),
    "laurel_r": FileModule("laurel.linear_right"),
    "laurel_post_norm": FileModule("laurel.post_laurel_norm"),
}
_STREAMS_TOP = {
    "altup_proj": FileModule("model.altup_projections.{e}"),
    "altup_unembd_proj": FileModule("model.altup_unembed_projections.{e}"),
}


def gemma_names(keys: ArchitectureKeys) -> NameTable:
    """Norms are stored as what a vector is multiplied with, which is one more than the weight."""
    block = dict(BLOCKS) | ({} if keys.architecture == "gemma" else _SANDWICH)
    top = {name: norm_less_one(name, module) for name, module in TOP.items()}
    block = {name: norm_less_one(name, module) for name, module in block.items()}
    return NameTable(top=top, block=with_fused(keys, block))


def gemma3n_names(keys: ArchitectureKeys) -> NameTable:
    block = dict(BLOCKS) | _SANDWICH | _PER_LAYER | _STREAMS
    return NameTable(top=TOP | _PER_LAYER_TOP | _STREAMS_TOP, block=block)


def gemma4_names(keys: ArchitectureKeys) -> NameTable:
    """Experts run beside an MLP. Newer files have their gate and up projections in one tensor."""
    block = dict(BLOCKS) | _SANDWICH | _PER_LAYER
    block |= {
        "post_ffw_norm_1": FileModule("post_feedforward_layernorm_1"),
        "pre_ffw_norm_2": FileModule("pre_feedforward_layernorm_2"),
        "post_ffw_norm_2": FileModule("post_feedforward_layernorm_2"),
        "layer_output_scale": FileModule("layer_scalar", bare=True),
        "ffn_gate_inp": FileModule("router.proj"),
        "ffn_gate_inp.scale": FileModule("router.scale"),
        "ffn_down_exps.scale": FileModule("router.per_expert_scale"),
    }
    for part in ("gate", "up", "down"):
        block[f"ffn_{part}_exps"] = FileModule(f"mlp.moe.experts.{{e}}.{part}_proj")
    both = "blk.0.ffn_gate_up_exps.weight"
    if keys.has_tensor(both):
        half = keys.shape(both, 2)[1] // 2
        parts = (block["ffn_gate_exps"], half), (block["ffn_up_exps"], half)
        block["ffn_gate_up_exps"] = FileModule(parts=parts)
    return NameTable(top=TOP | _PER_LAYER_TOP, block=block)
