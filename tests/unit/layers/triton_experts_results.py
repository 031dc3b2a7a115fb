"""Triton's kernels around experts and of adapters against references. See test_triton.py.

On a machine with CUDA it may be run as it stands, and then tests what the compiler made.
"""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tgi_cli.errors import UnsupportedModelError
from tgi_cli.layers import Build, Loadable, triton_experts, triton_ops, triton_sort
from tgi_cli.layers.experts import clamped_swiglu
from tgi_cli.layers.grouped import Groups, looped_linear
from tgi_cli.layers.lora import LoraPair, LoraTable
from tgi_cli.layers.moe import MoE
from tgi_cli.layers.routing import Routing, route
from tgi_cli.layers.triton_grouped import triton_grouped_linear
from tgi_cli.layers.triton_lora import add_
from tgi_cli.quantization import QuantizationMethod, Quantized, Unquantized
from tgi_cli.quantization.cuda_matmul import TritonMatmul
from tgi_cli.quantization.quantized_weight import QuantizedWeight, group_inputs, quantize_int8
from tgi_cli.quantization.tiled_weight import ExpertRows, TiledWeight, tile_weight

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HIDDEN, INNER = 48, 32


@pytest.fixture(autouse=True)
def _the_same_numbers_every_time() -> None:
    torch.manual_seed(0)


