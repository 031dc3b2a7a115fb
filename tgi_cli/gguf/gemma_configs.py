"""Configurations of Gemma 3n and 4, as GGUF's keys have them.

https://github.com/ggml-org/llama.cpp/blob/master/conversion/gemma.py
"""

from __future__ import annotations

import math

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.gguf.config_parts import Config, experts, layer_types, read_numbers
from tgi_cli.gguf.keys import ArchitectureKeys

_FULL = "full_attention"
_UNROTATED = 1e20
"""Divisors of angles from here on make them 0."""
_LAYERS_WITH_CACHES = 20
"""Of a Gemma 3n whose file does not state how many layers read others' caches."""


def gemma3n(keys: ArchitectureKeys) -> Config:
    """Gemma 3n."""
    sparsity = keys.file.values(f"{keys.architecture}.activation_sparsity_scale", float)
    if len(sparsity) != keys.num_layers:
        raise keys.invalid(f"{len(sparsity)} of {keys.num_layers} layers have a sparsity")
    shared = max(keys.num_layers - _LAYERS_WITH_CACHES, 0)
    return _shape(keys, shared) | {
        "model_type": "gemma3n_text",
        "intermediate_size": keys.wholes("feed_forward_length", keys.num_layers),
        "num_key_value_heads": keys.num_kv_heads,
        "head_dim": keys.head_dim,
        "layer_types": layer_types(keys, 5),
        "rope_theta": keys.real("rope.freq_base", 1e6),
        "rope_local_base_freq": keys.real("rope.freq_base_swa", 1e4),
        "altup_num_inputs": keys.whole("altup.num_inputs"),
        "altup_active_idx": keys.whole("altup.active_idx", 0, 0),
        "laurel_rank": keys.shape("blk.0.laurel_l.weight")[0],
        # Stated in standard deviations of a normal distribution, above which gates are kept.
        "activation_sparsity_pattern": [
            round(0.5 * (1 + math.erf(each / math.sqrt(2))), 6) for each in sparsity
        ],
    }


def gemma4(keys: ArchitectureKeys) -> Config:
    """Gemma 4. Heads, and key-value heads, of layers without a window have sizes of their own.

    Raises:
        UnsupportedModelError: other layers than the last ones have wider MLPs, or keys and values
            differ in size.
    """
    for kind in ("", "_swa"):
        dims = keys.whole(f"attention.key_length{kind}")
        if keys.whole(f"attention.value_length{kind}", dims) != dims:
            raise UnsupportedModelError(
                f"{keys.file.path}: heads whose keys and values differ in size are not supported",
                "download another file of the model",
            )
    kinds = layer_types(keys, 6)
    full = kinds.index(_FULL) if _FULL in kinds else 0
    heads = keys.wholes("attention.head_count_kv", keys.num_layers)
    sliding = next((layer for layer, kind in enumerate(kinds) if kind != _FULL), full)
    config = _shape(keys, 0) | {
        "model_type": "gemma4_text",
        "num_key_value_heads": heads[sliding],
        "head_dim": keys.whole("attention.key_length_swa"),
        "global_head_dim": keys.whole("attention.key_length"),
        "layer_types": kinds,
        "attention_k_eq_v": not keys.has_tensor(f"blk.{full}.attn_v.weight"),
        "rope_parameters": _ropes(keys),
        **_widths(keys),
    }
    if heads[full] != heads[sliding]:
        config["num_global_key_value_heads"] = heads[full]
    if not experts(keys):
        return config
    return config | {
        "enable_moe_block": True,
        "num_experts": experts(keys),
        "top_k_experts": keys.whole("expert_used_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
    }


def _shape(keys: ArchitectureKeys, shared: int) -> Config:
    """The fields that both have. ``shared`` layers read others' caches, unless a key states it."""
    config: Config = {
        "hidden_size": keys.whole("embedding_length"),
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": keys.num_heads,
        "max_position_embeddings": keys.whole("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon", 1e-6),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.whole("attention.sliding_window"),
        "num_kv_shared_layers": keys.whole("attention.shared_kv_layers", shared, 0),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 0.0) or None,
        "hidden_size_per_layer_input": keys.whole("embedding_length_per_layer_input", 0, 0),
    }
    if config["hidden_size_per_layer_input"]:
        config["vocab_size_per_layer_input"] = keys.shape("per_layer_token_embd.weight")[0]
    return config


def _widths(keys: ArchitectureKeys) -> Config:
    """Widths of the MLPs: layers that read other layers' caches may have them twice as wide."""
    widths = keys.wholes("feed_forward_length", keys.num_layers)
    shared = keys.whole("attention.shared_kv_layers", 0, 0)
    doubled = widths[-1] == 2 * widths[0]
    narrow = keys.num_layers - shared if doubled else keys.num_layers
    if widths != [widths[0]] * narrow + [2 * widths[0]] * (keys.num_layers - narrow):
        raise UnsupportedModelError(
            f"{keys.file.path}: layers that differ in {keys.architecture}.feed_forward_length are "
            "not supported",
            "serve the model's safetensors",
        )
    return {"intermediate_size": widths[0], "use_double_wide_mlp": doubled}


def _ropes(keys: ArchitectureKeys) -> Config:
    """Angles by types of layers; those without a window rotate only the first pairs."""
    share = 1.0
    if (divisors := keys.file.tensors.get("rope_freqs.weight")) is not None:
        factors = read_numbers(divisors)
        rotated = sum(each < _UNROTATED for each in factors)
        if factors[:rotated] != [1.0] * rotated or not rotated:
            raise keys.invalid("its rope_freqs.weight is not that of a Gemma 4")
        share = rotated / len(factors)
    local: Config = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", 1e4)}
    dims = keys.whole("attention.key_length_swa")
    own = keys.whole("rope.dimension_count_swa", dims)
    if own > dims:
        raise keys.invalid(f"{own} rotated numbers of heads of {dims}")
    if own != dims:
        local["partial_rotary_factor"] = own / dims
    return {
        _FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": share,
            "rope_theta": keys.real("rope.freq_base", 1e6),
        },
        "sliding_attention": local,
    }
