from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tgi_cli.kernels import library
from tgi_cli.kernels.recurrence import (
    ConvolutionLayer,
    DecayForm,
    GateLayer,
    RecurrenceLayer,
    StepSlots,
    convolution,
    gate,
    recurrence,
)

LENGTHS = (1, 37, 2, 16, 19, 1, 5)
SLOTS = 24


@pytest.fixture(autouse=True)
def _seeded(level: str) -> None:
    torch.manual_seed(5)


@dataclass
class Entry:
    """Tokens [start, stop) of a text in a step; its slots; a snapshot after so many tokens."""

    text: int
    start: int
    stop: int
    source: int
    target: int
    snapshot: tuple[int, int] = (0, -1)


Run = Callable[[Tensor, StepSlots], Tensor]
"""Flat indices of tokens (text by text), and the slots of a step, to what its tokens get."""


def starts(lengths: Sequence[int] = LENGTHS) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def step(entries: Sequence[Entry]) -> tuple[Tensor, StepSlots]:
    first = starts()
    rows = [torch.arange(e.start, e.stop) + first[e.text] for e in entries]
    counts = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    slots = torch.tensor([[e.source, e.target, *e.snapshot] for e in entries])
    return torch.cat(rows), StepSlots.of(int(counts[-1]), counts, slots.unbind(1))


def whole(run: Run) -> Tensor:
    """All texts at once, text i in slot i."""
    tokens, slots = step([Entry(i, 0, n, -1, i) for i, n in enumerate(LENGTHS)])
    return run(tokens, slots)


def in_pieces(run: Run, seed: int) -> Tensor:
    """The texts cut anywhere, in steps of changing company; states move between slots."""
    chance = random.Random(seed)
    outputs: dict[int, Tensor] = {}
    done, place = [0] * len(LENGTHS), [-1] * len(LENGTHS)
    while any(n < length for n, length in zip(done, LENGTHS, strict=True)):
        entries: list[Entry] = []
        free = [slot for slot in range(10, SLOTS) if slot not in place]
        for text, length in enumerate(LENGTHS):
            if done[text] == length or chance.random() < 0.4:
                continue
            stop = chance.choice((done[text] + 1, chance.randint(done[text] + 1, length)))
            target = place[text] if place[text] >= 0 and chance.random() < 0.5 else free.pop()
            entries.append(Entry(text, done[text], stop, place[text], target))
            done[text], place[text] = stop, target
        if not entries:
            continue
        tokens, slots = step(entries)
        outputs |= dict(zip(tokens.tolist(), run(tokens, slots), strict=True))
    return torch.stack([outputs[i] for i in range(sum(LENGTHS))])


def check_slots(run: Run, states: Tensor) -> None:
    """Cuts, company, forks and snapshots change no bit; unused slots are neither read nor written.

    ``states`` are what ``run`` uses.
    """
    states.fill_(float("nan"))
    wanted = whole(run)
    finals = states[: len(LENGTHS)].clone()
    assert finals.isfinite().all()
    assert states[len(LENGTHS) :].isnan().all()
    for seed in range(3):
        states.fill_(float("nan"))
        assert torch.equal(in_pieces(run, seed), wanted)
    for threads in (1, 3):
        library.set_threads(threads)
        states.fill_(float("nan"))
        assert torch.equal(whole(run), wanted)
        assert torch.equal(states[: len(LENGTHS)], finals)
    library.set_threads(None)
    # A snapshot in mid-step, from which two others go on, one of which keeps nothing.
    for text, cut in ((1, 20), (1, 1), (3, 15), (6, 4), (2, 2)):
        states.fill_(float("nan"))
        length, first = LENGTHS[text], starts()[text]
        tokens, slots = step([Entry(text, 0, length, -1, 0, (cut, 5))])
        assert torch.equal(run(tokens, slots), wanted[first : first + length])
        assert torch.equal(states[0], finals[text])
        before = states[5].clone()
        if cut == length:
            assert torch.equal(before, finals[text])
            continue
        tokens, slots = step([Entry(text, cut, length, 5, 7), Entry(text, cut, length, 5, -1)])
        again = run(tokens, slots)
        rest = wanted[first + cut : first + length]
        assert torch.equal(again, torch.cat((rest, rest)))
        assert torch.equal(states[7], finals[text])
        assert torch.equal(states[5], before)
        assert states[[1, 2, 3, 4, 6, *range(8, SLOTS)]].isnan().all()


