"""What stands around the products of a mixture of experts, as Triton kernels.

With these, a layer is seven launches: the router's product, the choice of experts, sorting by
expert, the product with gates and ups, the activation, the product down, and the weighted sum. No
launch waits for the device, and grids depend on shapes alone, so that a CUDA graph can hold them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_cli.device.triton_launch import cached_launches
from tgi_cli.layers.routing import Routing

_SOFTMAX, _SIGMOID, _LOGITS = range(3)
_SCORES = {"softmax_topk": _SOFTMAX, "sigmoid_topk": _SIGMOID, "topk_softmax": _LOGITS}
_SOFTMAX_KERNEL = tl.constexpr(_SOFTMAX)
_SIGMOID_KERNEL = tl.constexpr(_SIGMOID)
_LOGITS_KERNEL = tl.constexpr(_LOGITS)
_LOWEST = tl.constexpr(float("-inf"))

MAX_TOP_K = 32
"""Experts per token that :func:`route` chooses at most, one after another."""


@cached_launches
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _route_kernel(
    logits: tl.tensor,  # [T, EXPERTS]
    correction: tl.tensor,  # float32 [EXPERTS]
    weights: tl.tensor,  # float32 [T, TOP_K]
    chosen: tl.tensor,  # int32 [T, TOP_K]
    logits_stride: int,
    scaling: float,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,  # the power of 2 that is not below EXPERTS
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    SCORES: tl.constexpr,
    CORRECTED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr,  # 1: experts are chosen among all
    TOP_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, PADDED)
    known = experts < EXPERTS
    at = logits + token * logits_stride + experts
    scores = tl.load(at, mask=known, other=_LOWEST).to(tl.float32)
    if SCORES == _SOFTMAX_KERNEL:
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
    elif SCORES == _SIGMOID_KERNEL:
        scores = tl.sigmoid(scores)
    choice = scores
    if CORRECTED:
        choice += tl.load(correction + experts, mask=known, other=0.0)
    choice = tl.where(known, choice, _LOWEST)
    if GROUPS > 1:
        SIZE: tl.constexpr = PADDED // GROUPS
        members = tl.arange(0, SIZE)[None, :]
        grouped = tl.reshape(choice, (GROUPS, SIZE))
        group_scores = tl.zeros((GROUPS,), tl.float32)
        rest = grouped
        for _ in tl.static_range(BEST_OF_GROUP):
            best = tl.max(rest, 1)
            group_scores += best
            first = tl.min(tl.where(rest == best[:, None], members, SIZE), 1)
            rest = tl.where(members == first[:, None], _LOWEST, rest)
        groups = tl.arange(0, GROUPS)
        kept = groups < 0
        for _ in tl.static_range(TOP_GROUPS):
            best_group = tl.max(tl.where(kept, _LOWEST, group_scores), 0)
            possible = (group_scores == best_group) & (kept == 0)
            first_group = tl.min(tl.where(possible, groups, GROUPS), 0)
            kept = kept | (groups == first_group)
        choice = tl.reshape(tl.where(kept[:, None], grouped, _LOWEST), (PADDED,))
    places = tl.arange(0, PADDED_K)
    best_weights = tl.full((PADDED_K,), _LOWEST, tl.float32)
    best_experts = tl.zeros((PADDED_K,), tl.int32)
    for place in tl.static_range(TOP_K):
        best_score = tl.max(choice, 0)
        # Of equal ones the first. Where there are only NaN any, so that it is an expert.
        index = tl.min(tl.where(choice == best_score, experts, EXPERTS - 1), 0)
        own = experts == index
        weight = tl.sum(tl.where(own, scores, 0.0), 0)
        best_weights = tl.where(places == place, weight, best_weights)
        best_experts = tl.where(places == place, index, best_experts)
        choice = tl.where(own, _LOWEST, choice)
    in_k = places < TOP_K
    if SCORES == _LOGITS_KERNEL:
        best_weights = tl.exp(best_weights - tl.max(best_weights, 0))
        best_weights = best_weights / tl.sum(best_weights, 0)
    else:
        if NORMALIZED:
            best_weights = best_weights / tl.sum(tl.where(in_k, best_weights, 0.0), 0)
        best_weights *= scaling
    tl.store(weights + token * TOP_K + places, best_weights, mask=in_k)
    tl.store(chosen + token * TOP_K + places, best_experts, mask=in_k)


def can_route(num_experts: int, routing: Routing) -> bool:
    """Whether :func:`route` chooses like this: groups must be powers of two."""
    if routing.top_k > MAX_TOP_K:
        return False
    if routing.top_groups >= routing.num_groups:
        return True
    sizes = (num_experts, routing.num_groups)
    return all(size & (size - 1) == 0 for size in sizes) and num_experts > routing.num_groups


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As :func:`tgi_cli.layers.routing.route`, but experts are int32.

    Of experts with equal scores the lowest is chosen.
    """
    tokens, num_experts = logits.shape
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    if not tokens:
        return weights, chosen
    groups = routing.num_groups if routing.top_groups < routing.num_groups else 1
    padded = triton.next_power_of_2(num_experts)
    _route_kernel[(tokens,)](
        logits,
        weights if correction is None else correction,
        weights,
        chosen,
        logits.stride(0),
        routing.scaling,
        EXPERTS=num_experts,
        PADDED=padded,
        TOP_K=routing.top_k,
        PADDED_K=triton.next_power_of_2(routing.top_k),
        SCORES=_SCORES[routing.router],
        CORRECTED=correction is not None,
        NORMALIZED=routing.normalize,
        GROUPS=groups,
        TOP_GROUPS=routing.top_groups,
        BEST_OF_GROUP=min(routing.best_of_group, num_experts // groups),
        num_warps=max(1, min(4, padded // 128)),
    )
    return weights, chosen


@cached_launches
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _combine_kernel(
    outputs: tl.tensor,  # [T, TOP_K, SIZE]
    weights: tl.tensor,  # float32 [T, TOP_K]
    sums: tl.tensor,  # [T, SIZE]
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(TOP_K):
        at = outputs + (token * TOP_K + place) * SIZE + columns
        weight = tl.load(weights + token * TOP_K + place)
        total += weight * tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + token * SIZE + columns, total.to(sums.dtype.element_ty), mask=inside)


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """The weighted sums [T, N] of outputs [T * k, N], those of a token side by side.

    ``weights`` float32 [T, k]. Summed up in float32, in the order of a token's experts.
    """
    tokens, top_k = weights.shape
    size = outputs.shape[1]
    sums = outputs.new_empty(tokens, size)
    if tokens:
        block = min(triton.next_power_of_2(size), 1024)
        _combine_kernel[(tokens, triton.cdiv(size, block))](
            outputs,
            weights,
            sums,
            TOP_K=top_k,
            SIZE=size,
            BLOCK=block,
            num_warps=max(1, block // 256),
        )
    return sums
