"""Multi-head latent attention: all heads' keys and values are products of one short vector.

DeepSeek V2's (https://arxiv.org/abs/2405.04434, section 2.1). A token is cached as one row, its
latent and a rotated key that all heads share. Heads do not expand the rows: the projection to keys
is applied to queries instead, and that to values to the attended latents (the paper's "absorbed"
form). So prefill and decode compute one formula, and rows are both keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tgi_cli.attention import KVSpec, PagedAttention
from tgi_cli.attention.sparse import attend_chosen
from tgi_cli.device.distributed import ALONE
from tgi_cli.kernels import cpp_library
from tgi_cli.kernels.heads import HeadMatrices, heads_linear
from tgi_cli.layers import ops
from tgi_cli.layers.attention import Rotation
from tgi_cli.layers.base import Build, Loadable, WeightSlot, empty_parameter
from tgi_cli.layers.indexer import Indexer, chooses_some
from tgi_cli.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear
from tgi_cli.layers.norm import RMSNorm

_ROWS = 4
"""Rows of float32 products are padded to a multiple of this: MKL then sums each row independently
of the others. One token of 16 heads, 128 x 512, takes 360 instead of 240 us of one core with it."""


class LatentExpansion(Loadable):
    """The product that makes keys and values of latents (``kv_b_proj``), head by head.

    It is kept in the model's dtype, whatever the checkpoint's: both ways of use need the weight
    as a stack of small matrices.

    Args:
        build: dtype and shard; each has the matrices of its heads.
        num_heads: over all shards.
        rank: rank of latents (R).
        key_dim, value_dim: of a head.
    """

    def __init__(
        self, build: Build, num_heads: int, rank: int, key_dim: int, value_dim: int
    ) -> None:
        super().__init__()
        self.own = build.shard.share(num_heads)
        self.num_heads, self.rank = num_heads, rank
        self.key_dim, self.value_dim = key_dim, value_dim
        heads = self.own.stop - self.own.start
        self.keys = empty_parameter(heads, key_dim, rank, dtype=build.dtype)
        self.values = empty_parameter(heads, rank, value_dim, dtype=build.dtype)
        self.packed_keys: HeadMatrices | None = None
        self.packed_values: HeadMatrices | None = None
        """Matrices for the kernels in C++, which replace the parameters."""

    def slots(self, path: str) -> Iterator[WeightSlot]:
        outputs = self.num_heads * (self.key_dim + self.value_dim)
        yield WeightSlot(f"{path}.weight", (outputs, self.rank), self._fill)

    def _fill(self, weight: Tensor) -> None:
        heads = weight.view(self.num_heads, -1, weight.shape[1])[self.own]
        self.keys.copy_(heads[:, : self.key_dim])
        self.values.copy_(heads[:, self.key_dim :].transpose(1, 2))

    def finish(self) -> None:
        if self.keys.dtype != torch.bfloat16 or self.keys.is_cuda or cpp_library() is None:
            return
        self.packed_keys = HeadMatrices.pack(self.keys.transpose(1, 2))
        self.packed_values = HeadMatrices.pack(self.values.transpose(1, 2))
        self.keys.data = self.values.data = self.keys.new_empty(0)

    @property
    def packed_bytes(self) -> int:
        both = (self.packed_keys, self.packed_values)
        return sum(matrices.nbytes for matrices in both if matrices is not None)

    def absorb(self, query: Tensor) -> Tensor:
        """Project queries for products with latents: [T, heads, key_dim] to [T, heads, R]."""
        if self.packed_keys is not None:
            return heads_linear(query, self.packed_keys)
        return _by_head(query, self.keys)

    def expand(self, attended: Tensor) -> Tensor:
        """Values of attended latents: [T, heads, R] to [T, heads, value_dim]."""
        if self.packed_values is not None:
            return heads_linear(attended, self.packed_values)
        return _by_head(attended, self.values)


class LatentAttention(nn.Module):
    """Multi-head latent attention: hidden [T, H] -> [T, H].

    The rotated dimensions of queries and keys are in pairs half their number apart: of models
    whose pairs are neighbours, the weights' outputs are put in that order as they are loaded.

    Args:
        build: dtype, quantization, shard. Heads are split, latents are the same on each shard.
        layer: index of its KV cache.
        hidden_size: H.
        num_heads: over all shards.
        kv_lora_rank: dimensions of a latent (R).
        qk_nope_head_dim, qk_rope_head_dim: dimensions of a head's queries that are not rotated,
            and that are.
        v_head_dim: width of a head's values.
        q_lora_rank: dimensions of the latent that queries are made of. Default: they are made of
            the hidden state.
        bias: whether the projections to latents have biases.
        output_bias: whether the output projection has a bias.
        scale: factor of the scores. Default: 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim).
        norm_eps: epsilon of the RMS norms of latents.
        indexer: sizes of an :class:`Indexer`, whose cache is the one after ``layer``. It is left
            out if it would choose all tokens of the longest text that is served. It needs
            latents of queries.
    """

    def __init__(
        self,
        build: Build,
        layer: int,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
        norm_eps: float = 1e-6,
        indexer: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.rank, self.key_dim, self.rope_dim = kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim
        head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        whole = Build(build.dtype, build.quantization, ALONE, build.lora, build.max_positions)
        row = {"kv_a_proj_with_mqa": Projection(kv_lora_rank + qk_rope_head_dim)}
        heads = Projection(num_heads * head_dim, num_heads)
        self.q_a_layernorm: RMSNorm | None = None
        if q_lora_rank is None:
            self.kv_a_proj = ColumnParallelLinear(whole, hidden_size, row, bias)
            self.q_proj = ColumnParallelLinear(build, hidden_size, {"": heads}, False)
        else:
            row = {"q_a_proj": Projection(q_lora_rank), **row}
            self.qkv_a_proj = ColumnParallelLinear(whole, hidden_size, row, bias)
            self.q_a_layernorm = RMSNorm(build, q_lora_rank, norm_eps)
            self.q_b_proj = ColumnParallelLinear(build, q_lora_rank, {"": heads}, False)
        self.kv_a_layernorm = RMSNorm(build, kv_lora_rank, norm_eps)
        self.kv_b_proj = LatentExpansion(
            build, num_heads, kv_lora_rank, qk_nope_head_dim, v_head_dim
        )
        self.o_proj = RowParallelLinear(
            build, num_heads * v_head_dim, hidden_size, output_bias, units=num_heads
        )
        self.num_heads = len(self.kv_b_proj.keys)
        self.kv_spec = KVSpec(
            1, kv_lora_rank + qk_rope_head_dim, value_dim=kv_lora_rank, values_in_keys=True
        )
        self.indexer: Indexer | None = None
        if indexer is not None and chooses_some(build, indexer["top_k"]):
            assert q_lora_rank is not None
            self.indexer = Indexer(whole, layer + 1, hidden_size, q_lora_rank, **indexer)

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, attention: PagedAttention
    ) -> Tensor:
        """``rotation`` is None if positions are not rotated."""
        short: Tensor | None = None
        if self.q_a_layernorm is None:
            query, row = self.q_proj(hidden), self.kv_a_proj(hidden)
        else:
            latents = self.qkv_a_proj(hidden)
            short, row = latents.split((self.q_a_layernorm.size, self.rank + self.rope_dim), dim=1)
            short = self.q_a_layernorm(short)
            query = self.q_b_proj(short)
        query = query.view(len(hidden), self.num_heads, -1)
        plain, rotated = query[..., : self.key_dim], query[..., self.key_dim :]
        # The query heads and the shared key are rotated together.
        together = torch.cat((rotated, row[:, None, self.rank :]), dim=1)
        if rotation is not None:
            ops.rotate_(together, *rotation)
        latent = self.kv_a_layernorm(row[:, : self.rank])
        queries = torch.cat((self.kv_b_proj.absorb(plain), together[:, : self.num_heads]), dim=-1)
        keys = torch.cat((latent[:, None], together[:, self.num_heads :]), dim=-1)
        choice = None
        if self.indexer is not None and short is not None:
            choice = self.indexer(hidden, short, rotation, attention)
        kv = (keys, None)
        attended = attend_chosen(attention, self.layer, queries, kv, self.scale, choice)
        output: Tensor = self.o_proj(self.kv_b_proj.expand(attended).flatten(1))
        return output


def _by_head(x: Tensor, weights: Tensor) -> Tensor:
    """x [T, heads, in] times a matrix per head [heads, in, out]: [T, heads, out].

    A token's result does not depend on the other tokens, to the last bit.
    """
    tokens = len(x)
    if x.device.type == "cpu" and x.dtype != torch.bfloat16 and tokens % _ROWS:
        x = pad(x, (0, 0, 0, 0, 0, -tokens % _ROWS))
    return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)[:tokens]
