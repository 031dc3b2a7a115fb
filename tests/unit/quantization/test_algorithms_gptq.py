"""GPTQ against the same algorithm without its shortcuts, and against rounding to nearest."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import pytest
import torch
from torch import Tensor

from tgi_cli.quantization.algorithms import grid
from tgi_cli.quantization.algorithms.gptq import gptq
from tgi_cli.quantization.algorithms.grid import rtn
from tgi_cli.quantization.algorithms.hessian import Hessian
from tgi_cli.quantization.algorithms.recipe import QuantizationResult, Recipe

PLAIN = Recipe(method="gptq", group_size=32, group_aware=False)


def correlated(count: int, size: int, seed: int = 0) -> Tensor:
    """Inputs that a few directions make up for the most part, some of them much larger."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.empty(*shape).normal_(generator=generator)

    rank = max(4, size // 8)
    few = normal(count, rank) @ normal(rank, size) / rank**0.5
    x: Tensor = (few + 0.1 * normal(count, size)) * normal(size).exp()
    return x


def random_weight(rows: int, inputs: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(rows, inputs).normal_(generator=generator) * 0.05


def seen(x: Tensor, dtype: torch.dtype = torch.float32) -> Hessian:
    hessian = Hessian(x.shape[1], dtype=dtype)
    for start in range(0, len(x), 200):
        hessian.add(x[start : start + 200])
    return hessian


def column_by_column(weight: Tensor, x: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Codes and groups as equation 2 and 3 of the paper have it: after each column all others
    are changed, and its row and column taken out of the inverse. In float64."""
    inputs = weight.shape[1]
    size = recipe.group_size if recipe.group_size > 0 else inputs
    h = 2 / len(x) * x.double().T @ x.double()
    importance = h.diagonal().clone()
    groups = torch.arange(inputs) // size
    if recipe.desc_act:
        order = sorted(range(inputs), key=lambda i: -float(importance[i]))
        if not recipe.static_groups:
            groups[torch.tensor(order)] = groups.clone()
    elif recipe.group_aware:
        largest = [float(importance[groups == g].max()) for g in range(int(groups.max()) + 1)]
        order = sorted(
            range(inputs), key=lambda i: (-largest[int(groups[i])], -float(importance[i]))
        )
    else:
        order = list(range(inputs))
    inverse = torch.linalg.inv(h + recipe.percdamp * importance.mean() * torch.eye(inputs).double())
    weight, codes = weight.double(), torch.zeros(weight.shape, dtype=torch.uint8)
    grids = {
        g: grid.find_grid(weight[:, groups == g], recipe)
        for g in set(groups.tolist())
        if recipe.static_groups
    }
    for i in order:
        g = int(groups[i])
        if g not in grids:
            grids[g] = grid.find_grid(weight[:, groups == g], recipe)
        scales, zeros = grids[g]
        code = grid.quantize(weight[:, i], scales, zeros, recipe.bits)
        codes[:, i] = code.to(torch.uint8)
        error = (weight[:, i] - (code - zeros) * scales) / inverse[i, i]
        weight = weight - error[:, None] * inverse[i]
        inverse = inverse - inverse[:, i : i + 1] * inverse[i] / inverse[i, i]
        inverse[i, i] = 1.0  # is not used again
    return codes, groups


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"group_size": -1},
        {"group_size": 64},
        {"group_size": 256},
        {"group_size": 48},
        {"bits": 2, "sym": False},
        {"bits": 3},
        {"bits": 8, "sym": False, "format": "gptq_v2"},
        {"desc_act": True},
        {"desc_act": True, "sym": False, "group_size": 48},
        {"desc_act": True, "static_groups": True},
        {"static_groups": True},
        {"group_aware": True},
        {"group_aware": True, "group_size": 48},
        {"group_aware": True, "group_size": -1},
        {"group_aware": True, "static_groups": True, "mse": True},
        {"mse": True, "sym": False, "bits": 3},
        {"percdamp": 0.1},
    ],
    ids=str,
)
def test_gptq_equals_the_papers_algorithm(changes: dict[str, object]) -> None:
    recipe = replace(PLAIN, **changes)  # type: ignore[arg-type]
    x, weight = correlated(600, 320), random_weight(12, 320)
    hessian = seen(x, torch.float64)
    codes, groups = column_by_column(weight, x, recipe)
    result = gptq(weight, hessian, recipe)
    assert torch.equal(result.groups.long(), groups)
    assert torch.equal(result.codes, codes)
    assert result.note == ""
    in_float32 = gptq(weight, seen(x), recipe)
    # A code in the middle between two may fall to either side, and the rest of its row follows.
    assert in_float32.loss == pytest.approx(result.loss, rel=0.05)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_gptq_has_a_much_smaller_error_than_rounding(bits: int, group_size: int) -> None:
    recipe = replace(PLAIN, bits=bits, group_size=group_size, desc_act=True)
    x, weight = correlated(2000, 256), random_weight(64, 256)
    hessian = seen(x)
    result, nearest = gptq(weight, hessian, recipe), rtn(weight, recipe, hessian)
    assert result.loss < nearest.loss / 4
    assert int(result.codes.max()) < 2**bits


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_the_loss_is_that_of_the_outputs(method: str) -> None:
    x, weight = correlated(500, 96), random_weight(20, 96)
    hessian = seen(x)
    if method == "gptq":
        result = gptq(weight, hessian, PLAIN)
    else:
        result = rtn(weight, replace(PLAIN, method="rtn"), hessian)
    exact = x.double() @ weight.double().T
    error = x.double() @ grid.dequantize(result).double().T - exact
    share = float(error.square().mean() / exact.square().mean())
    assert result.loss == pytest.approx(share, rel=1e-3)


def test_reordering_helps_with_unequal_inputs() -> None:
    x, weight = correlated(2000, 256), random_weight(64, 256)
    x[:, ::37] *= 30
    hessian = seen(x)
    plain = gptq(weight, hessian, replace(PLAIN, group_size=64)).loss
    aware = gptq(weight, hessian, replace(PLAIN, group_size=64, group_aware=True)).loss
    ordered = gptq(weight, hessian, replace(PLAIN, group_size=64, desc_act=True)).loss
    assert aware < 0.9 * plain
    assert ordered < 0.9 * plain


def same(a: QuantizationResult, b: QuantizationResult) -> bool:
    assert a.zeros is not None
    assert b.zeros is not None
    return (
        torch.equal(a.codes, b.codes)
        and torch.equal(a.scales, b.scales)
        and torch.equal(a.zeros, b.zeros)
        and torch.equal(a.groups, b.groups)
    )


def test_gptq_is_deterministic_and_does_not_modify_its_inputs() -> None:
    x, weight = correlated(500, 160), random_weight(16, 160).bfloat16()
    kept, hessian = weight.clone(), seen(x)
    matrix = hessian.matrix()
    recipe = replace(PLAIN, desc_act=True, sym=False)
    assert same(gptq(weight, hessian, recipe), gptq(weight, hessian, recipe))
    assert torch.equal(weight, kept)
    assert torch.equal(hessian.matrix(), matrix)


def test_weights_of_unused_inputs_are_rounded() -> None:
    x, weight = correlated(500, 96), random_weight(16, 96)
    x[:, 40:44] = 0
    hessian = seen(x)
    result = gptq(weight, hessian, replace(PLAIN, static_groups=True))
    nearest = rtn(weight, replace(PLAIN, method="rtn"))
    assert torch.equal(result.codes[:, 40:44], nearest.codes[:, 40:44])
    assert result.loss < rtn(weight, PLAIN, hessian).loss / 2


def test_fewer_inputs_than_columns_are_enough() -> None:
    x, weight = correlated(40, 256), random_weight(16, 256)
    hessian = seen(x)
    result = gptq(weight, hessian, PLAIN)
    assert result.note == ""
    assert result.loss < rtn(weight, PLAIN, hessian).loss / 4


def indefinite(size: int, off: float) -> Hessian:
    class Indefinite(Hessian):
        def matrix(self) -> torch.Tensor:
            whole = torch.eye(size)
            whole[0, 1] = whole[1, 0] = off
            return whole

    hessian = Indefinite(size)
    hessian.add(torch.eye(size))
    return hessian


def test_a_hessian_that_cannot_be_factored_is_damped_more_and_more() -> None:
    weight = random_weight(16, 64)
    result = gptq(weight, indefinite(64, 2.5), PLAIN)
    assert result.note == "percdamp was raised to 10"
    assert bool(grid.dequantize(result).isfinite().all())


def test_gptq_falls_back_to_rounding_with_a_note() -> None:
    weight = random_weight(16, 64)
    nearest = rtn(weight, PLAIN)
    infinite = torch.ones(10, 64)
    infinite[3, 5] = torch.inf
    for hessian, why in (
        (indefinite(64, 1e6), "the Hessian could not be factored"),
        (Hessian(64), "there were no inputs"),
        (seen(infinite), "inputs were not finite"),
    ):
        result = gptq(weight, hessian, PLAIN)
        assert result.note == f"rounded to nearest: {why}"
        assert same(result, nearest)
    assert isnan(gptq(weight, Hessian(64), PLAIN).loss)


def test_a_hessian_does_not_depend_on_the_batches_of_inputs() -> None:
    x = correlated(100, 1100)
    x[40:] = x[40:].bfloat16()
    whole, parts = seen(x), Hessian(1100)
    parts.add(x[:40].view(2, 20, 1100))
    parts.add(x[40:].bfloat16())
    parts.add(x[:0])
    assert parts.count == whole.count == 100
    exact = 2 / 100 * x.double().T @ x.double()
    for hessian in (whole, parts):
        torch.testing.assert_close(hessian.matrix().double(), exact, rtol=1e-4, atol=1e-4)
