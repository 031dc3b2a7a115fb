"""Parts of config.json that most architectures of GGUF files share: sizes, rotary angles, experts.

https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

from __future__ import annotations

import array
import math
import sys
from typing import Any

from tgi_cli.errors import CorruptFileError, UnsupportedModelError
from tgi_cli.gguf.keys import ArchitectureKeys
from tgi_cli.gguf.reader import GGUFTensor

Config = dict[str, Any]
"""A part of config.json."""

SOFTMAX, SIGMOID = 1, 2
"""Values of ``expert_gating_func``."""

_MOST_FACTORS = 1 << 12
"""Limit of a tensor that is read into config.json: rotary factors, one per pair of a head."""


def llama_shape(keys: ArchitectureKeys) -> Config:
    """The fields that most architectures share, by Llama's names."""
    if keys.has("feed_forward_length") or not experts(keys):
        width = max(keys.wholes("feed_forward_length", keys.num_layers))
    else:
        width = expert_size(keys)  # no layer has a single block
    return {
        "hidden_size": keys.whole("embedding_length"),
        "intermediate_size": width,
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": keys.num_heads,
        "num_key_value_heads": keys.num_kv_heads,
        "head_dim": keys.head_dim,
        "max_position_embeddings": keys.whole("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon", 1e-6),
        **rope_fields(keys),
    }


