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
    kind = keys.text("rope.scaling.type")
    factor = keys.real("rope.scaling.factor", 1.0) or 1.0
    if keys.has("rope.scale_linear"):  # of older files
        kind, factor = "linear", keys.real("rope.scale_linear") or 1.0
    original = keys.whole("rope.scaling.original_context_length", context)
    divisors = keys.file.tensors.get("rope_freqs.weight")
    if divisors is not None:  # Llama 3.1's scaling, worked out
        factors = read_numbers(divisors)
        return config | _longrope(factors, factors, original, 1.0)
    long = keys.file.tensors.get("rope_factors_long.weight")
    short = keys.file.tensors.get("rope_factors_short.weight")
    if long is not None and short is not None:
        stated = None
        if keys.has("rope.scaling.attn_factor"):
            stated = keys.real("rope.scaling.attn_factor")
        return config | _longrope(read_numbers(short), read_numbers(long), original, stated)
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
        return config | {"rope_scaling": scaling}
    if kind not in ("", "none", "linear"):
        raise UnsupportedModelError(
            f"{keys.file.path}: rope scaling {kind[:40]!r} without its factors is not supported",
            "download another file of the model",
        )
    return config


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
    """Granite's multipliers of embeddings, scores, residuals and logits."""
    return {
        "attention_multiplier": keys.real("attention.scale", keys.head_dim**-0.5),
        "embedding_multiplier": keys.real("embedding_scale", 1.0),
        "residual_multiplier": keys.real("residual_scale", 1.0),
        "logits_scaling": keys.real("logit_scale", 1.0),
    }


def experts(keys: ArchitectureKeys) -> int:
    """Experts of a layer; 0 without any."""
    return keys.whole("expert_count", 0, 0)


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
    """The type of each layer; without a key, every ``full_every``-th one has no window."""
    stated = keys.file.metadata.get(f"{keys.architecture}.attention.sliding_window_pattern")
    if isinstance(stated, list):
        sliding = [bool(each) for each in stated[: keys.num_layers]]
        if len(sliding) < keys.num_layers:
            raise keys.invalid("its sliding_window_pattern is shorter than its layers")
    else:
        every = stated if type(stated) is int and stated > 0 else full_every
        sliding = [(layer + 1) % every != 0 for layer in range(keys.num_layers)]
    return ["sliding_attention" if each else "full_attention" for each in sliding]
