from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tgi_cli.errors import ModelError, UnsupportedModelError
from tgi_cli.layers import Build, GatedMLP, RMSNorm, RotaryEmbedding, Temperature, rotary
from tgi_cli.layers.ops import rotate_
from tgi_cli.quantization import Unquantized

CPU = torch.device("cpu")


def make_norm(dtype: torch.dtype, weight: Tensor) -> RMSNorm:
    norm = RMSNorm(Build(dtype, Unquantized()), len(weight), 1e-5)
    norm.materialize(CPU)
    (slot,) = norm.slots("norm")
    slot.fill(weight)
    return norm


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_rms_norm_adds_the_residual_first(scale: float) -> None:
    weight, x, residual = torch.randn(40), scale * torch.randn(5, 40), scale * torch.randn(5, 40)
    total = x + residual
    wanted = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    norm = make_norm(torch.float32, weight)
    normed, summed = norm.add(x.clone(), residual.clone())
    torch.testing.assert_close(normed, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(summed, total)
    first, same = norm.add(total, None)
    torch.testing.assert_close(first, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(same, total)  # the residual is not changed by being normalized


def test_rms_norm_computes_in_float32() -> None:
    weight, x = torch.ones(4096), (300 * torch.randn(3, 4096)).bfloat16()
    wide = x.float()
    wanted = wide / wide.square().mean(-1, keepdim=True).sqrt()
    normed = make_norm(torch.bfloat16, weight)(x)
    torch.testing.assert_close(normed.float(), wanted, atol=0, rtol=2**-8)


def test_rotation_turns_each_pair_by_its_angle() -> None:
    rope = RotaryEmbedding(8, {"rope_theta": 100.0}, 64, torch.float32, CPU)
    heads = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 5, 63])
    rotated = heads.clone()
    rotate_(rotated, *rope(positions))
    for token, position in enumerate(positions.tolist()):
        for pair in range(4):
            turn = torch.polar(torch.tensor(1.0), torch.tensor(position * 100.0 ** (-pair / 4)))
            before = torch.complex(heads[token, :, pair], heads[token, :, pair + 4])
            after = torch.complex(rotated[token, :, pair], rotated[token, :, pair + 4])
            torch.testing.assert_close(after, before * turn, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_that_are_kept_are_those_that_are_computed(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [[0], [3, 255], [256], [1000, 7, 511], [rotary.TABLE_POSITIONS - 1, 0], [20, 10**6]]
    kept = RotaryEmbedding(32, {"rope_theta": 1e4}, 1 << 20, dtype, CPU)
    found = [kept(torch.tensor(positions)) for positions in steps]
    assert [part.shape for part in kept(torch.zeros(0, dtype=torch.int64))] == [(0, 1, 32)] * 2
    monkeypatch.setattr(rotary, "TABLE_POSITIONS", 0)
    for positions, (cosines, sines) in zip(steps, found, strict=True):
        wanted = kept(torch.tensor(positions))
        assert torch.equal(cosines, wanted[0])
        assert torch.equal(sines, wanted[1])


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_angles_of_all_served_positions_are_kept_where_the_host_would_wait(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, for which a limit for CPUs is a stand-in."""
    monkeypatch.setattr(rotary, "WHOLE_TABLE_BYTES", {"cpu": most})
    monkeypatch.setattr(rotary, "TABLE_POSITIONS", 0)
    given: Any = 32, {"rope_theta": 1e4}, 1 << 20, torch.bfloat16, CPU
    rope, computed = RotaryEmbedding(*given, 2000), RotaryEmbedding(*given)
    positions = torch.tensor([0, 7, 1999, 2000])
    calls = []
    compute = RotaryEmbedding._compute
    monkeypatch.setattr(
        RotaryEmbedding, "_compute", lambda *given: calls.append(1) or compute(*given)
    )
    found = rope(positions)
    assert len(calls) == (most == 0)
    for kept, wanted in zip(found, computed(positions), strict=True):
        assert torch.equal(kept, wanted)


@pytest.mark.parametrize("kind", ["ntk", "xpos"])
def test_unknown_rope_scaling_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{kind}' is not supported") as caught:
        RotaryEmbedding(8, {"rope_theta": 1e4, "rope_type": kind}, 64, torch.float32, CPU)
    assert "llama3" in caught.value.remedy


def test_a_missing_rope_parameter_is_named() -> None:
    with pytest.raises(ModelError, match="'llama3' has no usable value: 'low_freq_factor'"):
        RotaryEmbedding(
            8, {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8}, 64, torch.float32, CPU
        )


def test_queries_grow_by_the_logarithm_of_the_periods_behind_them() -> None:
    factors = Temperature(0.1, 4.0)(torch.tensor([0, 2, 3, 6, 7, 1000]))
    wanted = [1 + 0.1 * math.log1p(periods) for periods in (0, 0, 1, 1, 2, 250)]
    torch.testing.assert_close(factors.flatten(), torch.tensor(wanted))


def test_gates_below_the_cutoff_of_their_token_count_as_zero() -> None:
    mlp = GatedMLP(Build(torch.float32, Unquantized()), 8, 8, False, "relu", sparsity=0.9)
    mlp.gate_up_proj.materialize(CPU)
    mlp.down_proj.materialize(CPU)
    with torch.no_grad():
        mlp.gate_up_proj.weight.copy_(torch.cat((torch.eye(8), torch.eye(8))))
        mlp.down_proj.weight.copy_(torch.eye(8))
    gates = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 8.0], [1.0] * 8])
    cutoff = gates.mean(-1, True) + 1.2815516 * gates.std(-1, correction=0, keepdim=True)
    torch.testing.assert_close(mlp(gates), (gates - cutoff).relu() * gates)
    assert mlp(gates)[0].count_nonzero() == 1
