"""Mixtures of experts in C++, beside their products one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tgi_cli.kernels import library
from tgi_cli.kernels.experts import (
    SCORES,
    PackedBlock,
    PackedExperts,
    PackedRouting,
    router_logits,
)
from tgi_cli.kernels.linear import (
    ACTIVATIONS,
    Epilogue,
    linear,
    pack_bf16,
    pack_codes,
    quantize_inputs,
)
from tgi_cli.kernels.packed_matrix import PackedMatrix
from tgi_cli.layers.experts import clamped_swiglu
from tgi_cli.layers.routing import Routing, route

pytestmark = pytest.mark.usefixtures("level")

EXPERTS, HIDDEN, INNER, SHARED = 7, 96, 72, 40
SILU = ACTIVATIONS["silu"]


@pytest.fixture(autouse=True)
def _the_same_numbers_every_time() -> None:
    torch.manual_seed(3)


def matrix(out: int, inputs: int, bits: int = 16, paired: bool = False) -> PackedMatrix:
    if bits == 16:
        return pack_bf16((torch.randn(out, inputs) / inputs**0.5).bfloat16(), paired)
    codes = torch.randint(2**bits, (out, inputs), dtype=torch.uint8)
    scales = torch.rand(out, -(-inputs // 32)) / 2**bits / inputs**0.5
    return pack_codes(codes, scales, None, bits, 32, paired)


def blocks(epilogue: Epilogue, bits: int = 16, bias: bool = False) -> list[PackedBlock]:
    wide = INNER if epilogue is Epilogue.ACTIVATE else 2 * INNER
    return [
        PackedBlock(
            matrix(wide, HIDDEN, bits, paired=epilogue is Epilogue.GATED),
            matrix(HIDDEN, INNER, bits),
            torch.randn(wide).bfloat16() if bias else None,
            torch.randn(HIDDEN).bfloat16() if bias else None,
        )
        for _ in range(EXPERTS)
    ]


def choice(tokens: int, top_k: int = 3) -> tuple[Tensor, Tensor]:
    chosen = torch.stack([torch.randperm(EXPERTS)[:top_k] for _ in range(tokens)])
    return torch.rand(tokens, top_k).bfloat16(), chosen


def one_by_one(experts: PackedExperts, x: Tensor, factors: Tensor, chosen: Tensor) -> Tensor:
    """With the roundings of torch's operations, each token's experts in their order."""
    sums = torch.zeros_like(x)
    for index, block in enumerate(experts.blocks):
        tokens, place = (chosen == index).nonzero(as_tuple=True)
        by = factors[tokens, place][:, None]
        given = x[tokens] * by if experts.scale_inputs else x[tokens]
        inner = linear(given, block.up, block.up_bias, experts.epilogue, experts.activation)
        if experts.epilogue is Epilogue.STORE:
            inner = clamped_swiglu(inner)
        found = linear(inner, block.down, block.down_bias)
        sums.index_add_(0, tokens, found if experts.scale_inputs else found * by)
    return sums


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(
    ("epilogue", "bias", "scale_inputs"),
    [
        (Epilogue.GATED, False, False),
        (Epilogue.GATED, False, True),
        (Epilogue.ACTIVATE, True, False),
        (Epilogue.STORE, True, False),
    ],
)
def test_all_experts_at_once_are_the_experts_one_by_one(
    epilogue: Epilogue, bias: bool, scale_inputs: bool, bits: int
) -> None:
    experts = PackedExperts(blocks(epilogue, bits, bias), epilogue, SILU, scale_inputs)
    x = torch.randn(60, HIDDEN + 32).bfloat16()[:, :HIDDEN]
    factors, chosen = choice(60)
    together = experts(x, factors, chosen)
    wanted = one_by_one(experts, x, factors, chosen)
    if epilogue is Epilogue.STORE:  # its sigmoid is not torch's to the last bit
        torch.testing.assert_close(together, wanted, atol=2**-5, rtol=2**-6)
    else:
        assert torch.equal(together, wanted)
    for rows in (0, 1, 2, 13):
        assert torch.equal(experts(x[:rows], factors[:rows], chosen[:rows]), together[:rows])
    library.set_threads(3)
    assert torch.equal(experts(x, factors, chosen), together)


def test_inputs_of_products_may_be_bytes() -> None:
    every = blocks(Epilogue.GATED, 4)
    if not all(quantize_inputs(m) for block in every for m in (block.up, block.down)):
        return  # this level has no products of bytes
    experts = PackedExperts(every, Epilogue.GATED, SILU)
    x, (factors, chosen) = torch.randn(30, HIDDEN).bfloat16(), choice(30)
    together = experts(x, factors, chosen)
    assert torch.equal(together, one_by_one(experts, x, factors, chosen))


def test_many_tokens_are_computed_some_at_a_time() -> None:
    """Their rows would take more than 64 MB."""
    experts = PackedExperts(blocks(Epilogue.GATED), Epilogue.GATED, SILU)
    tokens = (64 << 20) // (6 * 2 * (HIDDEN + 2 * INNER)) + 9
    x, (factors, chosen) = torch.randn(tokens, HIDDEN).bfloat16(), choice(tokens, 6)
    together = experts(x, factors, chosen)
    assert torch.equal(together[-40:], experts(x[-40:], factors[-40:], chosen[-40:]))
    assert torch.equal(together[:40], experts(x[:40], factors[:40], chosen[:40]))


@pytest.mark.parametrize("logits", ["matrix", "weight", "given"])
def test_a_router_and_a_shared_expert(logits: str) -> None:
    weight = torch.randn(EXPERTS, HIDDEN)
    packed = pack_bf16(weight.bfloat16()) if logits == "matrix" else None
    routing = PackedRouting(
        packed,
        None,
        weight if logits == "weight" else None,
        None,
        SCORES["softmax_topk"],
        normalize=True,
        groups=1,
        top_groups=1,
        best_of_group=1,
        scaling=1.0,
    )
    shared = PackedBlock(matrix(2 * SHARED, HIDDEN, paired=True), matrix(HIDDEN, SHARED))
    every = blocks(Epilogue.GATED)
    experts = PackedExperts(
        every,
        Epilogue.GATED,
        SILU,
        routing=routing,
        top_k=3,
        shared=shared,
        shared_activation=ACTIVATIONS["gelu"],
    )
    assert experts.makes_logits == (logits != "given")
    x = torch.randn(50, HIDDEN).bfloat16()
    scores = router_logits(x, weight)
    if packed is not None:
        scores = linear(x, packed, epilogue=Epilogue.FLOAT)
    given = scores if logits == "given" else None
    together = experts.route(x, given)
    sums = one_by_one(experts, x, *routing.choose(scores, 3))
    inner = linear(x, shared.up, None, Epilogue.GATED, ACTIVATIONS["gelu"])
    assert torch.equal(together, sums + linear(inner, shared.down))
    few = None if given is None else given[:5]
    assert torch.equal(experts.route(x[:5], few), together[:5])


def test_logits_of_a_router_in_float32() -> None:
    x, weight = torch.randn(33, 100).bfloat16(), torch.randn(19, 100)
    logits = router_logits(x, weight)
    wanted = x.double() @ weight.double().T
    torch.testing.assert_close(logits.double(), wanted, atol=1e-4, rtol=1e-5)
    assert torch.equal(router_logits(x[4:5], weight), logits[4:5])


ROUTINGS: list[dict[str, Any]] = [
    {"router": "softmax_topk"},
    {"router": "softmax_topk", "normalize": False, "scaling": 2.5},
    {"router": "topk_softmax", "normalize": False},
    {"router": "sigmoid_topk", "num_groups": 4, "top_groups": 2, "best_of_group": 2},
    {"router": "softmax_topk", "num_groups": 3, "top_groups": 1, "normalize": False},
]


def packed_routing(routing: Routing, correction: Tensor | None = None) -> PackedRouting:
    return PackedRouting(
        None,
        None,
        None,
        correction,
        SCORES[routing.router],
        routing.normalize,
        routing.num_groups,
        routing.top_groups,
        routing.best_of_group,
        routing.scaling,
    )


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("values", ROUTINGS)
def test_experts_are_chosen_as_by_torch(values: dict[str, Any], corrected: bool) -> None:
    routing = Routing(3, **values)
    logits = torch.randn(300, 12) * 3
    correction = torch.randn(12) if corrected else None
    if routing.router == "topk_softmax":
        correction = None  # it has none
    weights, chosen = route(logits, routing, correction)
    factors, ours = packed_routing(routing, correction).choose(logits, 3)
    assert torch.equal(ours, chosen)
    torch.testing.assert_close(factors.float(), weights, atol=1e-6, rtol=2**-8)


def test_equal_logits_and_those_that_are_no_numbers() -> None:
    routing = packed_routing(Routing(3))
    logits = torch.zeros(3, 8)
    logits[1, 5] = 1.0
    logits[2] = float("nan")
    factors, chosen = routing.choose(logits, 3)
    assert chosen[0].tolist() == [0, 1, 2]
    assert chosen[1].tolist() == [5, 0, 1]
    assert len(set(chosen[2].tolist())) == 3
    assert factors[2].isnan().all()
    assert factors[:2].isfinite().all()
