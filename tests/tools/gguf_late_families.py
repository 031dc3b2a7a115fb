"""Writes what miniatures of newer architectures consist of as GGUF files have it.

Names are those of the gguf package; what becomes of tensors is worked out here, as llama.cpp's
scripts do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v32": gguf.MODEL_ARCH.GLM_DSA,
    "gemma3n_text": gguf.MODEL_ARCH.GEMMA3N,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "glm4_moe_lite": gguf.MODEL_ARCH.DEEPSEEK2,
    "kimi_linear": gguf.MODEL_ARCH.KIMI_LINEAR,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    "youtu": gguf.MODEL_ARCH.DEEPSEEK2,
}
"""By ``model_type``."""

WRITTEN_AS = {"deepseek_v32": "deepseek32"}
"""What the package has no name for yet; the tensors are those of the architecture above."""

_LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_linear", "youtu")


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint, or rows of one, on its way into the file."""

    name: str
    order: np.ndarray | None = None
    transposed: bool = False
    shift: float = 0.0
    stacked: bool = False
    pick: Any = None
    """What is taken of the tensor."""
    columns: np.ndarray | None = None
    logarithm: bool = False
    """Whether it is stored as what the logarithm is of, negated."""
    width: int = 0
    """Columns of a matrix as which a vector is stored."""
    shape: tuple[int, ...] = ()
    """With dimensions of 1, as stored."""

    def apply(self, tensor: np.ndarray) -> np.ndarray:
        numbers = tensor if self.pick is None else tensor[self.pick]
        numbers = numbers.T if self.transposed else numbers
        numbers = numbers.squeeze(1) if numbers.ndim == 3 else numbers
        numbers = numbers if self.order is None else numbers[self.order]
        numbers = numbers if self.columns is None else numbers[:, self.columns]
        numbers = -np.exp(numbers) if self.logarithm else numbers
        numbers = numbers.reshape(-1, self.width) if self.width else numbers
        numbers = numbers.reshape(self.shape) if self.shape else numbers
        return np.ascontiguousarray(numbers + np.float32(self.shift))


def put(out: dict[str, np.ndarray], part: Part, values: np.ndarray, shape: tuple[int, ...]) -> None:
    """Undo :meth:`Part.apply`."""
    values = values - np.float32(part.shift)
    values = np.log(-values) if part.logarithm else values
    if part.columns is not None:
        undone = np.empty_like(values)
        undone[:, part.columns] = values
        values = undone
    if part.order is not None:
        undone = np.empty_like(values)
        undone[part.order] = values
        values = undone
    values = values.T if part.transposed else values
    if part.pick is None:
        out[part.name] = values.reshape(shape)
    else:
        out.setdefault(part.name, np.zeros(shape, np.float32))[part.pick] = values


def parts_of(
    raw: Mapping[str, Any], name: str, tensor: np.ndarray
) -> list[tuple[str, Part]] | None:
    """Names and parts of a tensor of these architectures; None of the others."""
    kind = raw["model_type"]
    if kind not in ARCHITECTURES:
        return None
    if name.endswith("kv_b_proj.weight"):
        return _latent_heads(raw, name)
    own: Callable[..., list[tuple[str, Part]] | None] | None = {
        "gemma3n_text": _of_gemma3n,
        "gemma4_text": _of_gemma4,
        "kimi_linear": _of_kimi_linear,
        "nemotron_h": _of_nemotron,
    }.get(kind)
    found = None if own is None else own(raw, name, tensor)
    if found is not None:
        return found
    if ".experts." in name:
        before, _, rest = name.partition(".experts.")
        return [(f"{before}.experts.{rest.partition('.')[2]}", Part(name, stacked=True))]
    if name.endswith("e_score_correction_bias"):
        return [(name.replace("correction_bias", "correction.bias"), Part(name))]
    return [(name, Part(name))]


def _latent_heads(raw: Mapping[str, Any], name: str) -> list[tuple[str, Part]]:
    """What becomes keys of each head, turned, apart from what becomes values."""
    own, size = raw["qk_nope_head_dim"], raw["qk_nope_head_dim"] + raw["v_head_dim"]
    found = []
    for part, rows in (("k_b_proj", slice(0, own)), ("v_b_proj", slice(own, size))):
        for head in range(raw["num_attention_heads"]):
            pick = slice(head * size + rows.start, head * size + rows.stop)
            one = Part(name, transposed=part == "k_b_proj", stacked=True, pick=pick)
            found.append((name.replace("kv_b_proj", part), one))
    return found


def _of_gemma3n(
    raw: Mapping[str, Any], name: str, tensor: np.ndarray
) -> list[tuple[str, Part]] | None:
    if name.startswith(("model.altup_projections.", "model.altup_unembed_projections.")):
        return [(f"{name.rsplit('.', 2)[0]}.weight", Part(name, stacked=True))]
    if name.endswith("correct_output_scale"):
        return [(f"{name}.weight", Part(name))]
    return None


