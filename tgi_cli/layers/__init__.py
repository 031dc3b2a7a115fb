"""Blocks that every family shares: linear, embedding, norm, rotary, attention, mlp."""

from tgi_cli.layers.attention import Attention
from tgi_cli.layers.base import Build, Loadable, WeightSlot
from tgi_cli.layers.embedding import Embedding, LMHead, PositionEmbedding
from tgi_cli.layers.linear import (
    ColumnParallelLinear,
    Projection,
    ReplicatedLinear,
    RowParallelLinear,
)
from tgi_cli.layers.mlp import MLP, GatedMLP
from tgi_cli.layers.norm import LayerNorm, RMSNorm, WideRMSNorm
from tgi_cli.layers.rotary import RotaryEmbedding, Temperature
from tgi_cli.layers.streams import AltUp, PerLayerEmbedding, PerLayerInput, Scalar, Streams

__all__ = [
    "MLP",
    "AltUp",
    "Attention",
    "Build",
    "ColumnParallelLinear",
    "Embedding",
    "GatedMLP",
    "LMHead",
    "LayerNorm",
    "Loadable",
    "PerLayerEmbedding",
    "PerLayerInput",
    "PositionEmbedding",
    "Projection",
    "RMSNorm",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "RowParallelLinear",
    "Scalar",
    "Streams",
    "Temperature",
    "WeightSlot",
    "WideRMSNorm",
]
