"""The gated short convolution of LFM 2 (https://huggingface.co/LiquidAI)."""

from __future__ import annotations

from torch import Tensor, nn

from tgi_cli.attention import PagedAttention, StateSpec
from tgi_cli.layers.attention import Rotation
from tgi_cli.layers.base import Build
from tgi_cli.layers.conv import CausalConv
from tgi_cli.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear


class ShortConv(nn.Module):
    """C * conv(B * x), where B, C and x are projections: hidden [T, H] -> [T, H].

    Args:
        build: dtype, quantization, shard; each shard has its share of the channels.
        layer: index of its state.
        hidden_size: H, and the convolution's channels.
        kernel: inputs that the convolution sees, the token's own included.
        bias: on the convolution and the projections.
    """

    def __init__(
        self, build: Build, layer: int, hidden_size: int, *, kernel: int, bias: bool = False
    ) -> None:
        super().__init__()
        self.layer = layer
        parts = {name: Projection(hidden_size) for name in ("b_proj", "c_proj", "x_proj")}
        self.in_proj = ColumnParallelLinear(build, hidden_size, parts, bias)
        channels = {"": Projection(hidden_size)}
        self.conv = CausalConv(build, channels, kernel, bias=bias, activation=None)
        self.out_proj = RowParallelLinear(build, hidden_size, hidden_size, bias)
        self.state_spec = StateSpec((self.conv.state,))

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, attention: PagedAttention
    ) -> Tensor:
        assert attention.states is not None
        before, after, x = self.in_proj(hidden).chunk(3, dim=1)
        mixed = self.conv(before * x, attention.states, self.layer)
        output: Tensor = self.out_proj(mixed.mul_(after))
        return output