def _of_gemma4(
    raw: Mapping[str, Any], name: str, tensor: np.ndarray
) -> list[tuple[str, Part]] | None:
    block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith("router.scale"):
        return [(f"{block}.ffn_gate_inp.scale", Part(name))]
    if name.endswith("per_expert_scale"):
        return [(f"{block}.ffn_down_exps.scale", Part(name))]
    if name.endswith("router.proj.weight"):
        return [(f"{block}.ffn_gate_inp.weight", Part(name))]
    if ".experts." in name:
        experts = range(len(tensor))
        return [(f"{name}.weight", Part(name, stacked=True, pick=expert)) for expert in experts]
    if name.endswith("layer_scalar"):
        return [(f"{name}.weight", Part(name))]
    return None


def _of_kimi_linear(
    raw: Mapping[str, Any], name: str, tensor: np.ndarray
) -> list[tuple[str, Part]] | None:
    """Convolutions and decays have four dimensions; a dense layer is not named after experts."""
    if "_conv1d." in name:
        return [(name, Part(name, shape=(1, len(tensor), 1, tensor.shape[-1])))]
    if name.endswith("A_log"):
        return [(name, Part(name, logarithm=True, shape=(1, 1, tensor.size, 1)))]
    if name.endswith("dt_bias"):
        return [(name.replace("dt_bias", "dt_proj.bias"), Part(name))]
    for part in ("gate", "up", "down"):
        if name.endswith(f".block_sparse_moe.{part}_proj.weight"):
            return [(name.replace("block_sparse_moe", "mlp"), Part(name))]
    return None


