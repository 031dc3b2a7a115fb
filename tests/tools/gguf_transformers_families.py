"""What GGUF files have of miniatures that transformers' modules run, beside what most have.

Names are those of the gguf package; what becomes of tensors is worked out here, as llama.cpp's
scripts do it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from tests.tools.gguf_late_families import Part

ARCHITECTURES = {
    "arcee": gguf.MODEL_ARCH.ARCEE,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "dots1": gguf.MODEL_ARCH.DOTS1,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "glm": gguf.MODEL_ARCH.CHATGLM,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "mistral": gguf.MODEL_ARCH.MISTRAL3,
    "nemotron": gguf.MODEL_ARCH.NEMOTRON,
    "olmo": gguf.MODEL_ARCH.OLMO,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "phi": gguf.MODEL_ARCH.PHI2,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
}
"""By ``model_type``."""

PERMUTED = ("arcee", "ministral3", "mistral", "olmo")
"""Whose rotated pairs are neighbours in files."""

_CORRECTION = "e_score_correction_bias"


def parts_of(
    raw: Mapping[str, Any], name: str, tensor: np.ndarray
) -> list[tuple[str, Part]] | None:
    """Names and parts of a tensor that differs from others' of its name; None of the rest."""
    kind = raw["model_type"]
    if kind not in ARCHITECTURES:
        return None
    if name.endswith(_CORRECTION):  # a row, of ERNIE
        theirs = name.replace("correction_bias", "correction.bias")
        return [(theirs, Part(name, shape=(tensor.size,)))]
    if "_layernorm.norms." in name:
        before, _, _ = name.partition(".norms.")
        return [(f"{before}.weight", Part(name, stacked=True))]
    if kind == "nemotron" and name.endswith("norm.weight"):
        return [(name, Part(name, shift=1.0))]
    return None


def add_keys(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    """The keys of these architectures that others do not have."""
    kind = raw["model_type"]
    if kind == "nemotron":
        writer.add_layer_norm_eps(raw["norm_eps"])
    if kind == "exaone4" and raw["sliding_window"]:
        sliding = [each == "sliding_attention" for each in raw["layer_types"]]
        writer.add_sliding_window_pattern(sliding)
    if kind == "ministral3":
        rope = raw["rope_parameters"]
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    for key, add in (
        ("logit_scale", writer.add_logit_scale),
        ("clip_qkv", writer.add_clamp_kqv),
        ("n_shared_experts", writer.add_expert_shared_count),
        ("moe_num_shared_experts", writer.add_expert_shared_count),
        ("first_k_dense_replace", writer.add_leading_dense_block_count),
        ("moe_layer_start_index", writer.add_leading_dense_block_count),
        ("moe_layer_interval", writer.add_interleave_moe_layer_step),
        ("routed_scaling_factor", writer.add_expert_weights_scale),
        ("norm_topk_prob", writer.add_expert_weights_norm),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
    ):
        if raw.get(key) is not None:
            add(raw[key])
    if kind in ("dots1", "glm4_moe", "minimax_m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
