"""The attention block: project, rotate, attend over the paged cache, project back."""

from __future__ import annotations

from torch import Tensor, nn

from tgi_cli.attention import PagedAttention
from tgi_cli.layers.base import Build
from tgi_cli.layers.linear import Linear, MergedLinear
from tgi_cli.layers.rotary import rotate_


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention: hidden [T, H] -> [T, H].

    ``bias`` is on all four projections or on none.
    """

    def __init__(
        self,
        build: Build,
        layer: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.heads = [num_heads, num_kv_heads, num_kv_heads]
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.qkv_proj = MergedLinear(
            build,
            hidden_size,
            {
                "q_proj": num_heads * head_dim,
                "k_proj": num_kv_heads * head_dim,
                "v_proj": num_kv_heads * head_dim,
            },
            bias,
        )
        self.o_proj = Linear(build, num_heads * head_dim, hidden_size, bias)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attention: PagedAttention
    ) -> Tensor:
        tokens = hidden.shape[0]
        qkv = self.qkv_proj(hidden).view(tokens, -1, self.head_dim)
        rotate_(qkv[:, : self.heads[0] + self.heads[1]], *rotation)
        query, key, value = qkv.split(self.heads, dim=1)
        attended = attention(self.layer, query, key, value, self.scale)
        output: Tensor = self.o_proj(attended.flatten(1))
        return output