def _of_nemotron(
    raw: Mapping[str, Any], name: str, tensor: np.ndarray
) -> list[tuple[str, Part]] | None:
    theirs = name.replace("model.", "backbone.", 1) if name.startswith("model.") else name
    if ".mixer.experts." in name:
        layer, _, rest = name.partition(".mixer.experts.")
        module = rest.partition(".")[2]
        stack = f"model.layers.{layer.rsplit('.', 1)[1]}.mlp.experts.{module}"
        return [(stack, Part(name, stacked=True))]
    module = name.rpartition(".mixer.")[2]
    if module in ("A_log", "D"):
        return [(theirs, Part(name, logarithm=module == "A_log", width=1))]
    if module == "norm.weight":
        return [(theirs, Part(name, width=len(tensor) // raw["n_groups"]))]
    theirs = theirs.replace("dt_bias", "dt_proj.bias")
    return [(theirs.replace("correction_bias", "correction.bias"), Part(name))]


def add_keys(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    """The keys of one of these architectures."""
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_context_length(raw.get("max_position_embeddings") or raw["model_max_length"])
    writer.add_layer_norm_rms_eps(raw.get("rms_norm_eps") or raw["layer_norm_epsilon"])
    kind = raw["model_type"]
    if kind == "nemotron_h":
        _add_nemotron(writer, raw)
    elif kind in _LATENT:
        writer.add_block_count(raw["num_hidden_layers"])
        _add_latent(writer, raw)
    else:
        writer.add_block_count(raw["num_hidden_layers"])
        _add_gemma(writer, raw)


def _add_experts(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    writer.add_expert_count(raw["n_routed_experts"])
    writer.add_expert_used_count(raw["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    writer.add_expert_shared_count(raw["n_shared_experts"])
    writer.add_expert_weights_scale(raw["routed_scaling_factor"])
    if raw["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    writer.add_expert_group_count(raw["n_group"])
    writer.add_expert_group_used_count(raw["topk_group"])


def _add_latent(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    writer.add_feed_forward_length(raw["intermediate_size"])
    linear = raw["model_type"] == "kimi_linear"
    full = [int(each == "full_attention") for each in raw["layer_types"]] if linear else 1
    writer.add_head_count_kv(full)
    writer.add_kv_lora_rank(raw["kv_lora_rank"])
    if raw["q_lora_rank"] is not None:
        writer.add_q_lora_rank(raw["q_lora_rank"])
    rotated = raw["qk_rope_head_dim"]
    writer.add_rope_dimension_count(rotated)
    writer.add_key_length(raw["kv_lora_rank"] + rotated)
    writer.add_value_length(raw["kv_lora_rank"])
    writer.add_key_length_mla(raw["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(raw["v_head_dim"])
    if linear:
        writer.add_ssm_conv_kernel(raw["linear_conv_kernel_dim"])
        writer.add_kda_head_dim(raw["linear_head_dim"])
        writer.add_leading_dense_block_count(raw["mlp_layer_types"].count("dense"))
        writer.add_expert_count(raw["num_experts"])
        writer.add_expert_used_count(raw["num_experts_per_token"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
        writer.add_expert_shared_count(raw["num_shared_experts"])
        writer.add_expert_weights_scale(raw["routed_scaling_factor"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        return
    if raw["model_type"] == "deepseek_v32":
        writer.add_indexer_head_count(raw["index_n_heads"])
        writer.add_indexer_key_length(raw["index_head_dim"])
        writer.add_indexer_top_k(raw["index_topk"])
    if raw["model_type"] != "youtu":
        writer.add_leading_dense_block_count(raw.get("first_k_dense_replace", 1))
        _add_experts(writer, raw)
    rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if "yarn" in (rope.get("rope_type"), rope.get("type")):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])


def num_layers(raw: Mapping[str, Any]) -> int:
    if raw["model_type"] == "nemotron_h":
        return len(_nemotron_layers(raw))
    return int(raw.get("num_hidden_layers") or raw["n_layer"])


def _nemotron_layers(raw: Mapping[str, Any]) -> list[str]:
    letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    kinds = raw.get("layers_block_type") or raw.get("layer_types")
    return kinds or [letters[each] for each in raw["hybrid_override_pattern"]]


def _add_nemotron(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    kinds = _nemotron_layers(raw)
    writer.add_block_count(len(kinds))
    sparse = "moe" in kinds
    width = raw["moe_intermediate_size" if sparse else "intermediate_size"]
    writer.add_feed_forward_length([width if each in ("mlp", "moe") else 0 for each in kinds])
    heads = raw["num_key_value_heads"]
    writer.add_head_count_kv([heads if each == "full_attention" else 0 for each in kinds])
    writer.add_key_length(raw["head_dim"])
    writer.add_value_length(raw["head_dim"])
    writer.add_ssm_conv_kernel(raw["conv_kernel"])
    writer.add_ssm_state_size(raw["ssm_state_size"])
    writer.add_ssm_group_count(raw["n_groups"])
    writer.add_ssm_time_step_rank(raw["mamba_num_heads"])
    writer.add_ssm_inner_size(raw["mamba_num_heads"] * raw["mamba_head_dim"])
    if sparse:
        _add_experts(writer, raw)
        writer.add_expert_shared_feed_forward_length(raw["moe_shared_expert_intermediate_size"])
        if raw.get("moe_latent_size"):
            writer.add_moe_latent_size(raw["moe_latent_size"])


def _add_gemma(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    types = raw["layer_types"]
    writer.add_sliding_window(raw["sliding_window"])
    writer.add_sliding_window_pattern([each == "sliding_attention" for each in types])
    writer.add_shared_kv_layers(raw["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(raw["hidden_size_per_layer_input"])
    if raw.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    ropes = raw["rope_parameters"]
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    local = ropes["sliding_attention"]["rope_theta"]
    key = f"{writer.arch}.rope.freq_base_swa"
    writer.add_key_value(key, local, gguf.GGUFValueType.FLOAT32)
    width, heads = raw["intermediate_size"], raw["num_key_value_heads"]
    if raw["model_type"] == "gemma3n_text":
        writer.add_feed_forward_length(width)
        writer.add_head_count_kv(heads)
        writer.add_key_length(raw["head_dim"])
        writer.add_value_length(raw["head_dim"])
        writer.add_altup_active_idx(raw["altup_active_idx"])
        writer.add_altup_num_inputs(raw["altup_num_inputs"])
        normal = NormalDist()
        scales = [normal.inv_cdf(s) if s else -inf for s in raw["activation_sparsity_pattern"]]
        writer.add_activation_sparsity_scale(scales)
        return
    shared = len(types) - raw["num_kv_shared_layers"]
    wide = 2 if raw["use_double_wide_mlp"] else 1
    narrow = [width] * shared
    writer.add_feed_forward_length(narrow + [wide * width] * raw["num_kv_shared_layers"])
    full = raw.get("num_global_key_value_heads") or _of_full_layers(raw, "num_key_value_heads")
    full = full if raw["attention_k_eq_v"] else heads
    dims = raw.get("global_head_dim") or _of_full_layers(raw, "head_dim")
    writer.add_head_count_kv([full if each == "full_attention" else heads for each in types])
    writer.add_key_length(dims)
    writer.add_value_length(dims)
    writer.add_key_length_swa(raw["head_dim"])
    writer.add_value_length_swa(raw["head_dim"])
    writer.add_rope_dimension_count(dims)
    writer.add_rope_dimension_count_swa(raw["head_dim"])
    if raw.get("enable_moe_block"):
        writer.add_expert_count(raw["num_experts"])
        writer.add_expert_used_count(raw["top_k_experts"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])


def _of_full_layers(raw: Mapping[str, Any], key: str) -> int:
    """A size of Gemma 4's layers without a window, which may be stated for each."""
    layer = raw["layer_types"].index("full_attention")
    own = (raw.get("per_layer_config") or {}).get(str(layer), {})
    return int(own.get(key, raw[key]))


def rope_tensors(raw: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Divisors of angles: of Gemma 4, pairs that are not rotated have huge ones."""
    if raw["model_type"] != "gemma4_text":
        return {}
    dims = raw.get("global_head_dim") or _of_full_layers(raw, "head_dim")
    share = raw["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    rotated = int(dims * share / 2)
    factors = np.full(dims // 2, 1e30, np.float32)
    factors[:rotated] = 1
    return {"rope_freqs.weight": factors}
