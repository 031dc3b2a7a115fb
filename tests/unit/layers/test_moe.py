"""Mixture of experts: router, both ways to compute experts, and what is shared out."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.tools.paged_run import kernels_add_up_rows_alike
from tests.tools.thread_shards import on_shards
from tgi_cli.device.distributed import ALONE, Shard
from tgi_cli.layers import Build, Loadable
from tgi_cli.layers.experts import clamped_swiglu
from tgi_cli.layers.grouped import Groups, grouped_linear, looped_linear
from tgi_cli.layers.moe import MoE
from tgi_cli.quantization import Unquantized

CPU = torch.device("cpu")
HIDDEN, INNER = 32, 24

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights left as they are": {"normalize": False},
    "biases": {
        "router": "topk_softmax",
        "activation": "clamped_swiglu",
        "router_bias": True,
        "expert_bias": True,
    },
    "shared expert": {"shared_intermediate_size": 40},
    "gated shared expert": {"shared_intermediate_size": 40, "shared_gate": True},
}


@pytest.fixture(autouse=True)
def _the_same_numbers_every_time() -> None:
    torch.manual_seed(0)


def make(
    dtype: torch.dtype = torch.float32, stack: bool = False, shard: Shard = ALONE, **values: Any
) -> tuple[MoE, dict[str, Tensor]]:
    """A block of 6 experts, 2 per token, and the tensors it was filled with."""
    sizes = {"num_experts": 6, "top_k": 2, "intermediate_size": INNER}
    moe = MoE(Build(dtype, Unquantized(), shard), HIDDEN, **(sizes | values))
    if stack:
        moe.experts.stack(CPU)  # as on a device that multiplies in groups
    generator = torch.Generator().manual_seed(3)
    weights: dict[str, Tensor] = {}
    for path, layer in moe.named_modules():
        if isinstance(layer, Loadable):
            layer.materialize(CPU)
            for slot in layer.slots(path):
                noise = torch.empty(slot.shape).normal_(generator=generator)
                weights[slot.name] = noise * 2 / slot.shape[-1] ** 0.5
                slot.fill(weights[slot.name])
            layer.finish()
    return moe, weights


def oracle(weights: dict[str, Tensor], hidden: Tensor, values: dict[str, Any]) -> Tensor:
    """Token by token, in float64."""
    wide = {name: tensor.double() for name, tensor in weights.items()}

    def linear(name: str, x: Tensor) -> Tensor:
        product = wide[f"{name}.weight"] @ x
        return product + wide[f"{name}.bias"] if f"{name}.bias" in wide else product

    def block(name: str, x: Tensor) -> Tensor:
        gate, up = linear(f"{name}.gate_proj", x), linear(f"{name}.up_proj", x)
        if values.get("activation") == "clamped_swiglu":
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            return linear(f"{name}.down_proj", gate * torch.sigmoid(1.702 * gate) * (up + 1))
        return linear(f"{name}.down_proj", silu(gate) * up)

    outputs = []
    for x in hidden.double():
        logits = linear("router", x)
        chosen = logits.argsort(descending=True)[:2].tolist()
        if values.get("router") == "topk_softmax" or values.get("normalize", True):
            scale = logits[chosen].softmax(0)
        else:
            scale = logits.softmax(0)[chosen]
        output = sum(s * block(f"experts.{e}", x) for s, e in zip(scale, chosen, strict=True))
        if "shared_intermediate_size" in values:
            shared = block("shared_expert", x)
            gate = "shared_expert_gate.weight"
            output = output + (shared * torch.sigmoid(wide[gate] @ x) if gate in wide else shared)
        outputs.append(output)
    return torch.stack(outputs).float()


@pytest.mark.parametrize("tokens", [1, 3, 50])
@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_mixture(kind: str, stack: bool, tokens: int) -> None:
    moe, weights = make(stack=stack, **KINDS[kind])
    hidden = 2 * torch.randn(tokens, HIDDEN)
    kept = hidden.clone()
    wanted = oracle(weights, hidden, KINDS[kind])
    torch.testing.assert_close(moe(hidden), wanted, atol=1e-4, rtol=1e-5)
    assert torch.equal(hidden, kept), "the input is the caller's"


@pytest.mark.parametrize("stack", [False, True])
def test_bfloat16(stack: bool) -> None:
    moe, weights = make(torch.bfloat16, stack, **KINDS["biases"])
    hidden = torch.randn(20, HIDDEN).bfloat16()
    rounded = {name: tensor.bfloat16() for name, tensor in weights.items()}
    wanted = oracle(rounded, hidden, KINDS["biases"])
    # Whoever routes by rounded logits may choose otherwise where two are close.
    near = (moe(hidden).float() - wanted).abs().amax(1) < 0.05 * wanted.abs().amax(1)
    assert near.sum() >= 19


@pytest.mark.parametrize("stack", [False, True])
def test_a_token_does_not_see_its_neighbours(stack: bool) -> None:
    moe, _ = make(stack=stack, **KINDS["gated shared expert"])
    hidden = torch.randn(40, HIDDEN)
    together = moe(hidden)
    for token in (0, 17, 39):
        alone = moe(hidden[token : token + 1])
        torch.testing.assert_close(alone[0], together[token], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_by_one_a_token_is_the_same_to_the_last_bit(dtype: torch.dtype) -> None:
    if not kernels_add_up_rows_alike(dtype):
        return  # another processor: there is nothing to keep
    moe, _ = make(dtype, num_experts=4, intermediate_size=48, **KINDS["gated shared expert"])
    hidden = torch.randn(40, HIDDEN).to(dtype)
    alone = torch.cat([moe(hidden[token : token + 1]) for token in range(40)])
    assert torch.equal(moe(hidden), alone)
    assert torch.equal(torch.cat((moe(hidden[:7]), moe(hidden[7:]))), alone)


def test_no_tokens() -> None:
    for stack in (False, True):
        assert make(stack=stack)[0](torch.empty(0, HIDDEN)).shape == (0, HIDDEN)


@pytest.mark.parametrize("kind", KINDS)
def test_shards_add_up(kind: str) -> None:
    hidden = torch.randn(9, HIDDEN)
    wanted = make(**KINDS[kind])[0](hidden)
    for stack in (False, True):

        def work(shard: Shard, stack: bool = stack) -> tuple[Tensor, int]:
            moe, _ = make(stack=stack, shard=shard, **KINDS[kind])
            return moe(hidden), moe.experts.every[0].down_proj.in_features

        for output, own in on_shards(2, work):
            torch.testing.assert_close(output, wanted, atol=1e-4, rtol=1e-5)
            assert own == INNER // 2


def test_stacked_experts_are_in_memory_once() -> None:
    moe, _ = make(torch.float16, stack=True)  # a dtype that a CPU has no packed form of
    gate_up = moe.experts.gate_up
    assert gate_up is not None
    for index, expert in enumerate(moe.experts.every):
        own = expert.gate_up_proj.weight
        assert own is not None
        assert own.data_ptr() == gate_up.weight[index].data_ptr()


def test_the_host_does_not_wait_for_the_device() -> None:
    """Tensors without values show it: to read one is an error."""
    moe = MoE(
        Build(torch.bfloat16, Unquantized()),
        HIDDEN,
        num_experts=6,
        top_k=2,
        intermediate_size=INNER,
        expert_bias=True,
    )
    moe.experts.every[3].down_proj.materialize(torch.device("meta"))

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)

    hidden = torch.empty(5, HIDDEN, dtype=torch.bfloat16, device="meta")
    with patch("tgi_cli.layers.experts.grouped_linear", product), torch.inference_mode():
        assert moe(hidden).shape == (5, HIDDEN)
    with pytest.raises((NotImplementedError, RuntimeError)):
        moe(hidden)  # the reference reads the sizes of the groups


def test_clamped_swiglu_is_that_of_gpt_oss() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=8, intermediate_size=64, num_local_experts=1)
    gate_up = 10 * torch.randn(5, 128)
    experts: Any = GptOssExperts
    wanted = experts(config)._apply_gate(gate_up)
    ours = clamped_swiglu(torch.cat((gate_up[:, 0::2], gate_up[:, 1::2]), dim=-1))
    torch.testing.assert_close(ours, wanted)


def test_groups_are_sorted_and_keep_the_order_of_tokens() -> None:
    groups = Groups.sort(torch.tensor([[4, 1], [1, 0], [4, 5], [0, 1]]), 6)
    assert groups.experts.tolist() == [0, 0, 1, 1, 1, 4, 4, 5]
    assert groups.ends.tolist() == [2, 5, 5, 5, 7, 8]
    assert groups.ends.dtype == torch.int32
    assert groups.pairs.tolist() == [3, 6, 1, 2, 7, 0, 4, 5]
    assert groups.tokens.tolist() == [1, 3, 0, 1, 3, 0, 2, 2]


@pytest.mark.parametrize("bias", [False, True])
def test_torchs_grouped_product_is_the_reference(bias: bool) -> None:
    groups = Groups.sort(torch.randint(6, (13, 2)) % 5, 6)
    x, weight = torch.randn(26, 32).bfloat16(), torch.randn(6, 40, 32).bfloat16()
    added = torch.randn(6, 40).bfloat16() if bias else None
    with patch("tgi_cli.layers.grouped._torch_has_kernel", lambda *_: True):
        product = grouped_linear(x, weight, added, groups)
    torch.testing.assert_close(
        product, looped_linear(x, weight, added, groups), atol=0.1, rtol=0.02
    )
    each = torch.stack(
        [weight[e].float() @ x[i].float() for i, e in enumerate(groups.experts.tolist())]
    )
    if added is not None:
        each += added[groups.experts].float()
    torch.testing.assert_close(product.float(), each, atol=0.1, rtol=0.02)
