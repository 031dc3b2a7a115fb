"""Blocks that every family shares: linear, embedding, norm, rotary, attention, mlp."""

from tgi_cli.layers.attention import Attention
from tgi_cli.layers.base import Build, Loadable, WeightSlot
from tgi_cli.layers.embedding import Embedding, LMHead
from tgi_cli.layers.linear import Linear, MergedLinear
from tgi_cli.layers.mlp import GatedMLP
from tgi_cli.layers.norm import RMSNorm
from tgi_cli.layers.rotary import RotaryEmbedding

__all__ = [
    "Attention",
    "Build",
    "Embedding",
    "GatedMLP",
    "LMHead",
    "Linear",
    "Loadable",
    "MergedLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "WeightSlot",
]
