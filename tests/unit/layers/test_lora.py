"""Slots of adapters on one layer: each token gets its own adapter's product and no other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tgi_cli.layers.lora import LoraLayer, LoraPair, LoraTable

CPU = torch.device("cpu")
IN, SIZES = 12, {"q_proj": 8, "k_proj": 4, "v_proj": 4}
SLOTS, RANK = 3, 4


def make(dtype: torch.dtype = torch.float32) -> tuple[LoraTable, LoraLayer]:
    table = LoraTable(SLOTS, RANK, 64)
    parts = {name: (size, slice(0, size)) for name, size in SIZES.items()}
    layer = table.layer(IN, slice(0, IN), parts)
    taken = table.allocate(dtype, CPU)
    assert taken == 4 * SLOTS * RANK * (3 * IN + sum(SIZES.values()))
    return table, layer


def adapter(layer: LoraLayer, seed: int, rank: int, parts: tuple[int, ...]) -> list[LoraPair]:
    generator = torch.Generator().manual_seed(seed)
    sizes = list(SIZES.values())
    return [
        LoraPair(
            layer,
            part,
            torch.randn(rank, IN, generator=generator),
            torch.randn(rank, sizes[part], generator=generator),
        )
        for part in parts
    ]


def delta(pairs: list[LoraPair], x: Tensor) -> Tensor:
    """[outputs] of one token."""
    outputs = [torch.zeros(size) for size in SIZES.values()]
    for pair in pairs:
        outputs[pair.part] = x @ pair.a.T @ pair.b
    return torch.cat(outputs)


@pytest.mark.parametrize("static", [False, True], ids=["cpu", "as an accelerator"])
@pytest.mark.parametrize("token_slots", [[0, -1, 2, 0, 1], [2, 2], [1, -1, -1], [0]])
def test_each_token_gets_its_own(token_slots: list[int], static: bool) -> None:
    table, layer = make()
    adapters = {
        0: adapter(layer, 0, 2, (0, 2)),
        1: adapter(layer, 1, 4, (1,)),
        2: adapter(layer, 2, 3, (0, 1, 2)),
    }
    for slot, pairs in adapters.items():
        table.put(slot, adapter(layer, 9, 4, (0, 1, 2)))  # what stood there before
        table.put(slot, pairs)
    if static:
        table._foreign = torch.empty(64, SLOTS * RANK, dtype=torch.bool)
    x = torch.randn(len(token_slots), IN)
    before = torch.randn(len(token_slots), sum(SIZES.values()))
    y = before.clone()
    table.plan(sorted(set(token_slots)), torch.tensor(token_slots, dtype=torch.int32))
    layer.add_(y, x)
    for index, slot in enumerate(token_slots):
        if slot < 0:
            assert torch.equal(y[index], before[index]), "not a bit of the base is touched"
        else:
            torch.testing.assert_close(y[index], before[index] + delta(adapters[slot], x[index]))


def test_steps_without_adapters_skip_lora() -> None:
    table, layer = make()
    with torch.inference_mode():
        layer.a.fill_(torch.nan)
    y = torch.zeros(2, sum(SIZES.values()))
    table.plan([-1], None)
    layer.add_(y, torch.ones(2, IN))
    assert not y.any()


def test_an_overflow_of_one_adapter_stays_its_own() -> None:
    table, layer = make()
    table.put(0, adapter(layer, 0, 2, (0,)))
    huge = [LoraPair(layer, 0, torch.full((1, IN), 3e38), torch.ones(1, 8))]
    table.put(1, huge)
    y = torch.zeros(3, sum(SIZES.values()))
    table.plan([-1, 0, 1], torch.tensor([-1, 0, 1], dtype=torch.int32))
    layer.add_(y, torch.ones(3, IN))
    assert torch.isfinite(y[:2]).all()
    assert not torch.isfinite(y[2]).all()


def test_a_model_in_bfloat16_gets_a_product_in_float32() -> None:
    torch.manual_seed(0)
    table, layer = make(torch.bfloat16)
    assert layer.a.dtype is torch.float32
    pairs = adapter(layer, 0, 4, (0, 1, 2))
    table.put(0, pairs)
    x = torch.randn(5, IN).bfloat16()
    y = torch.zeros(5, sum(SIZES.values()), dtype=torch.bfloat16)
    table.plan([0], torch.zeros(5, dtype=torch.int32))
    layer.add_(y, x)
    expected = torch.stack([delta(pairs, token.float()) for token in x])
    assert torch.equal(y, expected.bfloat16())
