"""The state space model of Mamba-2 (https://arxiv.org/abs/2405.21060)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tgi_cli.attention import PagedAttention, StateSpec, StateTensor
from tgi_cli.layers import recurrent
from tgi_cli.layers.attention import Rotation
from tgi_cli.layers.base import Build, Loadable, WeightSlot, empty_parameter
from tgi_cli.layers.conv import CausalConv
from tgi_cli.layers.gates import StepSizes, by_rows
from tgi_cli.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear


class Heads(Loadable):
    """The numbers that each head has: ``A_log``, ``D``, ``dt_bias``, in float32.

    Attributes:
        steps: what follows from them.
    """

    steps: StepSizes

    def __init__(self, build: Build, num_heads: int, min_step: float, max_step: float) -> None:
        super().__init__()
        self.bounds = (min_step, max_step)
        self.num_heads = num_heads
        self.own = build.shard.share(num_heads)
        own = self.own.stop - self.own.start
        self.A_log = empty_parameter(own, dtype=torch.float32)
        self.D = empty_parameter(own, dtype=torch.float32)
        self.dt_bias = empty_parameter(own, dtype=torch.float32)

    def slots(self, path: str) -> Iterator[WeightSlot]:
        parent = path.rpartition(".")[0]
        for name in ("A_log", "D", "dt_bias"):
            yield self.slot(f"{parent}.{name}", name, (self.num_heads,), self.own)

    def finish(self) -> None:
        self.steps = StepSizes(self.A_log.exp(), self.dt_bias, self.D, *self.bounds)


class GroupNorm(Loadable):
    """RMS norms of groups of channels, after their gates: norm(x * silu(gate)) * weight.

    x and gate are [T, this shard's channels]. A group that several shards have a part of is summed
    up over them.
    """

    def __init__(
        self, build: Build, size: int, num_groups: int, num_heads: int, eps: float
    ) -> None:
        super().__init__()
        self.size = size
        self.num_groups = num_groups
        self.width = size // num_groups
        self.own = build.shard.share(size, num_heads)
        self.weight = empty_parameter(self.own.stop - self.own.start, dtype=build.dtype)
        self.shard = build.shard
        self.eps = eps

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield self.slot(f"{path}.weight", "weight", (self.size,), self.own)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if x.shape[1] < self.width:
            return self._across_shards(x, gate)
        x, gate = (part.view(len(x), -1, self.width) for part in (x, gate))
        weight = self.weight.view(-1, self.width)
        return recurrent.gated_norm(x, gate, weight, self.eps, gate_first=True).flatten(1)

    def _across_shards(self, x: Tensor, gate: Tensor) -> Tensor:
        gated = by_rows(torch.nn.functional.silu, gate.float()).mul_(x)
        squares = gated.new_zeros(len(x), self.num_groups)
        group = self.own.start // self.width
        squares[:, group] = torch.linalg.vector_norm(gated, dim=-1).square_()
        mean = self.shard.all_reduce(squares)[:, group, None] / self.width
        return gated.mul_(mean.add_(self.eps).rsqrt_()).mul_(self.weight).to(x.dtype)


class SSM(nn.Module):
    """A Mamba-2 layer: hidden [T, H] -> [T, H].

    One projection makes gate, x, B, C and dt; x, B and C pass a causal convolution and an
    activation; the states' outputs are gated, normed, and projected back.

    Args:
        build: dtype, quantization, shard.
        layer: index of its states.
        hidden_size: H.
        num_heads, head_dim: of x and its gate, over all shards; each shard has its share of the
            heads.
        state_size: size of B and C.
        num_groups: heads of a group have the same B and C; several shards have the same group if
            there are fewer groups than shards.
        conv_kernel: inputs that the convolution sees, the token's own included.
        conv_bias: on the convolution.
        bias: on the projections.
        activation: activation of the convolution's outputs.
        norm_eps: epsilon of the norms of the gated outputs, one per group.
        min_step, max_step: bounds of dt.
    """

    def __init__(
        self,
        build: Build,
        layer: int,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        state_size: int,
        num_groups: int,
        conv_kernel: int,
        conv_bias: bool = True,
        bias: bool = False,
        activation: str = "silu",
        norm_eps: float = 1e-5,
        min_step: float = 0.0,
        max_step: float = math.inf,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = head_dim
        self.state_size = state_size
        inner, shared = num_heads * head_dim, num_groups * state_size
        x, b, c = Projection(inner, num_heads), *[Projection(shared, num_groups)] * 2
        parts = {
            "z_proj": x,
            "x_proj": x,
            "b_proj": b,
            "c_proj": c,
            "dt_proj": Projection(num_heads),
        }
        self.in_proj = ColumnParallelLinear(build, hidden_size, parts, bias)
        own = [own.stop - own.start for _, own in self.in_proj.parts.values()]
        self.widths = (own[0], sum(own[1:4]), own[4])
        self.mixed_widths = own[1:4]
        mixed = {"conv_x": x, "conv_b": b, "conv_c": b}
        self.conv1d = CausalConv(build, mixed, conv_kernel, bias=conv_bias, activation=activation)
        self.heads = Heads(build, num_heads, min_step, max_step)
        self.norm = GroupNorm(build, inner, num_groups, num_heads, norm_eps)
        self.out_proj = RowParallelLinear(build, inner, hidden_size, bias, units=num_heads)
        states = StateTensor("recurrent", (own[4], state_size, head_dim), torch.float32)
        self.state_spec = StateSpec((self.conv1d.state, states))

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, attention: PagedAttention
    ) -> Tensor:
        states = attention.states
        assert states is not None
        gate, mixed, dt = self.in_proj(hidden).split(self.widths, dim=1)
        mixed = self.conv1d(mixed, states, self.layer)
        x, b, c = mixed.split(self.mixed_widths, dim=1)
        outputs = recurrent.state_space(
            x.unflatten(1, (-1, self.head_dim)),
            b.unflatten(1, (-1, self.state_size)),
            c.unflatten(1, (-1, self.state_size)),
            dt,
            self.heads.steps,
            states,
            self.layer,
        )
        output: Tensor = self.out_proj(self.norm(outputs.flatten(1), gate))
        return output
