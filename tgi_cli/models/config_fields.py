"""Readers of config.json that families share: heads, windows, rotary parameters. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models.config import ModelConfig, shown
from tgi_cli.models.spec import AttentionSpec, MLPSpec, RopeSpec

ACTIVATIONS = (
    "silu",
    "swish",
    "relu",
    "relu2",
    "tanh",
    "quick_gelu",
    "gelu",
    "gelu_new",
    "gelu_fast",
    "gelu_pytorch_tanh",
)
"""Activations that :mod:`tgi_cli.layers.ops` implements."""


def filled(config: ModelConfig, defaults: Mapping[str, Any]) -> ModelConfig:
    """``config`` with defaults for absent keys; null values stay."""
    return replace(config, raw={**defaults, **config.raw})


def refuse(config: ModelConfig, *keys: str) -> None:
    """Raises UnsupportedModelError if one of these options is on."""
    for key in keys:
        if config.raw.get(key):
            raise UnsupportedModelError(f"{key} is not supported for {config.architecture}")


def only(config: ModelConfig, key: str, *values: str) -> None:
    """Raises UnsupportedModelError unless an option is one of ``values``, the first by default."""
    value = config.get(key, str, values[0])
    if value not in values:
        raise UnsupportedModelError(
            f"{key} {shown(value)} is not supported for {config.architecture}",
            f"supported: {', '.join(values)}",
        )


def factor(config: ModelConfig, key: str) -> float | None:
    """A number above 0, or None if it is null or absent. Raises ModelError."""
    if config.raw.get(key) is None:
        return None
    value = config.get(key, float)
    if value <= 0:
        raise config.invalid(f"{key!r} is {value}, must be positive")
    return value


def inverse_root(config: ModelConfig, key: str) -> float:
    """One over the root of a number, which must be above 0. Raises ModelError."""
    value = config.get(key, float)
    if value <= 0:
        raise config.invalid(f"{key!r} is {value}, must be positive")
    return float(value**-0.5)


def activation(config: ModelConfig, key: str = "hidden_act", default: str = "silu") -> str:
    """The activation that config.json names. Raises UnsupportedModelError."""
    name = config.get(key, str, default)
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"activation {name!r} is not supported for {config.architecture}",
            f"supported: {', '.join(sorted(ACTIVATIONS))}",
        )
    return name


def stated(config: ModelConfig, *keys: str) -> str:
    """The first of ``keys`` that config.json has: older and newer names of one field."""
    return next((key for key in keys if config.raw.get(key) is not None), keys[0])


def heads(config: ModelConfig, num_kv_heads: int | None = None) -> tuple[int, int, int]:
    """Attention heads, key-value heads and head_dim.

    ``num_kv_heads`` is the default for an absent key; None, like a null value, means as many as
    attention heads. The default of ``head_dim`` is the attention heads' share of the width.

    Raises:
        ModelError: they contradict each other.
    """
    hidden_size = config.positive("hidden_size")
    num_heads = config.positive("num_attention_heads")
    if "num_key_value_heads" in config.raw or num_kv_heads is None:
        num_kv_heads = config.positive("num_key_value_heads", num_heads)
    head_dim = config.positive("head_dim", max(hidden_size // num_heads, 1))
    if num_heads % num_kv_heads:
        raise config.invalid(
            f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads"
        )
    return num_heads, num_kv_heads, head_dim


def attention(
    config: ModelConfig, num_kv_heads: int | None = None, **options: Any
) -> AttentionSpec:
    """Attention with the heads that :func:`heads` reads.

    ``attention_bias`` applies to all projections, and is off where it is absent. ``options`` are
    further fields.
    """
    num_heads, num_kv_heads, head_dim = heads(config, num_kv_heads)
    bias = config.get("attention_bias", bool, False)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        bias=bias,
        output_bias=bias,
        **options,
    )


def gated_mlp(config: ModelConfig, size: str = "intermediate_size") -> MLPSpec:
    """A feed-forward block whose width has the key ``size``."""
    return MLPSpec(intermediate_size=config.positive(size), activation=activation(config))


def rope_parameters(config: ModelConfig, theta: float = 10000.0) -> dict[str, Any]:
    """One form for both spellings: transformers 5's, and ``rope_theta`` with ``rope_scaling``.

    ``theta`` is the default of the base.
    """
    parameters = {
        **config.get("rope_parameters", dict, {}),
        **config.get("rope_scaling", dict, {}),
    }
    parameters.setdefault("rope_theta", config.get("rope_theta", float, theta))
    if config.raw.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", config.raw["partial_rotary_factor"])
    if config.raw.get("original_max_position_embeddings") is not None:
        key = "original_max_position_embeddings"
        parameters[key] = config.raw[key]
    return parameters


def rope(config: ModelConfig, head_dim: int, context: int, theta: float = 10000.0) -> RopeSpec:
    """The rotary angles that all layers of a model share."""
    parameters = rope_parameters(config, theta)
    partial = parameters.get("partial_rotary_factor")
    if partial is not None and not 0 < float(partial) <= 1:
        raise config.invalid(f"'partial_rotary_factor' is {shown(partial)}, no share")
    dims = head_dim if partial is None else int(head_dim * float(partial))
    return rope_spec(config, dims, context, parameters)


def ropes_by_kind(
    config: ModelConfig, dims: int, context: int, theta: Mapping[str, float]
) -> tuple[RopeSpec, ...]:
    """The rotary angles of each kind of layer, in the order of ``theta``.

    One form for both spellings: transformers 5's, with parameters per kind, and
    ``rope_scaling``, which is that of full attention. ``theta`` has the defaults of the bases.
    """
    nested = config.get("rope_parameters", dict, {})
    scaling = {"full_attention": config.get("rope_scaling", dict, {})}
    return tuple(
        rope_spec(
            config,
            dims,
            context,
            {"rope_theta": base, **(nested.get(kind) or {}), **scaling.get(kind, {})},
        )
        for kind, base in theta.items()
    )


def on_three_axes(config: ModelConfig, sections: Sequence[int], interleaved: bool) -> ModelConfig:
    """``config`` with rotary positions on three axes; ``sections`` are the default of their sizes.

    See :class:`tgi_cli.layers.RotaryEmbedding`.
    """
    stated = {
        **config.get("rope_parameters", dict, {}),
        **config.get("rope_scaling", dict, {}),
    }
    axes = {"mrope_section": list(sections), **stated, "mrope_interleaved": interleaved}
    return replace(config, raw=config.raw | {"rope_parameters": axes, "rope_scaling": None})


def rope_spec(config: ModelConfig, dims: int, context: int, parameters: dict[str, Any]) -> RopeSpec:
    """Raises ModelError for an odd number of dimensions: they are rotated in pairs."""
    if dims % 2 or dims <= 0:
        raise config.invalid(f"rotary embedding needs an even head_dim, not {dims}")
    return RopeSpec(dims, context, parameters)


def windows(
    config: ModelConfig,
    num_layers: int,
    context: int,
    default: int | None = None,
    kinds: list[str] | None = None,
) -> tuple[int | None, ...]:
    """The window of each layer: positions that a token sees, its own included, or None for all.

    Args:
        config: has ``sliding_window`` and perhaps ``layer_types``.
        num_layers: number of layers of the model.
        context: windows of at least this length count as none.
        default: the meaning of an absent ``sliding_window``. (A null switches windows off.)
        kinds: the meaning of absent ``layer_types``. Default: all sliding.
    """
    width = window(config, context, default)
    kinds = layer_kinds(config, kinds or ["sliding_attention"] * num_layers)
    return tuple(width if kind == "sliding_attention" else None for kind in kinds)


def window(config: ModelConfig, context: int, default: int | None = None) -> int | None:
    """The window of layers that have one; see :func:`windows`."""
    if config.raw.get("sliding_window", default) is None:
        return None
    width = config.positive("sliding_window", default)
    return width if width < context else None


_OLDER_KINDS = {"attention": "full_attention", "mamba": "linear_attention"}
"""Older names of kinds of layers, as transformers 5 reads them."""


def layer_kinds(
    config: ModelConfig,
    kinds: list[str],
    supported: Sequence[str] = ("full_attention", "sliding_attention"),
    key: str = "layer_types",
) -> list[str]:
    """The type of each layer, one of ``supported``; ``kinds`` is the default.

    Raises:
        UnsupportedModelError: a type that is not supported.
        ModelError: there is not one for each layer.
    """
    num_layers = len(kinds)
    kinds = config.get(key, list, kinds)
    if len(kinds) != num_layers:
        raise config.invalid(f"{key!r} names {len(kinds)} of {num_layers} layers")
    kinds = [_OLDER_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    for kind in kinds:
        if kind not in supported:
            raise UnsupportedModelError(
                f"layer type {shown(kind)} is not supported for {config.architecture}",
                f"supported: {', '.join(supported)}",
            )
    return kinds


def rotated_layers(config: ModelConfig) -> list[bool]:
    """Whether each layer rotates positions.

    The misnamed list of config.json has 1 for layers that do; without one, every fourth does not
    (``no_rope_layer_interval``). Raises ModelError.
    """
    num_layers = config.positive("num_hidden_layers")
    interval = config.positive("no_rope_layer_interval", 4)
    default = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    rotated = (config.get("no_rope_layers", list, default) or default)[:num_layers]
    if len(rotated) != num_layers:
        raise config.invalid(f"'no_rope_layers' names {len(rotated)} of {num_layers} layers")
    return [bool(each) for each in rotated]


def per_layer(
    config: ModelConfig, key: str, num_layers: int, default: list[float] | None
) -> list[float]:
    """Non-negative numbers of each layer; a single number applies to all.

    Raises:
        ModelError: there is none, or not one for each layer.
    """
    stated = config.raw.get(key)
    numbers = default if stated is None else stated
    if not isinstance(numbers, list):
        numbers = [numbers] * num_layers
    if len(numbers) != num_layers or not all(
        isinstance(number, int | float) and number >= 0 for number in numbers
    ):
        raise config.invalid(f"{key!r} is {shown(stated)}, not a number for each layer")
    return numbers


def alibi_slopes(num_heads: int) -> list[float]:
    """ALiBi's bias per position of distance for each head (https://arxiv.org/abs/2108.12409).

    A geometric sequence. If the number of heads is no power of 2, the slopes of the power below it
    and, between them, some of the power above.
    """
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * n / below) for n in range(1, below + 1)]
    between = [2.0 ** (-4.0 * n / below) for n in range(1, 2 * (num_heads - below), 2)]
    return slopes + between
