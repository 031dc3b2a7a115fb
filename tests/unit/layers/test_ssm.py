"""Mamba-2's state space model, against transformers' chunked form, however a text is cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHRMSNormGated,
    mamba2_chunk_scan,
)

from tests.tools.state_steps import Run, make_states, run_mixed, run_whole
from tests.tools.thread_shards import on_shards
from tgi_cli.attention import StateCache, StateTensor
from tgi_cli.device.distributed import Shard
from tgi_cli.kernels import without_cpp_kernels
from tgi_cli.layers.base import Build
from tgi_cli.layers.gates import StepSizes
from tgi_cli.layers.recurrent import state_space
from tgi_cli.layers.ssm import GroupNorm
from tgi_cli.quantization import Unquantized

LENGTHS = (1, 2, 3, 40, 17, 9)
TOKENS = sum(LENGTHS)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, params=["kernels", "reference"])
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if request.param == "kernels" else without_cpp_kernels():
        yield


@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("bounds", [(0.0, float("inf")), (0.3, 1.2)])
def test_a_state_space_model_is_transformers(groups: int, bounds: tuple[float, float]) -> None:
    heads, head_dim, state_size = 6, 12, 20
    x, dt = torch.randn(TOKENS, heads, head_dim), torch.randn(TOKENS, heads)
    b, c = torch.randn(2, TOKENS, groups, state_size)
    rate, bias, skip = torch.rand(heads) + 0.5, torch.randn(heads), torch.randn(heads)
    sizes = StepSizes(rate, bias, skip, *bounds)

    def ssm(states: StateCache) -> Run:
        def run(rows: Tensor) -> Tensor:
            return state_space(x[rows], b[rows], c[rows], dt[rows], sizes, states, 0)

        return run

    state = StateTensor("recurrent", (heads, state_size, head_dim), torch.float32)
    states = make_states(state)
    whole = run_whole(states, LENGTHS, ssm(states))
    wanted, start = [], 0
    for slot, length in enumerate(LENGTHS):
        rows = slice(start, start + length)
        output, last = mamba2_chunk_scan(
            x[None, rows],
            dt[None, rows],
            -rate,
            b[None, rows],
            c[None, rows],
            chunk_size=16,
            D=skip,
            dt_bias=bias,
            dt_softplus=True,
            dt_limit=bounds,
            return_final_states=True,
        )
        wanted.append(output[0])
        kept = states.tensors[0]["recurrent"][slot]
        torch.testing.assert_close(kept, last[0].mT, atol=1e-5, rtol=1e-4)
        start += length
    torch.testing.assert_close(whole, torch.cat(wanted), atol=2e-5, rtol=1e-4)
    for seed in range(4):
        states = make_states(state)
        assert torch.equal(run_mixed(states, LENGTHS, ssm(states), seed), whole)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_shards_may_have_parts_of_a_normed_group(groups: int, shards: int) -> None:
    size, heads = 48, 8
    x, gate, weight = torch.randn(5, size), torch.randn(5, size), torch.randn(size)
    norm: Any = NemotronHRMSNormGated(size, size // groups, 1e-5)  # type: ignore[no-untyped-call]
    norm.weight.data.copy_(weight)

    def work(shard: Shard) -> Tensor:
        build = Build(torch.float32, Unquantized(), shard)
        layer = GroupNorm(build, size, groups, heads, 1e-5)
        layer.materialize(torch.device("cpu"))
        for slot in layer.slots("norm"):
            slot.fill(weight)
        own = shard.share(size, heads)
        normed: Tensor = layer(x[:, own], gate[:, own])
        return normed

    got = torch.cat(on_shards(shards, work), dim=1)
    torch.testing.assert_close(got, norm(x, gate).detach(), atol=1e-5, rtol=1e-5)
