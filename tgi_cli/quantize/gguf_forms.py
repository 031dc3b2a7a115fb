"""What the architectures that can be written as GGUF differ in.

https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.gguf.values import Value

Config = Mapping[str, Any]

_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SANDWICH = _BLOCK | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_FUSED = _BLOCK | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_EXPERTS = _BLOCK | {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.experts.*.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
_MIXTRAL = _BLOCK | {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.*.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.*.w3": "ffn_up_exps",
    "block_sparse_moe.experts.*.w2": "ffn_down_exps",
}


@dataclass(frozen=True, slots=True)
class GGUFForm:
    """How an architecture is written.

    Attributes:
        architecture: llama.cpp's name.
        block: GGUF's names of a layer's modules; ``*`` is an expert, all of which are one tensor.
        pairs_are_neighbours: whether numbers that are rotated together are neighbours in files.
        norms_plus_one: whether norms are stored as one more than their weight.
        keys: those that not all architectures have, without the architecture's name.
        has_windows: whether files of the architecture state sliding windows.
    """

    architecture: str
    block: Mapping[str, str]
    pairs_are_neighbours: bool = False
    norms_plus_one: bool = False
    keys: Callable[[Config], dict[str, Value]] = lambda config: {}
    has_windows: bool = False


def head_dim(config: Config) -> int:
    """Numbers of a head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _softcaps(config: Config) -> dict[str, Value]:
    """Soft caps of Gemma 2. No key has its query scale: the head size, except for the largest."""
    scalar = head_dim(config)
    if config["num_hidden_layers"] in (46, 62):
        scalar = config["hidden_size"] // config["num_attention_heads"]
    if config.get("query_pre_attn_scalar", scalar) != scalar:
        raise UnsupportedModelError(
            f"query_pre_attn_scalar {config['query_pre_attn_scalar']} has no GGUF key"
        )
    found: dict[str, Value] = {}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name):
            found[name] = float(config[name])
    if config.get("sliding_window"):
        found["attention.sliding_window"] = int(config["sliding_window"])
    if types := config.get("layer_types"):
        pattern: list[Any] = [each == "sliding_attention" for each in types]
        found["attention.sliding_window_pattern"] = pattern
    return found


def _gemma3(config: Config) -> dict[str, Value]:
    found = _softcaps(config)
    if "attention.sliding_window_pattern" not in found and config.get("sliding_window_pattern"):
        found["attention.sliding_window_pattern"] = int(config["sliding_window_pattern"])
    local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    theta = local.get("rope_theta") or config.get("rope_local_base_freq")
    return found | ({"rope.freq_base_swa": float(theta)} if theta else {})


def _granite(config: Config) -> dict[str, Value]:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {new: float(config.get(old, 1.0)) for old, new in names.items()}


def _smollm3(config: Config) -> dict[str, Value]:
    rotated = config.get("no_rope_layers") or []
    every = config.get("no_rope_layer_interval", 4)
    usual = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    if (rotated and rotated != usual) or (not rotated and every != 4):
        raise UnsupportedModelError(
            "layers without positions that are not every fourth have no GGUF key"
        )
    return {}


def _phi3(config: Config) -> dict[str, Value]:
    found: dict[str, Value] = {}
    if config.get("sliding_window"):
        found["attention.sliding_window"] = int(config["sliding_window"])
    return found


def _qwen_moe(config: Config) -> dict[str, Value]:
    """Files do not state which layers lack experts, or whether chosen weights add up to 1."""
    third = config["model_type"] == "qwen3_moe"
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UnsupportedModelError("layers without experts between others have no GGUF key")
    if bool(config.get("norm_topk_prob", False)) != third:
        raise UnsupportedModelError("norm_topk_prob has no GGUF key")
    found: dict[str, Value] = {
        "expert_count": int(config.get("num_experts") or config["num_local_experts"]),
        "expert_used_count": int(config["num_experts_per_tok"]),
        "expert_feed_forward_length": int(config["moe_intermediate_size"]),
    }
    if not third:
        shared = int(config["shared_expert_intermediate_size"])
        found["expert_shared_feed_forward_length"] = shared
    return found


def _mixtral(config: Config) -> dict[str, Value]:
    return {
        "expert_count": int(config["num_local_experts"]),
        "expert_used_count": int(config["num_experts_per_tok"]),
    }


_LLAMA = GGUFForm("llama", _BLOCK, pairs_are_neighbours=True)
FORMS = {
    "Gemma2ForCausalLM": GGUFForm(
        "gemma2", _SANDWICH, norms_plus_one=True, keys=_softcaps, has_windows=True
    ),
    "Gemma3ForCausalLM": GGUFForm(
        "gemma3", _SANDWICH, norms_plus_one=True, keys=_gemma3, has_windows=True
    ),
    "GemmaForCausalLM": GGUFForm("gemma", _BLOCK, norms_plus_one=True),
    "GraniteForCausalLM": GGUFForm("granite", _BLOCK, pairs_are_neighbours=True, keys=_granite),
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": GGUFForm("llama", _MIXTRAL, pairs_are_neighbours=True, keys=_mixtral),
    "Olmo2ForCausalLM": GGUFForm("olmo2", _SANDWICH),
    "Phi3ForCausalLM": GGUFForm("phi3", _FUSED, keys=_phi3, has_windows=True),
    "Qwen2ForCausalLM": GGUFForm("qwen2", _BLOCK),
    "Qwen2MoeForCausalLM": GGUFForm("qwen2moe", _EXPERTS, keys=_qwen_moe),
    "Qwen3ForCausalLM": GGUFForm("qwen3", _BLOCK),
    "Qwen3MoeForCausalLM": GGUFForm("qwen3moe", _EXPERTS, keys=_qwen_moe),
    "SeedOssForCausalLM": GGUFForm(
        "seed_oss", _BLOCK | {"post_attention_layernorm": "post_attention_norm"}
    ),
    "SmolLM3ForCausalLM": GGUFForm("smollm3", _BLOCK, pairs_are_neighbours=True, keys=_smollm3),
}
"""Forms by transformers' classes."""
