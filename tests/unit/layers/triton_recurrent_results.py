"""Triton's kernels of layers with a state against their references, and however a text is cut.

Not collected by itself: see test_triton.py. On a machine with CUDA it may be run as it stands,
and then tests what the compiler made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.tools.state_steps import Run, make_states, run_mixed, run_whole
from tgi_cli.attention import StateCache, StateMetadata, StateTensor
from tgi_cli.kernels.recurrence import ConvolutionLayer, RecurrenceLayer
from tgi_cli.layers import triton_recurrent, triton_scan
from tgi_cli.layers.gates import DeltaGates, GivenGates, StepSizes
from tgi_cli.layers.recurrent import causal_conv, gated_delta, selective_scan, state_space

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
LENGTHS = (1, 2, 9, 4)
TOKENS = sum(LENGTHS)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 6e-2}
"""The references round once; the interpreter rounds to bfloat16 downwards."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def take(x: Tensor, rows: Tensor) -> Tensor:
    """These rows: a view where they follow each other, which keeps strides."""
    first, last = int(rows[0]), int(rows[-1])
    return x[first : last + 1] if last - first + 1 == len(rows) else x[rows]


def on_device(rule: RecurrenceLayer) -> RecurrenceLayer:
    """With its parameters where the kernels run."""
    named = {"rate": rule.rate, "bias": rule.bias, "skip": rule.skip}
    given = {name: each.to(DEVICE) for name, each in named.items() if each is not None}
    return replace(rule, **given)  # type: ignore[arg-type]


def check(
    state: StateTensor,
    kernel: Callable[[StateCache], Run],
    reference: Callable[[StateCache], Run],
    dtype: torch.dtype,
) -> None:
    """Outputs and states are the reference's, and the same to the bit in other steps."""
    states, wanted_states = make_states(state, device=DEVICE), make_states(state)
    ours = run_whole(states, LENGTHS, kernel(states))
    wanted = run_whole(wanted_states, LENGTHS, reference(wanted_states))
    limit = TOLERANCES[dtype]
    assert ours.dtype == wanted.dtype == dtype
    torch.testing.assert_close(ours.float().cpu(), wanted.float(), atol=limit, rtol=limit)
    kept, wanted_kept = (each.tensors[0][state.name] for each in (states, wanted_states))
    torch.testing.assert_close(
        kept.float().cpu(), wanted_kept.float(), atol=limit, rtol=limit, equal_nan=True
    )
    states = make_states(state, device=DEVICE)
    assert torch.equal(run_mixed(states, LENGTHS, kernel(states)), ours)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("size", "channels", "bias", "activation"),
    [(4, 300, False, "silu"), (3, 24, True, None), (2, 16, True, "silu"), (8, 20, True, None)],
)
def test_convolution(
    dtype: torch.dtype, size: int, channels: int, bias: bool, activation: str | None
) -> None:
    x = torch.randn(TOKENS, 3 * channels).to(dtype)[:, channels : 2 * channels]
    weight, add = torch.randn(size, channels), torch.randn(channels) if bias else None

    def kernel(states: StateCache) -> Run:
        added = None if add is None else add.to(DEVICE)
        layer = ConvolutionLayer(weight.to(DEVICE), added, activation)
        given, own = x.to(DEVICE), states.tensors[0]["conv"]
        return lambda rows: triton_recurrent.convolution(
            layer, take(given, rows), own, states.planned
        )

    def reference(states: StateCache) -> Run:
        return lambda rows: causal_conv(x[rows], weight, add, activation, states, 0)

    check(StateTensor("conv", (size - 1, channels), dtype), kernel, reference, dtype)


