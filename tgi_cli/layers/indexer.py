"""DeepSeek Sparse Attention's indexer (https://arxiv.org/abs/2512.02556, section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tgi_cli.attention import KVSpec, PagedAttention
from tgi_cli.attention.sparse import ChosenRows, choose_tokens
from tgi_cli.layers import ops
from tgi_cli.layers.attention import Rotation
from tgi_cli.layers.base import Build
from tgi_cli.layers.linear import ReplicatedLinear
from tgi_cli.layers.norm import LayerNorm
from tgi_cli.quantization import Unquantized


def chooses_some(build: Build, limit: int) -> bool:
    """Whether longer texts are served than the number of tokens that are chosen."""
    return build.max_positions is None or build.max_positions > limit


class Indexer(nn.Module):
    """Chooses the tokens that a layer's queries attend to; every shard chooses for itself.

    Args:
        build: dtype, quantization.
        layer: index of its cache of keys.
        hidden_size: width of the layer's hidden states.
        query_rank: width of the layer's latents of queries, from which queries are projected.
        num_heads: number of query heads, which share the one key.
        head_dim: of queries and keys. The leading ones are rotated, in pairs half their number
            apart.
        top_k: how many tokens are chosen.
    """

    def __init__(
        self,
        build: Build,
        layer: int,
        hidden_size: int,
        query_rank: int,
        *,
        num_heads: int,
        head_dim: int,
        top_k: int,
    ) -> None:
        super().__init__()
        self.layer, self.num_heads, self.head_dim, self.top_k = layer, num_heads, head_dim, top_k
        self.scale = (num_heads * head_dim) ** -0.5
        self.wq_b = ReplicatedLinear(build, query_rank, num_heads * head_dim, bias=False)
        self.wk = ReplicatedLinear(build, hidden_size, head_dim, bias=False)
        self.k_norm = LayerNorm(build, head_dim, 1e-6)
        # It weighs the choice, and stays in float32 as a router does.
        exact = Build(torch.float32, Unquantized())
        self.weights_proj = ReplicatedLinear(exact, hidden_size, num_heads, bias=False)
        self.kv_spec = KVSpec(1, head_dim, values_in_keys=True, index=True)

    def forward(
        self,
        hidden: Tensor,
        latents: Tensor,
        rotation: Rotation | None,
        attention: PagedAttention,
    ) -> ChosenRows | None:
        """The choice for the queries of a step, of hidden [T, H] and latents [T, query_rank].

        None if all queries attend to all that they see.
        """
        query = self.wq_b(latents).view(len(hidden), self.num_heads, self.head_dim)
        key = self.k_norm(self.wk(hidden))
        together = torch.cat((query, key[:, None]), dim=1)
        if rotation is not None:
            ops.rotate_(together, *rotation)
        weights = self.weights_proj(hidden.float()) * self.scale
        query, key = together[:, : self.num_heads], together[:, self.num_heads]
        return choose_tokens(attention, self.layer, query, key, weights, self.top_k)
