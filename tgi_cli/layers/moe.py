"""Mixture of experts: a router chooses a few of many feed-forward blocks for each token.

After "Outrageously Large Neural Networks" (https://arxiv.org/abs/1701.06538) and Mixtral
(https://arxiv.org/abs/2401.04088); the shared expert is Qwen2-MoE's
(https://huggingface.co/docs/transformers/main/en/model_doc/qwen2_moe).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tgi_cli.kernels.experts import SCORES, PackedExperts, PackedRouting
from tgi_cli.kernels.linear import ACTIVATIONS
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.layers import ops
from tgi_cli.layers.base import Build
from tgi_cli.layers.experts import Experts, leave_sum, packed_block
from tgi_cli.layers.linear import ReplicatedLinear
from tgi_cli.layers.mlp import MLP, GatedMLP
from tgi_cli.layers.norm import RMSNorm, UnitRMSNorm
from tgi_cli.layers.routing import Router, Routing, route
from tgi_cli.layers.streams import Vector
from tgi_cli.quantization import Unquantized


class MoE(nn.Module):
    """A router, its experts, and perhaps one expert that every token passes: [T, H] to [T, H].

    The weights of every expert are split like those of a single feed-forward block; the shards'
    results are summed up once.

    Args:
        build: dtype, quantization, shard.
        hidden_size: H.
        num_experts: E.
        intermediate_size: width of an expert, over all shards.
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
        self.router = Router(
            hidden_size, num_experts, router_bias, dtype, router_correction, build.dtype
        )
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
            leave_sum(self.shared_expert.down_proj)
            if shared_gate:
                whole = Build(build.dtype, Unquantized())
                self.shared_expert_gate = ReplicatedLinear(whole, hidden_size, 1, bias=False)

    def forward(self, hidden: Tensor, routed: Tensor | None = None) -> Tensor:
        """``routed``: what the router sees, [T, H]. Default: ``hidden``."""
        if routed is None and self.whole is not None:
            logits = None if self.whole.makes_logits else self.router(hidden).float()
            return self.shard.all_reduce(self.whole.route(hidden, logits))
        scores = self.router(hidden if routed is None else routed)
        weights, chosen = self._route(scores)
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

    @cached_property
    def whole(self) -> PackedExperts | None:
        """The layer, which is loaded, in one call of the C++ kernels; None if it takes several."""
        experts, shared = self.experts.packed, self.shared_expert
        if experts is None or self.expert_scales is not None or self.latent_down is not None:
            return None
        block, activation = None, 0
        if shared is not None:
            if not isinstance(shared, GatedMLP) or self.shared_expert_gate is not None:
                return None
            block = packed_block(shared.gate_up_proj, shared.down_proj)
            lora = shared.gate_up_proj.lora is not None or shared.down_proj.lora is not None
            known = shared.activation in ACTIVATIONS and shared.cutoff is None
            if block is None or not block.up.paired or lora or not known:
                return None
            activation = ACTIVATIONS[shared.activation]
        matrix, routing = self.router.packed, self.routing
        return PackedExperts(
            experts.blocks,
            experts.epilogue,
            experts.activation,
            experts.scale_inputs,
            routing=PackedRouting(
                matrix if isinstance(matrix, PackedMatrix) else None,
                self.router.bias,
                self.router.wide_weight,
                self.router.correction,
                SCORES[routing.router],
                routing.normalize,
                routing.num_groups,
                routing.top_groups,
                routing.best_of_group,
                routing.scaling,
            ),
            top_k=self.top_k,
            shared=block,
            shared_activation=activation,
        )

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if logits.is_cuda and ops.triton_kernels() is not None:
            from tgi_cli.layers import triton_experts

            if triton_experts.can_route(logits.shape[1], self.routing):
                return triton_experts.route(logits, self.routing, self.router.correction)
        return route(logits, self.routing, self.router.correction)


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
