"""The feed-forward blocks: hidden [T, H] -> [T, H]."""

from __future__ import annotations

from statistics import NormalDist

from torch import Tensor, nn

from tgi_cli.layers import ops
from tgi_cli.layers.base import Build
from tgi_cli.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) (https://arxiv.org/abs/2002.05202).

    ``sparsity`` is the share of gates that are cut to zero, were they distributed normally; all
    others are reduced by as much (Gemma 3n).
    """

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        activation: str = "silu",
        sparsity: float = 0.0,
    ) -> None:
        super().__init__()
        self.shard = build.shard
        self.cutoff = NormalDist().inv_cdf(sparsity) if sparsity else None
        """Threshold of gates, in standard deviations above their mean; lower gates become zero."""
        parts = {
            "gate_proj": Projection(intermediate_size),
            "up_proj": Projection(intermediate_size),
        }
        self.activation = activation
        self.gate_up_proj = ColumnParallelLinear(build, hidden_size, parts, bias)
        self.gate_up_proj.paired = True
        self.down_proj = RowParallelLinear(build, intermediate_size, hidden_size, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(hidden)
        if self.cutoff is None:
            inner = ops.gated(gate_up, self.activation)
        else:
            inner = ops.sparse_gated(gate_up, self.activation, self.cutoff, self.shard)
        output: Tensor = self.down_proj(inner)
        return output


class MLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        activation: str,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = ColumnParallelLinear(
            build, hidden_size, {"": Projection(intermediate_size)}, bias
        )
        self.down_proj = RowParallelLinear(build, intermediate_size, hidden_size, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(ops.activate(self.up_proj(hidden), self.activation))
        return output
