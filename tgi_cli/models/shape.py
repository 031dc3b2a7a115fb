"""The shape of a decoder, as config.json states it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tgi_cli.errors import ModelError, UnsupportedModelError
from tgi_cli.models.config import ModelConfig

_WINDOWED = ("mistral", "ministral")
"""Model types with sliding windows, and without biases."""

_WINDOWED_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
"""Where transformers' classes for them differ from LlamaConfig in what an absent key means."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and options of a Llama-like decoder. Field names follow config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    rope_parameters: dict[str, Any]
    """``rope_theta``, ``rope_type`` and what that kind takes, as transformers 5 writes it."""
    windows: tuple[int | None, ...]
    """Of each layer: how many positions a token sees, its own included; None: all before it."""

    @classmethod
    def read(cls, config: ModelConfig) -> DecoderShape:
        """Read the shape; absent keys mean what they mean to transformers.

        Raises:
            ModelError: a value is missing or cannot be.
            UnsupportedModelError: an option that is not implemented; the message names it.
        """
        windowed = config.get("model_type", str, "") in _WINDOWED
        defaults = _WINDOWED_DEFAULTS if windowed else {}
        hidden_size = config.positive("hidden_size")
        heads = config.positive("num_attention_heads")
        kv_heads = config.positive(
            "num_key_value_heads", defaults.get("num_key_value_heads", heads)
        )
        head_dim = config.positive("head_dim", max(hidden_size // heads, 1))
        if heads % kv_heads:
            raise ModelError(
                f"{config.path / 'config.json'}: {heads} attention heads cannot share "
                f"{kv_heads} key-value heads"
            )
        if head_dim % 2:
            raise ModelError(
                f"{config.path / 'config.json'}: rotary embedding needs an even head_dim, "
                f"not {head_dim}"
            )
        activation = config.get("hidden_act", str, "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedModelError(
                f"activation {activation!r} is not supported for {config.architecture}"
            )
        context = config.positive(
            "max_position_embeddings", defaults.get("max_position_embeddings", 2048)
        )
        layers = config.positive("num_hidden_layers")
        return cls(
            vocab_size=config.positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=config.positive("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=context,
            rms_norm_eps=config.get("rms_norm_eps", float, 1e-6),
            attention_bias=not windowed and config.get("attention_bias", bool, False),
            mlp_bias=not windowed and config.get("mlp_bias", bool, False),
            tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
            rope_parameters=_rope_parameters(config),
            windows=_windows(config, layers, context, defaults.get("sliding_window")),
        )


def _windows(
    config: ModelConfig, layers: int, context: int, default: int | None
) -> tuple[int | None, ...]:
    """The window of each layer; ``default`` is what an absent one means (None: there is none).

    https://huggingface.co/docs/transformers/main/en/model_doc/mistral
    """
    if default is None:
        return (None,) * layers
    stated = config.raw.get("sliding_window", default)
    # The null that switches windows off is not the absence that means the default.
    window = None if stated is None else config.positive("sliding_window", default)
    if window is not None and window >= context:
        window = None
    kinds = config.get("layer_types", list, ["sliding_attention"] * layers)
    if len(kinds) != layers:
        raise ModelError(
            f"{config.path / 'config.json'}: 'layer_types' names {len(kinds)} of {layers} layers"
        )
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise UnsupportedModelError(
                f"layer type {kind!r} is not supported for {config.architecture}",
                "supported: full_attention, sliding_attention",
            )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """One form for both spellings: transformers 5's, and ``rope_theta`` with ``rope_scaling``."""
    parameters = {
        **config.get("rope_parameters", dict, {}),
        **config.get("rope_scaling", dict, {}),
    }
    parameters.setdefault("rope_theta", config.get("rope_theta", float, 10000.0))
    if "original_max_position_embeddings" in config.raw:
        parameters["original_max_position_embeddings"] = config.raw[
            "original_max_position_embeddings"
        ]
    partial = parameters.get("partial_rotary_factor", config.raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(
            f"partial_rotary_factor {partial} is not supported for {config.architecture}"
        )
    return parameters