def near(ours: Tensor, wanted: Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    off = (ours.double() - wanted).abs().max() / wanted.abs().max()
    assert off < (roundings * 2**-8 if dtype == torch.bfloat16 else 3e-6)


DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "taps", "bias", "activation"),
    [(48, 4, False, "silu"), (7, 3, True, None), (300, 2, True, "silu"), (1040, 8, False, None)],
)
@pytest.mark.parametrize("gated", [False, True])
def test_convolution(
    dtype: torch.dtype, channels: int, taps: int, bias: bool, activation: str | None, gated: bool
) -> None:
    total = sum(LENGTHS)
    # Between a token's inputs and the next one's stands something else.
    x, before, after = (torch.randn(total, channels + 3).to(dtype)[:, :channels] for _ in range(3))
    layer = ConvolutionLayer(
        torch.randn(taps, channels), torch.randn(channels) if bias else None, activation
    )
    states = torch.empty(SLOTS, taps - 1, channels, dtype=dtype)

    def run(tokens: Tensor, slots: StepSlots) -> Tensor:
        rows = [each[tokens] for each in (x, before, after)]
        if not gated:
            return convolution(layer, rows[0], states, slots)
        return convolution(layer, rows[0], states, slots, rows[1], rows[2])

    inputs = (x * before if gated else x).double()
    for text, (first, last) in enumerate(zip(starts(), starts()[1:], strict=False)):
        padded = F.pad(inputs[first:last].T, (taps - 1, 0))[None]
        wanted = F.conv1d(
            padded,
            layer.weight.T[:, None].double(),
            None if layer.bias is None else layer.bias.double(),
            groups=channels,
        )[0].T
        if activation:
            wanted = F.silu(wanted)
        if gated:
            wanted = wanted * after[first:last]
        states.fill_(float("nan"))
        near(whole(run)[first:last], wanted, dtype, roundings=2 if gated else 1)
        assert torch.equal(states[text].double(), padded[0].T[-(taps - 1) :])
    check_slots(run, states)


@dataclass
class Case:
    key_dim: int
    value_dim: int
    heads: int
    key_heads: int
    form: DecayForm
    delta: bool = True
    channels: bool = False
    norm: bool = True


