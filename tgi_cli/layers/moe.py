"""Mixture of experts: a router chooses a few of many feed-forward blocks for each token.

After "Outrageously Large Neural Networks" (https://arxiv.org/abs/1701.06538) and Mixtral
(https://arxiv.org/abs/2401.04088); the shared expert is Qwen2-MoE's
(https://huggingface.co/docs/transformers/main/en/model_doc/qwen2_moe).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tgi_cli.device.distributed import Shard
from tgi_cli.layers import ops
from tgi_cli.layers.base import Build, Loadable
from tgi_cli.layers.grouped import Groups, grouped_linear
from tgi_cli.layers.linear import (
    ColumnParallelLinear,
    Projection,
    ReplicatedLinear,
    RowParallelLinear,
)
from tgi_cli.layers.mlp import MLP, GatedMLP
from tgi_cli.layers.norm import RMSNorm, UnitRMSNorm
from tgi_cli.layers.routing import Router, Routing, route
from tgi_cli.layers.streams import Vector
from tgi_cli.quantization import Unquantized

CLAMPED_SWIGLU = "clamped_swiglu"
"""The activation of gpt-oss, see :func:`clamped_swiglu`."""


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1) of [T, 2 I], gate first: [T, I].

    Gates are cut at 7 above, ups at 7 on both sides.
    https://huggingface.co/docs/transformers/main/en/model_doc/gpt_oss
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return torch.sigmoid(gate * 1.702).mul_(gate).mul_(up.add_(1.0))


class _Stackable(Loadable):
    """A layer whose memory may be part of a stack of layers."""

    allocate: Callable[[torch.device], None] | None = None
    """Gives the parameters memory, or leaves it to the layer."""

    def materialize(self, device: torch.device) -> None:
        if self.allocate is not None:
            self.allocate(device)
        if any(parameter.is_meta for parameter in self.parameters(recurse=False)):
            super().materialize(device)


class _GateUp(_Stackable, ColumnParallelLinear):
    pass


class _Down(_Stackable, RowParallelLinear):
    pass


class Expert(nn.Module):
    """One feed-forward block: [n, H] to this shard's summand of [n, H]."""

    def __init__(
        self, build: Build, hidden_size: int, size: int, bias: bool, activation: str, gated: bool
    ) -> None:
        super().__init__()
        parts = {"gate_proj": Projection(size)} if gated else {}
        parts["up_proj"] = Projection(size)
        self.activation = activation
        self.gated = gated
        self.gate_up_proj = _GateUp(build, hidden_size, parts, bias)
        self.down_proj = _Down(build, size, hidden_size, bias)
        _leave_sum(self.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.inner(self.gate_up_proj(x)))
        return output

    def inner(self, gate_up: Tensor) -> Tensor:
        """What goes into the projection down, of the outputs of gate and up."""
        if not self.gated:
            return ops.activate(gate_up, self.activation)
        if self.activation == CLAMPED_SWIGLU:
            return clamped_swiglu(gate_up)
        return ops.gated(gate_up, self.activation)


