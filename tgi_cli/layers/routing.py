"""How a mixture of experts chooses some of them for each token.

Probabilities of all experts or among the best alone are Mixtral's and Qwen's; groups of experts
are DeepSeek V2's (https://arxiv.org/abs/2405.04434), sigmoids with a correction of the choice
DeepSeek V3's (https://arxiv.org/abs/2412.19437).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tgi_cli.kernels import cpp_library
from tgi_cli.kernels.experts import router_logits
from tgi_cli.layers.base import Build, WeightSlot, empty_parameter
from tgi_cli.layers.linear import ReplicatedLinear
from tgi_cli.quantization import Unquantized

Scores = Literal["softmax_topk", "topk_softmax", "sigmoid_topk"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen.

    Attributes:
        top_k: experts per token.
        router: what weights are made of. ``softmax_topk``: the best of all experts' probabilities.
            ``topk_softmax``: probabilities among the best alone. ``sigmoid_topk``: the best of
            sigmoids, one by one.
        normalize: whether the chosen weights are made to add up to 1 (not ``topk_softmax``).
        num_groups, top_groups: experts are chosen among those of the best groups, of neighbours.
        best_of_group: experts whose scores add up to their group's.
        scaling: factor of the weights.
    """

    top_k: int
    router: Scores = "softmax_topk"
    normalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    scaling: float = 1.0


class Router(ReplicatedLinear):
    """The logits of experts, [T, H] to [T, E], and a correction of their choice.

    It is never quantized, for it chooses the experts.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        bias: bool,
        dtype: torch.dtype,
        corrected: bool,
        inputs: torch.dtype | None = None,
    ) -> None:
        super().__init__(Build(dtype, Unquantized()), hidden_size, num_experts, bias)
        self.inputs = inputs or dtype
        """dtype of what it is given."""
        self.correction = empty_parameter(num_experts, dtype=torch.float32) if corrected else None

    def slots(self, path: str) -> Iterator[WeightSlot]:
        yield from super().slots(path)
        if self.correction is not None:
            yield self.slot(f"{path}.correction", "correction", (len(self.correction),))

    @property
    def wide_weight(self) -> Tensor | None:
        """The weight in float32 by which the C++ kernels multiply bfloat16, without a bias."""
        wide = self.dtype == torch.float32 and self.inputs == torch.bfloat16
        if not wide or self.bias is not None or self.weight is None or not self.weight.is_cpu:
            return None
        return None if cpp_library() is None else self.weight.detach()

    def finish(self) -> None:
        if self.wide_weight is None:
            super().finish()

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16 and (weight := self.wide_weight) is not None:
            return router_logits(x, weight)
        return super().forward(x.to(self.dtype))


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Router logits [T, E] to weights float32 [T, k] and experts int64 [T, k], best first.

    ``correction`` float32 [E] is added to scores where experts are chosen, not to their weights.
    """
    if routing.router == "topk_softmax":
        best, experts = logits.float().topk(routing.top_k, dim=-1)
        return best.softmax(-1), experts
    if routing.router == "sigmoid_topk":
        # A CPU's sigmoid of float32 rounds an element by its position in a tensor.
        scores = logits.double().sigmoid_().float()
    else:
        scores = logits.softmax(-1, dtype=torch.float32)
    choice = scores if correction is None else scores + correction
    if routing.top_groups < routing.num_groups:
        choice = _within_groups(choice, routing)
    best, experts = choice.topk(routing.top_k, dim=-1)
    if choice is not scores:
        best = scores.gather(1, experts)
    if routing.normalize:
        best = best / best.sum(-1, keepdim=True)
    return (best if routing.scaling == 1.0 else best * routing.scaling), experts


def _within_groups(scores: Tensor, routing: Routing) -> Tensor:
    """Scores [T, E], of other experts than those of the best groups minus infinity."""
    groups = scores.view(len(scores), routing.num_groups, -1)
    size = min(routing.best_of_group, groups.shape[2])
    best = groups.topk(size, dim=-1)[0].sum(-1).topk(routing.top_groups, dim=-1)[1]
    outside = torch.ones(groups.shape[:2], dtype=torch.bool, device=scores.device)
    outside.scatter_(1, best, False)
    return groups.masked_fill(outside[..., None], float("-inf")).flatten(1)
