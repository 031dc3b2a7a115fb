"""What models with recurrent states share: readers of config.json, names of weights. No torch."""

from __future__ import annotations

import math

from tgi_cli.models import config_fields
from tgi_cli.models.config import ModelConfig, shown
from tgi_cli.models.config_fields import stated
from tgi_cli.models.spec import ConvSpec, SSMSpec
from tgi_cli.models.weight_map import ModuleSource, stacked


def short_conv(config: ModelConfig, kernel: int) -> ConvSpec:
    """The gated convolutions of LFM; ``kernel`` is the default of ``conv_L_cache``."""
    return ConvSpec(
        kernel=conv_kernel(config, "conv_L_cache", kernel),
        bias=config.get("conv_bias", bool, False),
    )


def short_conv_modules(config: ModelConfig) -> dict[str, ModuleSource]:
    """The projections of gated convolutions, which checkpoints have in one matrix."""
    size = config.positive("hidden_size")
    return stacked({f"conv.{name}_proj": size for name in ("b", "c", "x")}, "conv.in_proj")


def granite_mamba(config: ModelConfig, norm_eps: float) -> SSMSpec:
    """The layers that transformers' Granite 4 and Bamba describe by ``mamba_*``.

    Raises:
        ModelError: the sizes do not go together.
        UnsupportedModelError: an activation that is not SiLU.
    """
    inner = config.positive("mamba_expand", 2) * config.positive("hidden_size")
    num_heads = config.positive("mamba_n_heads", 128)
    stated = config.raw.get("mamba_d_head")
    head_dim = inner // num_heads if stated in (None, "auto") else config.positive("mamba_d_head")
    if num_heads * head_dim != inner:
        raise config.invalid(f"{num_heads} heads of {head_dim} are not {inner} channels")
    smallest, largest = step_limits(config)
    return SSMSpec(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=config.positive("mamba_d_state", 256),
        num_groups=groups(config, "mamba_n_groups", 1, num_heads),
        conv_kernel=conv_kernel(config, "mamba_d_conv", 4),
        conv_bias=config.get("mamba_conv_bias", bool, True),
        bias=config.get("mamba_proj_bias", bool, False),
        activation=silu(config, "hidden_act"),
        norm_eps=norm_eps,
        min_step=smallest,
        max_step=largest,
    )


def nemotron_mamba(config: ModelConfig, norm_eps: float) -> SSMSpec:
    """The layers of Nemotron-H, under its newer and older keys.

    transformers bounds step sizes by ``time_step_min`` in prefill alone, and vLLM not at all. Here
    a token's step size does not depend on how it is computed: it is bounded as in prefill, which
    is how transformers computes a text as a whole.

    Raises:
        ModelError: the sizes do not go together.
        UnsupportedModelError: an activation that is not SiLU.
    """
    num_heads = config.positive("mamba_num_heads", 128)
    smallest = config.get(stated(config, "mamba_dt_min", "time_step_min"), float, 0.001)
    if smallest < 0:
        raise config.invalid(f"'time_step_min' is {smallest}")
    return SSMSpec(
        num_heads=num_heads,
        head_dim=config.positive("mamba_head_dim", 64),
        state_size=config.positive("ssm_state_size", 128),
        num_groups=groups(config, stated(config, "mamba_n_groups", "n_groups"), 8, num_heads),
        conv_kernel=conv_kernel(config, stated(config, "mamba_d_conv", "conv_kernel"), 4),
        conv_bias=config.get(stated(config, "mamba_conv_bias", "use_conv_bias"), bool, True),
        bias=config.get("use_bias", bool, False),
        activation=silu(config, "mamba_hidden_act"),
        norm_eps=norm_eps,
        min_step=smallest,
    )


def groups(config: ModelConfig, key: str, default: int, num_heads: int) -> int:
    """Groups of heads. Raises ModelError if the heads cannot be divided among them."""
    count = config.positive(key, default)
    if num_heads % count:
        raise config.invalid(f"{num_heads} heads cannot be divided among {count} groups")
    return count


def conv_kernel(config: ModelConfig, key: str, default: int) -> int:
    """Inputs of a convolution, from 2 up to 64. Raises ModelError."""
    size = config.positive(key, default)
    if not 2 <= size <= 64:
        raise config.invalid(f"{key!r} is {shown(size)}, not from 2 to 64")
    return size


def silu(config: ModelConfig, key: str) -> str:
    """The activation after a convolution. Raises UnsupportedModelError unless it is SiLU."""
    config_fields.only(config, key, "silu", "swish")
    return "silu"


def step_limits(config: ModelConfig) -> tuple[float, float]:
    """``time_step_limit``: bounds of the step sizes. Raises ModelError."""
    limits = config.raw.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    if not isinstance(limits, list) or len(limits) != 2:
        raise config.invalid(f"'time_step_limit' is {shown(limits)}, not two numbers")
    smallest, largest = (_number(config, each) for each in limits)
    if not 0 <= smallest <= largest:
        raise config.invalid(f"'time_step_limit' is {shown(limits)}, no range")
    return smallest, largest


def _number(config: ModelConfig, value: object) -> float:
    """JSON has no infinity: transformers writes an object, others a word or Python's name."""
    if isinstance(value, dict):
        value = value.get("__float__")
    if isinstance(value, str):
        value = {"Infinity": math.inf, "inf": math.inf}.get(value, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise config.invalid(f"'time_step_limit' has {shown(value)}, not a number")
    return float(value)


def mamba_modules(spec: SSMSpec, path: str) -> dict[str, str | ModuleSource]:
    """The weights of a layer as every published model has them, below ``path``.

    One matrix makes gates, inputs, B, C and steps; one convolution runs over inputs, B and C.
    """
    inner, shared = spec.num_heads * spec.head_dim, spec.num_groups * spec.state_size
    mixed = {"x": inner, "b": shared, "c": shared}
    made = {"z": inner, **mixed, "dt": spec.num_heads}
    plain = ("A_log", "D", "dt_bias", "norm", "out_proj")
    return {
        **stacked({f"mamba.{name}_proj": size for name, size in made.items()}, f"{path}.in_proj"),
        **stacked({f"mamba.conv_{name}": size for name, size in mixed.items()}, f"{path}.conv1d"),
        **{f"mamba.{name}": f"{path}.{name}" for name in plain},
    }
