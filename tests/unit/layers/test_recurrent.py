"""Operations over states, against transformers' functions, and however a text is cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    causal_conv1d_fn,
    torch_recurrent_gated_delta_rule,
)

from tests.tools.state_steps import Run, make_states, run_mixed, run_whole
from tgi_cli.attention import StateCache, StateTensor
from tgi_cli.kernels import without_cpp_kernels
from tgi_cli.layers.gates import DeltaGates, by_rows
from tgi_cli.layers.recurrent import causal_conv, gated_delta, gated_norm, selective_scan

LENGTHS = (1, 2, 3, 40, 17, 9)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, params=["kernels", "reference"])
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if request.param == "kernels" else without_cpp_kernels():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "bias", "activation"), [(4, False, "silu"), (3, True, None), (2, True, "silu")]
)
def test_a_convolution_is_transformers(
    dtype: torch.dtype, size: int, bias: bool, activation: str | None
) -> None:
    channels = 24
    x = torch.randn(sum(LENGTHS), 3 * channels).to(dtype)[:, channels : 2 * channels]
    weight, add = torch.randn(size, channels), torch.randn(channels) if bias else None

    def conv(states: StateCache) -> Run:
        def run(rows: Tensor) -> Tensor:
            part = x if len(rows) == len(x) else x[rows]
            return causal_conv(part, weight, add, activation, states, 0)

        return run

    state = StateTensor("conv", (size - 1, channels), dtype)
    states = make_states(state)
    whole = run_whole(states, LENGTHS, conv(states))
    wanted = [
        causal_conv1d_fn(text.T[None].float(), weight.T, add, activation)[0].T
        for text in x.split(LENGTHS)
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(whole.float(), torch.cat(wanted), atol=1e-5, rtol=tolerance)
    for seed in range(4):
        states = make_states(state)
        assert torch.equal(run_mixed(states, LENGTHS, conv(states), seed), whole)


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_gated_delta_rule_is_transformers(heads: int, channels: bool, factor: float) -> None:
    key_heads, key_dim, value_dim, tokens = 2, 16, 24, sum(LENGTHS)
    query, key = torch.randn(2, tokens, key_heads, key_dim)
    value, b = torch.randn(tokens, heads, value_dim), torch.randn(tokens, heads)
    numbers = heads * (key_dim if channels else 1)
    a, bias, rate = torch.randn(tokens, numbers), torch.randn(numbers), torch.rand(heads) * 3
    gates = DeltaGates(rate, bias, channels, factor=factor)

    def delta(states: StateCache) -> Run:
        def run(rows: Tensor) -> Tensor:
            qkv = (query[rows], key[rows], value[rows])
            return gated_delta(qkv, a[rows], b[rows], gates, states, 0)

        return run

    state = StateTensor("recurrent", (heads, key_dim, value_dim), torch.float32)
    states = make_states(state)
    whole = run_whole(states, LENGTHS, delta(states))
    shared = heads // key_heads
    g = -rate[:, None] * F.softplus(a + bias).unflatten(1, (heads, -1))
    rule = chunk_kimi_delta_attention if channels else torch_recurrent_gated_delta_rule
    wanted, start = [], 0
    for slot, length in enumerate(LENGTHS):
        rows = slice(start, start + length)
        output, last = rule(
            query[rows].repeat_interleave(shared, 1)[None],
            key[rows].repeat_interleave(shared, 1)[None],
            value[rows][None],
            g=g[rows][None] if channels else g[rows][None, ..., 0],
            beta=b[rows].sigmoid()[None] * factor,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        wanted.append(output[0])
        kept = states.tensors[0]["recurrent"][slot]
        torch.testing.assert_close(kept, last[0], atol=1e-5, rtol=1e-4)
        start += length
    torch.testing.assert_close(whole, torch.cat(wanted), atol=1e-5, rtol=1e-4)
    for seed in range(4):
        states = make_states(state)
        assert torch.equal(run_mixed(states, LENGTHS, delta(states), seed), whole)


def test_a_bounded_decay_is_at_least_its_floor() -> None:
    rate, bias, a = torch.rand(3) + 0.5, torch.randn(12), torch.randn(5, 12)
    gates = DeltaGates(rate, bias, channels=True, form="sigmoid", floor=-5.0)
    wanted = torch.exp(-5 * torch.sigmoid((a + bias) * rate.repeat_interleave(4)))
    torch.testing.assert_close(gates.decays(a), wanted)
    assert gates.decays(torch.full((1, 12), 1e4)).min() == torch.exp(torch.tensor(-5.0))


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("gate_first", [False, True])
def test_a_gated_norm_does_not_depend_on_other_rows(activation: str, gate_first: bool) -> None:
    x, gate, weight = torch.randn(7, 3, 10), torch.randn(7, 3, 10), torch.randn(10)
    act = getattr(F, activation)(gate)
    wide = x * act if gate_first else x
    wanted = F.rms_norm(wide, (10,), weight, 1e-5) * (1 if gate_first else act)
    together = gated_norm(x, gate, weight, 1e-5, activation, gate_first=gate_first)
    torch.testing.assert_close(together, wanted, atol=1e-5, rtol=1e-5)
    for t in range(7):
        alone = gated_norm(
            x[t : t + 1], gate[t : t + 1], weight, 1e-5, activation, gate_first=gate_first
        )
        assert torch.equal(alone[0], together[t])


def test_elementwise_functions_round_a_row_alike_beside_any_others() -> None:
    x = torch.randn(40, 5)
    for function in (torch.sigmoid, torch.exp, F.softplus, F.silu):
        together = by_rows(function, x)
        for t in range(40):
            assert torch.equal(by_rows(function, x[t : t + 1])[0], together[t])


@pytest.mark.parametrize(("channels", "size"), [(48, 16), (7, 3)])
def test_a_selective_scan_is_transformers(channels: int, size: int) -> None:
    tokens = sum(LENGTHS)
    x, steps = torch.randn(tokens, channels), torch.rand(tokens, channels)
    a, (b, c) = -3 * torch.rand(channels, size), torch.randn(2, tokens, size)

    def scan(states: StateCache) -> Run:
        return lambda rows: selective_scan(x[rows], steps[rows], a, b[rows], c[rows], states, 0)

    state = StateTensor("recurrent", (channels, size), torch.float32)
    states = make_states(state)
    whole = run_whole(states, LENGTHS, scan(states))
    texts = zip(*(each.split(LENGTHS) for each in (x, steps, b, c)), strict=True)
    wanted = [
        mamba_selective_scan(value.T[None], step.T[None], a, key.T[None], query.T[None])[0].T
        for value, step, key, query in texts
    ]
    torch.testing.assert_close(whole, torch.cat(wanted), atol=2e-5, rtol=1e-4)
    for seed in range(4):
        states = make_states(state)
        assert torch.equal(run_mixed(states, LENGTHS, scan(states), seed), whole)