CASES = {
    "gated delta rule": Case(128, 128, 4, 2, DecayForm.SOFTPLUS),
    "odd sizes": Case(21, 37, 3, 1, DecayForm.SOFTPLUS),
    "narrow": Case(16, 16, 2, 2, DecayForm.SOFTPLUS, norm=False),
    "wide": Case(256, 80, 1, 1, DecayForm.SOFTPLUS),
    "KDA": Case(64, 48, 4, 4, DecayForm.SOFTPLUS, channels=True),
    "KDA with a bound": Case(40, 33, 2, 2, DecayForm.SIGMOID, channels=True),
    "given": Case(32, 64, 2, 1, DecayForm.GIVEN),
    "given by channel": Case(19, 16, 2, 1, DecayForm.GIVEN, channels=True),
    "Mamba-2": Case(128, 64, 8, 2, DecayForm.SOFTPLUS, delta=False, norm=False),
    "Mamba-2, odd": Case(10, 12, 6, 3, DecayForm.SOFTPLUS, delta=False, norm=False),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_recurrence(name: str, dtype: torch.dtype) -> None:
    case, total = CASES[name], sum(LENGTHS)
    heads, dims, width = case.heads, case.key_dim, case.value_dim
    rows = heads * dims if case.channels else heads
    sizes = [case.key_heads * dims, case.key_heads * dims, heads * width, rows, heads]
    mixed = torch.randn(total, sum(sizes)).to(dtype)
    if case.form == DecayForm.GIVEN:
        mixed[:, -rows - heads :].sigmoid_()
        mixed[:, -rows - heads : -heads].neg_()
    layer = RecurrenceLayer(
        heads=heads,
        key_heads=case.key_heads,
        key_dim=dims,
        value_dim=width,
        delta=case.delta,
        form=case.form,
        rate=None if case.form == DecayForm.GIVEN else 4 * torch.rand(heads) + 0.1,
        bias=None if case.form == DecayForm.GIVEN else torch.randn(rows),
        skip=None if case.delta else torch.randn(heads),
        channels=case.channels,
        floor=-5.0 if case.form == DecayForm.SIGMOID else 0.0 if case.delta else 0.2,
        ceiling=float("inf") if case.delta else 1.5,
        beta_factor=1.0 if name == "narrow" else 2.0,
        norm_eps=1e-6 if case.norm else None,
        scale=dims**-0.5,
    )
    states = torch.empty(SLOTS, heads, dims, width)

    def run(tokens: Tensor, slots: StepSlots) -> Tensor:
        query, key, value, decay, beta = torch.split(mixed[tokens], sizes, 1)
        return recurrence(
            layer,
            (
                query.view(len(tokens), -1, dims),
                key.view(len(tokens), -1, dims),
                value.view(len(tokens), -1, width),
            ),
            decay,
            beta if case.delta else None,
            states,
            slots,
        )

    states.fill_(float("nan"))
    ours = whole(run)
    for text, (first, last) in enumerate(zip(starts(), starts()[1:], strict=False)):
        wanted, state = reference(layer, torch.split(mixed[first:last].double(), sizes, 1))
        near(ours[first:last], wanted, dtype)
        near(states[text], state, torch.float32)
    check_slots(run, states)


def reference(layer: RecurrenceLayer, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One text in float64: its outputs [T, heads, value_dim] and the state after it."""
    share, total = layer.heads // layer.key_heads, len(inputs[0])
    query, key = (
        x.view(total, layer.key_heads, -1).repeat_interleave(share, 1) for x in inputs[:2]
    )
    if layer.norm_eps is not None:
        query, key = (
            x / (x.square().sum(-1, keepdim=True) + layer.norm_eps).sqrt() for x in (query, key)
        )
    value = inputs[2].view(total, layer.heads, -1)
    a = inputs[3].view(total, layer.heads, -1)
    gain = inputs[4]
    if layer.form == DecayForm.GIVEN:
        decay = a.exp()
    else:
        assert layer.rate is not None
        assert layer.bias is not None
        a = a + layer.bias.view(layer.heads, -1)
        rate = layer.rate[:, None]
        gain = layer.beta_factor * gain.sigmoid()
        if layer.form == DecayForm.SIGMOID:
            decay = (layer.floor * (rate * a).sigmoid()).exp()
        else:
            steps = F.softplus(a).clamp(layer.floor, layer.ceiling)
            decay = (-rate * steps).exp()
            if not layer.delta:
                gain = steps[..., 0]
    state = torch.zeros(layer.heads, layer.key_dim, layer.value_dim, dtype=torch.double)
    outputs = []
    for t in range(total):
        state = state * decay[t, :, :, None]
        change = value[t]
        if layer.delta:
            change = change - torch.einsum("hkv,hk->hv", state, key[t])
        state = state + torch.einsum("hk,hv->hkv", key[t], gain[t, :, None] * change)
        output = layer.scale * torch.einsum("hkv,hk->hv", state, query[t])
        if layer.skip is not None:
            output = output + layer.skip[:, None] * value[t]
        outputs.append(output)
    return torch.stack(outputs), state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "width"), [(1, 7), (3, 64), (2, 200)])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("norm", ["none", "shared", "per group", "gate first"])
def test_gate(dtype: torch.dtype, groups: int, width: int, activation: str, norm: str) -> None:
    for tokens in (1, 5, 300):
        # As they come from a projection: side by side.
        both = torch.randn(tokens, 2, groups, width).to(dtype)
        x, by = both[:, 0], both[:, 1]
        shape = (width,) if norm == "shared" else (groups, width)
        weight = None if norm == "none" else torch.randn(shape)
        layer = GateLayer(activation, weight, 1e-5, gate_first=norm == "gate first")
        ours = gate(layer, x, by)
        factor = F.silu(by.double()) if activation == "silu" else by.double().sigmoid()
        wanted = x.double()
        if norm in ("none", "gate first"):
            wanted = wanted * factor
        if weight is not None:
            wanted = wanted / (wanted.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        if norm not in ("none", "gate first"):
            wanted = wanted * factor
        near(ours, wanted, dtype)
        alone = torch.cat([gate(layer, x[i : i + 1], by[i : i + 1]) for i in range(tokens)])
        assert torch.equal(ours, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_of_one_number_per_group(dtype: torch.dtype) -> None:
    layer = GateLayer("sigmoid", per_group=True)
    for tokens in (1, 5, 300):
        x, by = torch.randn(tokens, 3, 40).to(dtype), 3 * torch.randn(tokens, 3, 1).to(dtype)
        ours = gate(layer, x, by)
        near(ours, x.double() * by.double().sigmoid(), dtype)
        alone = torch.cat([gate(layer, x[i : i + 1], by[i : i + 1]) for i in range(tokens)])
        assert torch.equal(ours, alone)


def test_a_step_without_tokens() -> None:
    layer = ConvolutionLayer(torch.randn(3, 16))
    states = torch.full((2, 2, 16), float("nan"))
    slots = StepSlots.of(0, torch.tensor([0]), [torch.empty(0)] * 4)
    assert convolution(layer, torch.empty(0, 16), states, slots).shape == (0, 16)
    assert states.isnan().all()