class Experts(nn.Module):
    """All experts of a layer, each with the weights of a layer of its own.

    On a CPU they are computed one by one, as the host knows which of them have tokens, by the
    kernel of the quantization method. Elsewhere dense weights are in one stack per projection, of
    which the experts' own parameters are views, and are multiplied in groups.

    Milliseconds of one core, bf16, of a layer of Qwen3-30B-A3B (128 experts, 8 per token, H 2048,
    I 768), gpt-oss-20b (32, 4, H and I 2880) and a small Mixtral (8, 2, H 1024, I 3584), by
    ``python -m tests.benchmarks.moe``; weights are read at some 10 GB/s in all but the last column:

    =======================  ======  ======  ======  ======
    tokens                        1       8      32     512
    =======================  ======  ======  ======  ======
    Qwen3, one by one           8.5      50     113     304
    Qwen3, torch grouped_mm    12.8      72     143     374
    gpt-oss, one by one          20      94     132     579
    gpt-oss, grouped_mm          27     126     193     681
    Mixtral, one by one         4.3      17      20     129
    Mixtral, grouped_mm         5.4      19      27     136
    =======================  ======  ======  ======  ======
    """

    def __init__(
        self,
        build: Build,
        num_experts: int,
        hidden_size: int,
        size: int,
        bias: bool,
        activation: str,
        gated: bool = True,
        scale_inputs: bool = False,
    ) -> None:
        super().__init__()
        self.scale_inputs = scale_inputs
        # No adapter is published for experts one by one.
        build = replace(build, lora=None, quantization=build.quantization.experts)
        self.dense = isinstance(build.quantization, Unquantized)
        self.every = [
            Expert(build, hidden_size, size, bias, activation, gated) for _ in range(num_experts)
        ]
        for index, expert in enumerate(self.every):
            self.add_module(str(index), expert)
            expert.gate_up_proj.allocate = expert.down_proj.allocate = self._allocate
        self.gate_up: _Stack | None = None
        self.down: _Stack | None = None

    def _allocate(self, device: torch.device) -> None:
        """Give all experts memory when the first one needs it."""
        if self.dense and device.type != "cpu" and self.gate_up is None:
            self.stack(device)

    def stack(self, device: torch.device) -> None:
        """Allocate one stack for all experts' parameters."""
        self.gate_up = _Stack.of([expert.gate_up_proj for expert in self.every], device)
        self.down = _Stack.of([expert.down_proj for expert in self.every], device)

    def forward(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum of the experts that each token chose, this shard's summand of it.

        ``hidden`` [T, H], ``weights`` float32 [T, k], ``chosen`` int64 [T, k].
        """
        groups = Groups.sort(chosen, len(self.every))
        rows = hidden.index_select(0, groups.tokens)
        weights = weights.to(hidden.dtype)
        if self.scale_inputs:
            rows = rows * weights.flatten().index_select(0, groups.pairs)[:, None]
            weights = torch.ones_like(weights)
        if self.gate_up is None:
            scales = weights.flatten().index_select(0, groups.pairs)[:, None]
            return self._one_by_one(torch.zeros_like(hidden), rows, scales, groups)
        outputs = self._stacked(rows, groups)
        # Back into the order of the tokens: index_add_ sums up in any order on CUDA.
        ordered = torch.empty_like(outputs).index_copy_(0, groups.pairs, outputs)
        return torch.bmm(weights[:, None], ordered.view(*chosen.shape, outputs.shape[1])).squeeze(1)

    def _one_by_one(self, sums: Tensor, rows: Tensor, scales: Tensor, groups: Groups) -> Tensor:
        start = 0
        for expert, end in zip(self.every, groups.ends.tolist(), strict=True):
            if end > start:
                here = slice(start, end)
                # A token's experts are added up in their own order, whatever else is in the
                # batch. (Of 512 tokens in bf16 all sums take 4.4 ms, with bmm 7.0.)
                sums.index_add_(0, groups.tokens[here], expert(rows[here]).mul_(scales[here]))
            start = end
        return sums

    def _stacked(self, rows: Tensor, groups: Groups) -> Tensor:
        assert self.gate_up is not None
        assert self.down is not None
        first = self.every[0].down_proj.shard.rank == 0
        gate_up = grouped_linear(rows, self.gate_up.weight, self.gate_up.bias, groups)
        inner = self.every[0].inner(gate_up)
        return grouped_linear(inner, self.down.weight, self.down.bias if first else None, groups)


@dataclass(frozen=True, slots=True)
class _Stack:
    """One projection of all experts."""

    weight: Tensor
    """[E, out, in]."""
    bias: Tensor | None
    """[E, out]."""

    @classmethod
    def of(cls, layers: Sequence[_GateUp | _Down], device: torch.device) -> _Stack:
        """Memory for the layers' parameters, which become views of it."""

        def memory(name: str) -> Tensor:
            like = getattr(layers[0], name)
            stack = torch.empty((len(layers), *like.shape), dtype=like.dtype, device=device)
            for layer, own in zip(layers, stack, strict=True):
                setattr(layer, name, nn.Parameter(own, requires_grad=False))
            return stack

        return cls(memory("weight"), None if layers[0].bias is None else memory("bias"))


class MoE(nn.Module):
    """A router, its experts, and perhaps one expert that every token passes: [T, H] to [T, H].

    The weights of every expert are split like those of a single feed-forward block; the shards'
    results are summed up once.

    Args:
        build: dtype, quantization, shard.
        hidden_size: H.
        num_experts: E.
        intermediate_size: of an expert, over all shards.
        activation: by transformers' names, or ``clamped_swiglu``.
        router_bias, expert_bias: whether they have biases.
        router_correction: whether scores are corrected where experts are chosen.
        router_float32: whether logits are computed in float32, whatever the model's dtype.
        shared_intermediate_size: of the shared expert. Default: there is none.
        shared_gate: whether the sigmoid of a product with the hidden state scales it.
        gated: whether experts, the shared one too, have a gate beside the projection up.
        latent_size: width of the experts' inputs and outputs, to and from which the layer projects
            (https://arxiv.org/abs/2512.20848). Default: H.
        scale_inputs: whether what an expert is given is weighted, not its output (Llama 4).
        expert_scales: whether weights are multiplied by a learned number per expert.
        routing: the attributes of :class:`Routing`.
    """

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        *,
        num_experts: int,
        intermediate_size: int,
        activation: str = "silu",
        router_bias: bool = False,
        router_correction: bool = False,
        router_float32: bool = False,
        expert_bias: bool = False,
        shared_intermediate_size: int | None = None,
        shared_gate: bool = False,
        gated: bool = True,
        latent_size: int | None = None,
        scale_inputs: bool = False,
        expert_scales: bool = False,
        **routing: Any,
    ) -> None:
        super().__init__()
        self.routing = Routing(**routing)
        self.top_k = self.routing.top_k
        self.shard = build.shard
        dtype = torch.float32 if router_float32 else build.dtype
        self.router = Router(hidden_size, num_experts, router_bias, dtype, router_correction)
        width = latent_size or hidden_size
        self.experts = Experts(
            build,
            num_experts,
            width,
            intermediate_size,
            expert_bias,
            activation,
            gated,
            scale_inputs,
        )
        self.expert_scales = Vector(build, num_experts) if expert_scales else None
        self.latent_down: ReplicatedLinear | None = None
        self.latent_up: ReplicatedLinear | None = None
        if latent_size is not None:
            self.latent_down = ReplicatedLinear(build, hidden_size, latent_size, bias=False)
            self.latent_up = ReplicatedLinear(build, latent_size, hidden_size, bias=False)
        self.shared_expert: GatedMLP | MLP | None = None
        self.shared_expert_gate: ReplicatedLinear | None = None
        if shared_intermediate_size is not None:
            self.shared_expert = (GatedMLP if gated else MLP)(
                build, hidden_size, shared_intermediate_size, False, activation
            )
            _leave_sum(self.shared_expert.down_proj)
            if shared_gate:
                whole = Build(build.dtype, Unquantized())
                self.shared_expert_gate = ReplicatedLinear(whole, hidden_size, 1, bias=False)

    def forward(self, hidden: Tensor, routed: Tensor | None = None) -> Tensor:
        """``routed``: what the router sees, [T, H]. Default: ``hidden``."""
        logits = self.router(hidden if routed is None else routed)
        weights, chosen = route(logits, self.routing, self.router.correction)
        if self.expert_scales is not None:
            weights = weights * self.expert_scales.weight[chosen]
        rows = hidden if self.latent_down is None else self.latent_down(hidden)
        output: Tensor = self.experts(rows, weights, chosen)
        if self.latent_up is not None:
            output = self.latent_up(output)  # of this shard's summand
        if self.shared_expert is not None:
            shared = self.shared_expert(hidden)
            if self.shared_expert_gate is not None:
                # In float64, since a CPU rounds a single number's sigmoid otherwise than many's.
                gate = self.shared_expert_gate(hidden).double().sigmoid_()
                shared = shared.mul_(gate.to(shared.dtype))
            output = output.add_(shared)
        return self.shard.all_reduce(output)


class MLPAndExperts(nn.Module):
    """A feed-forward block and experts side by side, each between norms of its own (Gemma 4).

    [T, H], not yet normed, to [T, H]. The router sees it normed without a weight.
    """

    def __init__(
        self, build: Build, hidden_size: int, dense: nn.Module, experts: MoE, eps: float
    ) -> None:
        super().__init__()
        self.dense_norm = RMSNorm(build, hidden_size, eps)
        self.dense = dense
        self.dense_output_norm = RMSNorm(build, hidden_size, eps)
        self.router_norm = UnitRMSNorm(build, hidden_size, eps)
        self.moe_norm = RMSNorm(build, hidden_size, eps)
        self.moe = experts
        self.moe_output_norm = RMSNorm(build, hidden_size, eps)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.dense_output_norm(self.dense(self.dense_norm(hidden)))
        chosen: Tensor = self.moe(self.moe_norm(hidden), self.router_norm(hidden))
        normed: Tensor = self.moe_output_norm(chosen)
        return output + normed


def _leave_sum(layer: RowParallelLinear) -> None:
    """Leave it to the caller to sum up the shards' products."""
    layer.shard = Shard(rank=layer.shard.rank)