def test_a_long_prompt_is_convolved_in_tiles() -> None:
    """Of which the first alone reads the state, and writes it, to the same slot."""
    tokens = 64 + 20
    x, weight = torch.randn(tokens, 8), torch.randn(4, 8)
    state = StateTensor("conv", (3, 8), torch.float32)
    states, wanted_states = make_states(state, device=DEVICE), make_states(state)
    layer = ConvolutionLayer(weight.to(DEVICE))
    given, own = x.to(DEVICE), states.tensors[0]["conv"]
    ours = run_whole(
        states,
        [tokens],
        lambda rows: triton_recurrent.convolution(layer, take(given, rows), own, states.planned),
    )
    wanted = run_whole(
        wanted_states,
        [tokens],
        lambda rows: causal_conv(x[rows], weight, None, None, wanted_states, 0),
    )
    torch.testing.assert_close(ours.cpu(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(own[0].cpu(), x[-3:])
    slots = ([tokens], [0], [0])
    states.plan(StateMetadata.of(*slots, DEVICE, {0: (70, 5)}))
    again = triton_recurrent.convolution(layer, given, own, states.planned).cpu()
    assert torch.equal(again[3:], ours[3:].cpu())
    assert not torch.equal(again[:3], ours[:3].cpu()), "it began with the state"
    assert torch.equal(own[5].cpu(), x[67:70])


def gates_of(kind: str, heads: int, key_dim: int) -> tuple[DeltaGates | GivenGates, int]:
    """Gates, and the numbers of a token that they take."""
    channels = "channels" in kind
    numbers = heads * (key_dim if channels else 1)
    rate, bias = torch.rand(heads) * 3 + 0.1, torch.randn(numbers)
    if "given" in kind:
        return GivenGates(heads, channels), numbers
    if "bounded" in kind:
        return DeltaGates(rate, bias, channels, form="sigmoid", floor=-5.0), numbers
    return DeltaGates(rate, bias, channels, factor=2.0 if "doubled" in kind else 1.0), numbers


@pytest.mark.parametrize(
    ("kind", "heads", "key_dim", "value_dim", "dtype"),
    [
        ("softplus", 4, 16, 24, torch.bfloat16),
        ("softplus, doubled", 2, 12, 9, torch.float32),
        ("softplus, channels", 2, 16, 16, torch.bfloat16),
        ("bounded, channels", 2, 10, 16, torch.float32),
        ("given", 4, 16, 8, torch.float32),
        ("given, channels", 2, 8, 12, torch.float32),
        ("softplus", 2, 130, 12, torch.float32),  # more than one block of a state's columns
    ],
)
def test_gated_delta(
    kind: str, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    key_heads = 2
    query, key = torch.randn(2, TOKENS, key_heads, key_dim).to(dtype)
    wide = torch.randn(TOKENS, heads * value_dim + 7).to(dtype)
    value = wide[:, 7:].unflatten(1, (heads, value_dim))
    gates, numbers = gates_of(kind, heads, key_dim)
    a, b = torch.randn(TOKENS, numbers).to(dtype), torch.randn(TOKENS, heads).to(dtype)
    if "given" in kind:
        a, b = -a.float().abs(), b.float().sigmoid()
    rule = gates.layer(key_heads, key_dim, value_dim, 1e-6)

    def kernel(states: StateCache) -> Run:
        own, layer = states.tensors[0]["recurrent"], on_device(rule)
        given = [each.to(DEVICE) for each in (query, key, value, a, b)]

        def run(rows: Tensor) -> Tensor:
            *qkv, decay, beta = (take(each, rows) for each in given)
            return triton_recurrent.recurrence(layer, tuple(qkv), decay, beta, own, states.planned)

        return run

    def reference(states: StateCache) -> Run:
        def run(rows: Tensor) -> Tensor:
            qkv = (query[rows].float(), key[rows].float(), value[rows].float())
            return gated_delta(qkv, a[rows].float(), b[rows].float(), gates, states, 0).to(dtype)

        return run

    state = StateTensor("recurrent", (heads, key_dim, value_dim), torch.float32)
    check(state, kernel, reference, dtype)


@pytest.mark.parametrize(
    ("heads", "groups", "state_size", "head_dim", "bounds", "dtype"),
    [
        (4, 2, 16, 8, (0.0, float("inf")), torch.bfloat16),
        (2, 1, 24, 10, (0.3, 0.9), torch.float32),
        (2, 2, 200, 11, (0.001, float("inf")), torch.float32),
    ],
)
def test_state_space(
    heads: int,
    groups: int,
    state_size: int,
    head_dim: int,
    bounds: tuple[float, float],
    dtype: torch.dtype,
) -> None:
    x, dt = torch.randn(TOKENS, heads, head_dim).to(dtype), torch.randn(TOKENS, heads).to(dtype)
    b, c = torch.randn(2, TOKENS, groups, state_size).to(dtype)
    sizes = StepSizes(torch.rand(heads) + 0.5, torch.randn(heads), torch.randn(heads), *bounds)
    model = sizes.layer(groups, state_size, head_dim)

    def kernel(states: StateCache) -> Run:
        own, layer = states.tensors[0]["recurrent"], on_device(model)
        given = [each.to(DEVICE) for each in (c, b, x, dt)]

        def run(rows: Tensor) -> Tensor:
            *qkv, decay = (take(each, rows) for each in given)
            return triton_recurrent.recurrence(layer, tuple(qkv), decay, None, own, states.planned)

        return run

    def reference(states: StateCache) -> Run:
        def run(rows: Tensor) -> Tensor:
            parts = (each[rows].float() for each in (x, b, c, dt))
            return state_space(*parts, sizes, states, 0).to(dtype)

        return run

    state = StateTensor("recurrent", (heads, state_size, head_dim), torch.float32)
    check(state, kernel, reference, dtype)


@pytest.mark.parametrize(("channels", "size"), [(40, 16), (130, 12), (3, 1)])
def test_selective_scan(channels: int, size: int) -> None:
    x = torch.randn(TOKENS, 2 * channels)[:, channels:]
    steps, a = torch.rand(TOKENS, channels), -torch.rand(channels, size) * 4
    b, c = torch.randn(2, TOKENS, size)

    def kernel(states: StateCache) -> Run:
        own, rates = states.tensors[0]["recurrent"], a.to(DEVICE)
        given = [each.to(DEVICE) for each in (x, steps, b, c)]

        def run(rows: Tensor) -> Tensor:
            x, steps, b, c = (take(each, rows) for each in given)
            return triton_scan.selective_scan(x, steps, rates, b, c, own, states.planned)

        return run

    def reference(states: StateCache) -> Run:
        def run(rows: Tensor) -> Tensor:
            return selective_scan(x[rows], steps[rows], a, b[rows], c[rows], states, 0)

        return run

    state = StateTensor("recurrent", (channels, size), torch.float32)
    check(state, kernel, reference, torch.float32)


def test_extreme_gates_stay_numbers() -> None:
    """A softplus of large and of very negative numbers, and decays of 0 and 1."""
    rule = DeltaGates(torch.tensor([1.0]), torch.tensor([0.0])).layer(1, 4, 4, 1e-6)
    state = StateTensor("recurrent", (1, 4, 4), torch.float32)
    a = torch.tensor([[1e4], [-1e4], [90.0], [-90.0], [-20.0]])
    ones = torch.ones(len(a), 1, 4)
    states, wanted_states = make_states(state, device=DEVICE), make_states(state)
    states.plan(StateMetadata.of([len(a)], [-1], [0], DEVICE))
    wanted_states.plan(StateMetadata.of([len(a)], [-1], [0], torch.device("cpu")))
    qkv = (ones.to(DEVICE),) * 3
    own = states.tensors[0]["recurrent"]
    ours = triton_recurrent.recurrence(
        on_device(rule), qkv, a.to(DEVICE), a.to(DEVICE), own, states.planned
    )
    gates = DeltaGates(torch.tensor([1.0]), torch.tensor([0.0]))
    wanted = gated_delta((ones,) * 3, a, a, gates, wanted_states, 0)
    torch.testing.assert_close(ours.cpu(), wanted)


@pytest.mark.parametrize("kernel", ["convolution", "recurrence"])
def test_padding_writes_nothing_and_makes_no_nan(kernel: str) -> None:
    """Of a graph's rows some go on, one begins, one moves to another slot, and two are padding."""
    tensors = {
        "convolution": StateTensor("state", (3, 16), torch.float32),
        "recurrence": StateTensor("state", (1, 16, 8), torch.float32),
    }
    states = make_states(tensors[kernel], device=DEVICE)
    own = states.tensors[0]["state"]
    own[:4] = torch.randn(own[:4].shape)
    before = own.clone()
    slots = torch.tensor([[2, -1, 3, -1, -1], [2, 7, 5, -1, -1]], device=DEVICE)
    step = StateMetadata.of_decodes(slots[0], slots[1])
    x = torch.randn(5, 16, device=DEVICE)
    if kernel == "convolution":
        layer = ConvolutionLayer(torch.randn(4, 16, device=DEVICE), None, "silu")
        output = triton_recurrent.convolution(layer, x, own, step)
    else:
        rule = on_device(GivenGates(1).layer(1, 16, 8, 1e-6))
        qkv = (x[:, None], x[:, None], x[:, None, :8])
        gates = torch.zeros(5, 1, device=DEVICE)
        output = triton_recurrent.recurrence(rule, qkv, gates, gates + 0.5, own, step)
    assert output.isfinite().all()
    written = [2, 5, 7]
    others = [slot for slot in range(len(own)) if slot not in written]
    assert own[written].isfinite().all()
    assert not torch.equal(own[2], before[2])
    assert torch.equal(own[others].isnan(), before[others].isnan())
    assert torch.equal(own[:2], before[:2])
    assert torch.equal(own[3], before[3]), "it was read alone"
    # Each row as if it were alone.
    fresh = make_states(tensors[kernel], device=DEVICE).tensors[0]["state"]
    fresh.copy_(before)
    for row in range(3):
        one = StateMetadata.of_decodes(slots[0, row : row + 1], slots[1, row : row + 1])
        if kernel == "convolution":
            alone = triton_recurrent.convolution(layer, x[row : row + 1], fresh, one)
        else:
            part = tuple(each[row : row + 1] for each in qkv)
            gate = gates[:1]
            alone = triton_recurrent.recurrence(rule, part, gate, gate + 0.5, fresh, one)
        assert torch.equal(alone[0], output[row])
        assert torch.equal(fresh[slots[1, row]], own[slots[1, row]])
