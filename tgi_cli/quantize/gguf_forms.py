"""What the architectures that can be written as GGUF differ in.

https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.gguf.reader import Value

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


@dataclass(frozen=True, slots=True)
class GGUFForm:
    """How an architecture is written.

    Attributes:
        architecture: llama.cpp's name.
        block: GGUF's names of a layer's modules.
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
    """Of Gemma 2, whose queries are scaled as no key says: by their size, but for the largest."""
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
    return found


def _gemma3(config: Config) -> dict[str, Value]:
    found = _softcaps(config)
    if types := config.get("layer_types"):
        pattern: list[Any] = [each == "sliding_attention" for each in types]
        found["attention.sliding_window_pattern"] = pattern
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
    return {new: float(config[old]) for old, new in names.items() if config.get(old) is not None}


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
    if original := config.get("original_max_position_embeddings"):
        found["rope.scaling.original_context_length"] = int(original)
    return found


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
    "Olmo2ForCausalLM": GGUFForm("olmo2", _SANDWICH),
    "Phi3ForCausalLM": GGUFForm("phi3", _FUSED, keys=_phi3, has_windows=True),
    "Qwen2ForCausalLM": GGUFForm("qwen2", _BLOCK),
    "Qwen3ForCausalLM": GGUFForm("qwen3", _BLOCK),
    "SeedOssForCausalLM": GGUFForm(
        "seed_oss", _BLOCK | {"post_attention_layernorm": "post_attention_norm"}
    ),
    "SmolLM3ForCausalLM": GGUFForm("smollm3", _BLOCK, pairs_are_neighbours=True, keys=_smollm3),
}
"""By transformers' classes."""
