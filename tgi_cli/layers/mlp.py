"""The gated feed-forward block (https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu

from tgi_cli.layers.base import Build
from tgi_cli.layers.linear import Linear, MergedLinear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): hidden [T, H] -> [T, H]."""

    def __init__(self, build: Build, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        shards = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(build, hidden_size, shards, bias)
        self.down_proj = Linear(build, intermediate_size, hidden_size, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        output: Tensor = self.down_proj(silu(gate).mul_(up))
        return output
