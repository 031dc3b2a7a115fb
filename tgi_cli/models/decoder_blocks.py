"""Builds the blocks of a decoder layer from its spec, and collects the specs of their caches."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from torch import nn

from tgi_cli.attention import KVSpec, StateSpec
from tgi_cli.layers import MLP, Attention, Build, GatedMLP
from tgi_cli.models.spec import (
    ConvSpec,
    DeltaSpec,
    LatentSpec,
    Mixer,
    MLPAndExpertsSpec,
    MLPSpec,
    MoESpec,
    SSMSpec,
)


@dataclass(slots=True)
class Caches:
    """Specs of the layers' caches, in the order of their indices."""

    kv: list[KVSpec] = field(default_factory=list)
    states: list[StateSpec] = field(default_factory=list)
    layers: int = 0
    """Number of layers so far."""


def make_mixer(
    build: Build, spec: Mixer, hidden_size: int, caches: Caches
) -> tuple[str, nn.Module]:
    """The mixer and its name in the layer; what it keeps is added to ``caches``."""
    from tgi_cli.layers.latent import LatentAttention

    arguments = asdict(spec)
    if isinstance(spec, DeltaSpec | SSMSpec | ConvSpec):
        from tgi_cli.layers.delta import DeltaNet
        from tgi_cli.layers.short_conv import ShortConv
        from tgi_cli.layers.ssm import SSM

        kinds: dict[type[Mixer], tuple[str, type[DeltaNet | SSM | ShortConv]]] = {
            DeltaSpec: ("linear_attn", DeltaNet),
            SSMSpec: ("mamba", SSM),
            ConvSpec: ("conv", ShortConv),
        }
        name, recurrent = kinds[type(spec)]
        mixer = recurrent(build, len(caches.states), hidden_size, **arguments)
        caches.states.append(mixer.state_spec)
        return name, mixer
    del arguments["rope"]
    cache = arguments.pop("cache", None)
    if cache is not None:
        return "self_attn", Attention(build, cache, hidden_size, **arguments, shared=True)
    kind = LatentAttention if isinstance(spec, LatentSpec) else Attention
    attention = kind(build, len(caches.kv), hidden_size, **arguments)
    caches.kv.append(attention.kv_spec)
    if isinstance(attention, LatentAttention) and attention.indexer is not None:
        caches.kv.append(attention.indexer.kv_spec)
    return "self_attn", attention


def make_mlp(
    build: Build, spec: MLPSpec | MoESpec | MLPAndExpertsSpec, hidden_size: int
) -> nn.Module:
    """A feed-forward block, or a mixture of experts."""
    if isinstance(spec, MLPAndExpertsSpec):
        from tgi_cli.layers.moe import MLPAndExperts, MoE

        dense = make_mlp(build, spec.dense, hidden_size)
        experts = MoE(build, hidden_size, **asdict(spec.experts))
        return MLPAndExperts(build, hidden_size, dense, experts, spec.eps)
    if isinstance(spec, MoESpec):
        from tgi_cli.layers.moe import MoE

        moe: nn.Module = MoE(build, hidden_size, **asdict(spec))
        return moe
    size, bias, activation = spec.intermediate_size, spec.bias, spec.activation
    if spec.gated:
        return GatedMLP(build, hidden_size, size, bias, activation, spec.sparsity)
    return MLP(build, hidden_size, size, bias, activation)