ROUTINGS = {
    "softmax": (Routing(2), 6, False),
    "weights as they are": (Routing(3, normalize=False, scaling=2.5), 40, False),
    "best alone": (Routing(4, router="topk_softmax"), 32, False),
    "sigmoid, corrected": (Routing(3, router="sigmoid_topk", scaling=1.5), 20, True),
    "groups": (
        Routing(4, router="sigmoid_topk", num_groups=4, top_groups=2, best_of_group=2, scaling=2.0),
        32,
        True,
    ),
    "groups by their best": (Routing(3, num_groups=8, top_groups=3, normalize=False), 64, False),
    "one expert": (Routing(1, router="sigmoid_topk", normalize=False), 16, False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_are_those_of_the_reference(name: str, dtype: torch.dtype) -> None:
    routing, experts, corrected = ROUTINGS[name]
    assert triton_experts.can_route(experts, routing)
    # Distinct in every dtype: of equal ones torch chooses any.
    order = torch.rand(50, experts).argsort(1)
    logits = ((order - experts / 2) / 8).to(dtype)
    correction = torch.randn(experts) if corrected else None
    weights, chosen = route(logits, routing, correction)
    own = None if correction is None else correction.to(DEVICE)
    ours, ours_chosen = triton_experts.route(logits.to(DEVICE), routing, own)
    assert ours_chosen.dtype == torch.int32
    assert torch.equal(ours_chosen.cpu().long(), chosen)
    torch.testing.assert_close(ours.cpu(), weights)


def test_of_equal_experts_the_lowest_are_chosen_and_nan_chooses_any() -> None:
    logits = torch.zeros(2, 12)
    logits[1] = torch.nan
    _, chosen = triton_experts.route(logits.to(DEVICE), Routing(3))
    assert chosen[0].tolist() == [0, 1, 2]
    assert ((chosen >= 0) & (chosen < 12)).all()


def test_groups_that_are_no_powers_of_two_are_left_to_torch() -> None:
    assert not triton_experts.can_route(60, Routing(2, num_groups=5, top_groups=2))
    assert triton_experts.can_route(60, Routing(2, num_groups=5, top_groups=5))


@pytest.mark.parametrize("tokens", [0, 1, 40, 700])
def test_pairs_are_sorted_by_expert(tokens: int) -> None:
    chosen = torch.rand(tokens, 9).argsort(1)[:, :3] + 1
    groups = Groups.sort(chosen, 12)
    for dtype in (torch.int32, torch.int64):
        ends, pairs = triton_sort.sort_pairs(chosen.to(DEVICE, dtype), 12)
        assert torch.equal(ends.cpu(), groups.ends)
        assert torch.equal(pairs.cpu().long(), groups.pairs)


def test_negative_numbers_are_of_no_expert() -> None:
    chosen = torch.tensor([[-1], [2], [-1], [0], [2]]).to(DEVICE)
    out = torch.full((3,), 7).int().to(DEVICE), torch.full((5,), 9).int().to(DEVICE)
    ends, pairs = triton_sort.sort_pairs(chosen, 3, out)
    assert ends.tolist() == [1, 1, 3]
    assert pairs.tolist() == [3, 1, 4, 9, 9]
    assert ends is out[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_outputs_are_combined(dtype: torch.dtype) -> None:
    outputs, weights = torch.randn(5 * 3, 1100).to(dtype), torch.rand(5, 3)
    wanted = (outputs.view(5, 3, -1).double() * weights.double()[..., None]).sum(1)
    ours = triton_experts.combine(outputs.to(DEVICE), weights.to(DEVICE)).cpu()
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(ours.double(), wanted, atol=tolerance, rtol=tolerance)
    assert triton_experts.combine(outputs[:0].to(DEVICE), weights[:0].to(DEVICE)).numel() == 0


def test_clamped_swiglu() -> None:
    gate_up = torch.randn(4, 2 * 70) * 8
    gate_up[0, 3] = torch.nan
    ours = triton_ops.clamped_swiglu(gate_up.to(DEVICE)).cpu()
    torch.testing.assert_close(ours, clamped_swiglu(gate_up), equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 23, 150])
def test_dense_rows_are_gathered_and_scattered(tokens: int) -> None:
    chosen = torch.rand(tokens, 5).argsort(1)[:, :2]
    groups = Groups.sort(chosen, 6)
    x, weight, bias = torch.randn(tokens, 40), torch.randn(6, 70, 40), torch.randn(6, 70)
    wanted = looped_linear(x[groups.tokens], weight, bias, groups)
    ends, pairs = groups.ends.to(DEVICE), groups.pairs.int().to(DEVICE)
    on = [each.to(DEVICE) for each in (weight, bias)]
    rows = ExpertRows(ends, pairs, shared_by=2)
    gathered = triton_grouped_linear(x.to(DEVICE), *on, rows).cpu()
    torch.testing.assert_close(gathered, wanted, atol=1e-4, rtol=1e-4)
    rows = ExpertRows(ends, pairs, scattered=True)
    own = x[groups.tokens].to(DEVICE)
    scattered = triton_grouped_linear(own, *on, rows).cpu()
    torch.testing.assert_close(scattered[groups.pairs], wanted, atol=1e-4, rtol=1e-4)


def fill(moe: MoE, weights: dict[str, Tensor]) -> None:
    for path, layer in moe.named_modules():
        if isinstance(layer, Loadable):
            layer.materialize(DEVICE)
            for slot in layer.slots(path):
                slot.fill(weights[slot.name])
            layer.finish()


def tiled_matmul(weight: QuantizedWeight, *_: object) -> TritonMatmul:
    found = tile_weight(group_inputs(weight), weight.bits, DEVICE)
    assert isinstance(found, TiledWeight)
    return TritonMatmul(found)


def mixture(method: QuantizationMethod, **values: object) -> MoE:
    sizes = {"num_experts": 6, "top_k": 2, "intermediate_size": INNER} | values
    return MoE(Build(torch.float32, method), HIDDEN, **sizes)


@pytest.mark.parametrize("tokens", [0, 1, 3, 50])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {
            "router": "topk_softmax",
            "activation": "clamped_swiglu",
            "router_bias": True,
            "expert_bias": True,
        },
        {"top_k": 1, "scale_inputs": True, "router": "sigmoid_topk", "normalize": False},
        {"gated": False, "activation": "relu2", "shared_intermediate_size": 48},
    ],
    ids=["plain", "gpt-oss", "inputs scaled", "not gated"],
)
def test_quantized_experts_are_the_dense_ones(tokens: int, values: dict[str, object]) -> None:
    plain = mixture(Unquantized(), **values)
    slots = [
        slot
        for path, layer in plain.named_modules()
        if isinstance(layer, Loadable)
        for slot in layer.slots(path)
    ]
    stored = {slot.name: torch.randn(slot.shape) * 2 / slot.shape[-1] ** 0.5 for slot in slots}
    dense = {
        name: quantize_int8(tensor).dequantize(torch.float32)
        if "expert" in name and tensor.ndim == 2
        else tensor
        for name, tensor in stored.items()
    }
    fill(plain, dense)
    with patch("tgi_cli.quantization.quantized.make_matmul", tiled_matmul):
        ours = mixture(Quantized(torch.float32, DEVICE, quantize_int8), **values)
        fill(ours, stored)
    assert ours.experts.gate_up is not None
    assert isinstance(ours.experts.gate_up.weight, TiledWeight)
    hidden = torch.randn(tokens, HIDDEN).to(DEVICE)
    torch.testing.assert_close(ours(hidden), plain(hidden), atol=1e-3, rtol=1e-3)