def rope_fields(keys: ArchitectureKeys) -> Config:
    """``rope_theta``, and ``rope_scaling`` if there is any."""
    config: Config = {"rope_theta": keys.real("rope.freq_base", 10000.0)}
    context = keys.whole("context_length")
    kind, factor = _rope_scaling(keys)
    magnitude = None
    if keys.has("rope.scaling.attn_factor"):
        magnitude = keys.real("rope.scaling.attn_factor")
    original = keys.whole("rope.scaling.original_context_length", context)
    divisors = keys.file.tensors.get("rope_freqs.weight")
    if divisors is not None and kind in ("none", "linear"):  # Llama 3.1's scaling, worked out
        factors = [factor * each for each in read_numbers(divisors)]
        return config | _longrope(factors, factors, original, magnitude or 1.0)
    long = keys.file.tensors.get("rope_factors_long.weight")
    short = keys.file.tensors.get("rope_factors_short.weight")
    if long is not None and short is not None:
        return config | _longrope(read_numbers(short), read_numbers(long), original, magnitude)
    if divisors is not None or (kind != "yarn" and magnitude not in (None, 1.0)):
        other = "rope.scaling.attn_factor" if divisors is None else "rope_freqs.weight"
        raise UnsupportedModelError(
            f"{keys.file.path}: rope scaling {kind[:40]!r} together with {other} is not supported",
            "download another file of the model",
        )
    if kind == "linear" and factor != 1.0:
        return config | {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        scaling: Config = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        for name, key in (
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
            ("attention_factor", "yarn_attn_factor"),
        ):
            if keys.has(f"rope.scaling.{key}"):
                scaling[name] = keys.real(f"rope.scaling.{key}")
        if magnitude is not None:  # a factor of YaRN's own
            own = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
            scaling["attention_factor"] = scaling.get("attention_factor", own) * magnitude
        return config | {"rope_scaling": scaling}
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(
            f"{keys.file.path}: rope scaling {kind[:40]!r} without its factors is not supported",
            "download another file of the model",
        )
    return config


def _rope_scaling(keys: ArchitectureKeys) -> tuple[str, float]:
    """The kind of scaling, and its factor. As in llama.cpp, a factor alone is a linear one."""
    kind = keys.text("rope.scaling.type") or "linear"
    names = ("rope.scaling.factor", "rope.scale_linear")  # the second is of older files
    name = next(filter(keys.has, names), None)
    factor = 1.0 if name is None or kind == "none" else keys.real(name)
    return kind, factor or 1.0


def _longrope(
    short: list[float], long: list[float], original: int, magnitude: float | None
) -> Config:
    scaling: Config = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    if magnitude is not None:
        scaling["attention_factor"] = magnitude
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def read_numbers(tensor: GGUFTensor) -> list[float]:
    """The numbers of a small tensor in float32, all above 0.

    Raises:
        UnsupportedModelError: it is large, or of another type.
        CorruptFileError: a number is not above 0, or not finite.
        OSError: the file cannot be read.
    """
    if tensor.type.name != "F32" or tensor.elements > _MOST_FACTORS:
        raise UnsupportedModelError(
            f"{tensor.file}: {tensor.name} is {tensor.type.name} {list(tensor.shape)}",
            "download another file of the model",
        )
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        numbers = array.array("f", stream.read(tensor.size))
    if sys.byteorder == "big":
        numbers.byteswap()
    if not all(0 < each < math.inf for each in numbers):
        raise CorruptFileError(
            f"{tensor.file} cannot be read: {tensor.name} has numbers that are not above 0",
            "download another file of the model",
        )
    return numbers.tolist()


def partial_rotary(keys: ArchitectureKeys) -> Config:
    """The share of a head that is rotated, if it is not all of it."""
    rotated = keys.whole("rope.dimension_count", keys.head_dim)
    return {} if rotated == keys.head_dim else {"partial_rotary_factor": rotated / keys.head_dim}


def is_bamba(keys: ArchitectureKeys) -> bool:
    """Whether a file of Granite 4's architecture has Bamba, whose heads are rotated in part."""
    return keys.flag("rope.scaling.finetuned", True) and bool(partial_rotary(keys))


def granite_factors(keys: ArchitectureKeys) -> Config:
    """Granite's multipliers of embeddings, scores, residuals and logits. 0 stands for the default,
    as in llama.cpp."""
    return {
        "attention_multiplier": keys.real("attention.scale", 0.0) or keys.head_dim**-0.5,
        "embedding_multiplier": keys.real("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": keys.real("residual_scale", 0.0) or 1.0,
        "logits_scaling": keys.real("logit_scale", 0.0) or 1.0,
    }


def experts(keys: ArchitectureKeys) -> int:
    """Experts of a layer; 0 without any."""
    return keys.whole("expert_count", 0, 0)


def expert_scale(keys: ArchitectureKeys) -> float:
    """The factor of what chosen experts add; 0 stands for none, as in llama.cpp."""
    return keys.real("expert_weights_scale", 0.0) or 1.0


def require_sigmoids(keys: ArchitectureKeys) -> None:
    """Refuse experts that are not chosen by sigmoids of their scores.

    Raises:
        UnsupportedModelError: the file names another function.
    """
    if (function := keys.whole("expert_gating_func", SIGMOID)) != SIGMOID:
        raise gating_error(keys, function)


def gating_error(keys: ArchitectureKeys, function: int) -> UnsupportedModelError:
    """The error of a function that is not supported."""
    return UnsupportedModelError(
        f"{keys.file.path}: experts that are chosen by function {function} are not supported",
        "serve the model's safetensors",
    )


def expert_size(keys: ArchitectureKeys) -> int:
    """Width of an expert, which older files state in their tensors alone."""
    if keys.has("expert_feed_forward_length"):
        return keys.whole("expert_feed_forward_length")
    return keys.shape("blk.0.ffn_down_exps.weight")[-1]


def shared_expert_size(keys: ArchitectureKeys) -> int:
    """Width of the expert that every token passes."""
    if keys.has("expert_shared_feed_forward_length"):
        return keys.whole("expert_shared_feed_forward_length")
    return keys.shape("blk.0.ffn_down_shexp.weight")[-1]


def layer_types(keys: ArchitectureKeys, full_every: int) -> list[str]:
    """The type of each layer.

    The key lists which layers have a window, or is the number of layers of which the last has
    none; 0 if all have one. Without the key, it is ``full_every``.
    """
    sliding = keys.flags("attention.sliding_window_pattern")
    if sliding is None:
        every = keys.whole("attention.sliding_window_pattern", full_every, 0)
        sliding = [not every or (layer + 1) % every != 0 for layer in range(keys.num_layers)]
    return ["sliding_attention" if each else "full_attention" for each in sliding]
