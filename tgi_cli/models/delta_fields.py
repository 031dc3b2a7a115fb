"""Readers of config.json for families with the gated delta rule. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.models.config import ModelConfig
from tgi_cli.models.spec import DeltaSpec
from tgi_cli.models.weight_map import ModuleSource, Source, stacked

_MOST_TAPS = 64
"""Limit of a convolution; published models have 4."""


def delta_spec(config: ModelConfig, norm_eps: float, **options: Any) -> DeltaSpec:
    """The layers that ``linear_*`` keys describe, as transformers spells them.

    ``options`` are further fields of the specification.

    Raises:
        UnsupportedModelError: another activation than SiLU.
        ModelError: numbers contradict each other.
    """
    activation = config.get("hidden_act", str, "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"activation {activation!r} is not supported for {config.architecture}",
            "supported: silu",
        )
    key_heads = config.positive("linear_num_key_heads")
    value_heads = config.positive("linear_num_value_heads")
    if value_heads % key_heads:
        raise config.invalid(f"{value_heads} value heads cannot share {key_heads} key heads")
    size = config.positive("linear_conv_kernel_dim")
    if not 1 < size <= _MOST_TAPS:
        raise config.invalid(f"'linear_conv_kernel_dim' is {size}, not 2 to {_MOST_TAPS}")
    return DeltaSpec(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=config.positive("linear_key_head_dim"),
        value_dim=config.positive("linear_value_head_dim"),
        conv_kernel=size,
        norm_eps=norm_eps,
        **options,
    )


def stacked_qkv(delta: DeltaSpec, kind: str, name: str) -> dict[str, ModuleSource]:
    """Queries', keys' and values' modules (``proj`` or ``conv``) whose outputs are in ``name``."""
    keys = delta.num_key_heads * delta.key_dim
    sizes = {"q": keys, "k": keys, "v": delta.num_value_heads * delta.value_dim}
    return stacked({f"linear_attn.{part}_{kind}": size for part, size in sizes.items()}, name)


@dataclass(frozen=True, slots=True)
class SeparateConvs:
    """Names of a checkpoint with a tensor for each of the convolutions of a layer.

    They are joined before they are taken apart: transformers 5 divides what it writes evenly, even
    where keys and values are of different sizes.

    Attributes:
        names: names of everything else.
        delta: the layers' sizes.
        module: the mixer's name in the checkpoint, within a layer.
    """

    names: Callable[[str], Source]
    delta: DeltaSpec
    module: str = "linear_attn"

    def __call__(self, name: str) -> Source:
        """The source of the model's tensor ``name``."""
        layer, found, conv = name.partition(".linear_attn.")
        if not found or not conv.endswith("_conv.weight"):
            return self.names(name)
        part = stacked_qkv(self.delta, "conv", "")[f"linear_attn.{conv.removesuffix('.weight')}"]
        stored = (self.names(f"{layer}.{self.module}.{each}_conv1d.weight") for each in "qkv")
        return Source(tuple(each.names[0] for each in stored), part.rows, join=_joined)


def _joined(*parts: Any) -> Any:
    import torch

    return torch.cat(parts)