def test_stacked_experts_are_in_memory_once_and_counted() -> None:
    slots = {
        slot.name: torch.randn(slot.shape)
        for path, layer in mixture(Unquantized()).named_modules()
        if isinstance(layer, Loadable)
        for slot in layer.slots(path)
    }
    with patch("tgi_cli.quantization.quantized.make_matmul", tiled_matmul):
        ours = mixture(Quantized(torch.float32, DEVICE, quantize_int8))
        fill(ours, slots)
    stack = ours.experts.down
    assert stack is not None
    assert isinstance(stack.weight, TiledWeight)
    for index, expert in enumerate(ours.experts.every):
        packed = expert.down_proj.packed
        assert isinstance(packed, TritonMatmul)
        assert packed.weight.data.data_ptr() == stack.weight.data[index].data_ptr()
        assert expert.down_proj.packed_bytes == HIDDEN * INNER + 4 * HIDDEN


def test_experts_that_are_quantized_in_several_ways_are_refused() -> None:
    made = iter(range(100))

    def some(weight: QuantizedWeight, *rest: object) -> TritonMatmul | str:
        return "no kernel" if next(made) % 5 == 1 else tiled_matmul(weight, *rest)

    slots = {
        slot.name: torch.randn(slot.shape)
        for path, layer in mixture(Unquantized()).named_modules()
        if isinstance(layer, Loadable)
        for slot in layer.slots(path)
    }
    with patch("tgi_cli.quantization.quantized.make_matmul", some):
        ours = mixture(Quantized(torch.float32, DEVICE, quantize_int8))
        with pytest.raises(UnsupportedModelError, match="several ways"):
            fill(ours, slots)


@pytest.mark.parametrize("inputs", [40, 900])
@pytest.mark.parametrize("tokens", [1, 5, 60])
def test_adapters_are_those_of_the_cpu(tokens: int, inputs: int) -> None:
    """Four slots of a rank that is no power of two, one of them unused; tokens without any."""
    slots, rank = 4, 5
    table = LoraTable(slots, rank, tokens)
    parts = {"q": (70, slice(0, 70)), "k": (200, slice(0, 200)), "v": (9, slice(0, 9))}
    layer = table.layer(inputs, slice(0, inputs), parts)
    table.allocate(torch.float32, torch.device("cpu"))
    for slot in (0, 1, 3):
        pairs = [
            LoraPair(layer, part, torch.randn(rank, inputs) / 8, torch.randn(rank, size))
            for part, (size, _) in enumerate(parts.values())
            if (slot, part) != (1, 1)
        ]
        table.put(slot, pairs)
    chosen = torch.tensor([-1, 0, 1, 3])[torch.randint(4, (tokens,))].int()
    x, y = torch.randn(tokens, inputs), torch.randn(tokens, 279)
    wanted = y.clone()
    table.plan(chosen.unique().tolist(), chosen)
    layer.add_(wanted, x)
    ends, sorted_tokens = triton_sort.sort_pairs(chosen.to(DEVICE), slots)
    owners = torch.tensor([0] * 70 + [1] * 200 + [2] * 9).int().to(DEVICE)
    ours = y.to(DEVICE)
    b = torch.cat(layer.b, dim=1).to(DEVICE)
    add_(ours, x.to(DEVICE), layer.a.to(DEVICE), b, owners, ends, sorted_tokens)
    torch.testing.assert_close(ours.cpu(), wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(ours.cpu()[chosen < 0], y[chosen < 0])
