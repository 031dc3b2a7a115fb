"""Linear attention by the gated delta rule: a matrix per head instead of keys and values.

Gated DeltaNet (https://arxiv.org/abs/2412.06464), as Qwen3-Next and Qwen 3.5 have it, and Kimi
Delta Attention (https://arxiv.org/abs/2510.26692), where each row of a state decays by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from tgi_cli.attention import PagedAttention, StateSpec, StateTensor
from tgi_cli.device.distributed import ALONE
from tgi_cli.layers import recurrent
from tgi_cli.layers.attention import Rotation
from tgi_cli.layers.base import Build, Loadable, WeightSlot, empty_parameter
from tgi_cli.layers.conv import CausalConv
from tgi_cli.layers.gates import DeltaGates
from tgi_cli.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear
from tgi_cli.layers.norm import GatedRMSNorm


class DeltaDecay(Loadable):
    """Computes the decays and gains of this shard's heads from numbers of a token.

    Weights are ``A_log`` [heads] and ``dt_bias`` beside the layer: [heads], or [heads * key_dim]
    with ``key_dim`` decays of each head.
    """

    def __init__(self, build: Build, num_heads: int, key_dim: int, factor: float) -> None:
        super().__init__()
        self.num_heads, self.key_dim = num_heads, key_dim
        self.factor = factor
        self.own = build.shard.share(num_heads)
        heads = self.own.stop - self.own.start
        self.rate = empty_parameter(heads, dtype=torch.float32)
        self.bias = empty_parameter(heads * key_dim, dtype=torch.float32)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        parent = path.rpartition(".")[0]
        own = slice(self.own.start * self.key_dim, self.own.stop * self.key_dim)
        yield WeightSlot(f"{parent}.A_log", (self.num_heads,), self._fill_rate)
        yield self.slot(f"{parent}.dt_bias", "bias", (self.num_heads * self.key_dim,), own)

    def _fill_rate(self, logarithms: Tensor) -> None:
        self.rate.copy_(logarithms[self.own]).exp_()

    @property
    def gates(self) -> DeltaGates:
        """The parameters as the operation takes them."""
        channels = self.key_dim > 1
        return DeltaGates(self.rate, self.bias, channels, factor=self.factor)


class LowRankGates(nn.Module):
    """Numbers for the decay of each key dimension and for the gate: f_b(f_a(x)) and g_b(g_a(x)).

    hidden [T, H] to [T, this shard's keys] and [T, this shard's values].
    """

    def __init__(
        self, build: Build, hidden_size: int, rank: int, keys: Projection, values: Projection
    ) -> None:
        super().__init__()
        self.rank = rank
        parts = {"f_a_proj": Projection(rank), "g_a_proj": Projection(rank)}
        self.a_proj = ColumnParallelLinear(replace(build, shard=ALONE), hidden_size, parts, False)
        self.f_b_proj = ColumnParallelLinear(build, rank, {"": keys}, bias=False)
        self.g_b_proj = ColumnParallelLinear(build, rank, {"": values}, bias=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        decay, gate = self.a_proj(hidden).split(self.rank, 1)
        return self.f_b_proj(decay.contiguous()), self.g_b_proj(gate.contiguous())


class DeltaNet(nn.Module):
    """Gated DeltaNet: hidden [T, H] -> [T, H].

    Queries, keys and values pass a short convolution; each value head then has a state
    [key_dim, value_dim], which :func:`tgi_cli.layers.recurrent.gated_delta` updates; its output is
    normalized and gated.

    Args:
        build: dtype, quantization, shard.
        layer: index of its states.
        hidden_size: H.
        num_key_heads, num_value_heads: over all shards; value heads share key heads evenly. Each
            shard has its share of the heads, and several shards share a key head if there are
            fewer key heads than shards.
        key_dim: of queries and keys.
        value_dim: width of values.
        conv_kernel: taps of the convolution, the token's own included.
        norm_eps: epsilon of the norm of the output.
        gain: factor of the gains; with 2 a state may change its sign.
        gate: activation of the gate after the norm.
        rank: of the products that make a decay for each key dimension, and the gate (Kimi Delta
            Attention). Default: a head has one decay, and the gate is a plain projection.
    """

    def __init__(
        self,
        build: Build,
        layer: int,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_kernel: int,
        *,
        norm_eps: float = 1e-6,
        gain: float = 1.0,
        gate: Literal["silu", "sigmoid"] = "silu",
        rank: int | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.key_dim, self.value_dim = key_dim, value_dim
        keys = Projection(num_key_heads * key_dim, num_key_heads)
        values = Projection(num_value_heads * value_dim, num_value_heads)
        parts = {"q_proj": keys, "k_proj": keys, "v_proj": values}
        # Separate, since quantized checkpoints mostly keep these few outputs unquantized.
        gates = {"b_proj": Projection(num_value_heads)}
        self.low_rank: LowRankGates | None = None
        if rank is None:
            parts["z_proj"] = values
            gates["a_proj"] = Projection(num_value_heads)
        else:
            self.low_rank = LowRankGates(build, hidden_size, rank, keys, values)
        self.qkvz_proj = ColumnParallelLinear(build, hidden_size, parts, bias=False)
        self.ba_proj = ColumnParallelLinear(build, hidden_size, gates, bias=False)
        self.ba_proj.exempt = True
        convs = {"q_conv": keys, "k_conv": keys, "v_conv": values}
        self.conv = CausalConv(build, convs, conv_kernel)
        self.decay = DeltaDecay(build, num_value_heads, 1 if rank is None else key_dim, gain)
        self.norm = GatedRMSNorm(build, value_dim, norm_eps, gate)
        self.out_proj = RowParallelLinear(
            build, num_value_heads * value_dim, hidden_size, bias=False, units=num_value_heads
        )
        # Of queries, keys, values.
        self.widths = [own.stop - own.start for _, own in self.qkvz_proj.parts.values()][:3]
        self.num_heads = self.widths[2] // value_dim
        state = StateTensor("recurrent", (self.num_heads, key_dim, value_dim), torch.float32)
        self.state_spec = StateSpec((self.conv.state, state))

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, attention: PagedAttention
    ) -> Tensor:
        """``rotation`` is not used: the state depends on the order of tokens."""
        states = attention.states
        assert states is not None
        qkvz, ba = self.qkvz_proj(hidden), self.ba_proj(hidden)
        qkv, b = qkvz[:, : sum(self.widths)], ba[:, : self.num_heads]
        if self.low_rank is None:
            a, gate = ba[:, self.num_heads :], qkvz[:, sum(self.widths) :]
        else:
            a, gate = self.low_rank(hidden)
        query, key, value = self.conv(qkv, states, self.layer).split(self.widths, 1)
        keys, values = (-1, self.key_dim), (-1, self.value_dim)
        read = recurrent.gated_delta(
            (query.unflatten(1, keys), key.unflatten(1, keys), value.unflatten(1, values)),
            a,
            b,
            self.decay.gates,
            states,
            self.layer,
        )
        output: Tensor = self.out_proj(self.norm(read, gate.unflatten(1, values)).flatten(1))
        return output
