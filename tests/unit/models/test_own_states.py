"""Recurrences of models that keep their states in places of their own, over our slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu
from transformers.models.xlstm import modeling_xlstm

from tests.tools.state_steps import make_states, run_mixed, run_whole
from tgi_cli.attention import StateCache, StateTensor
from tgi_cli.models.hf.own_states import linear_recurrence, matrix_memory, weighted_mean

LENGTHS = [37, 1, 20, 55]
CHANNELS, HEADS, KEY, VALUE = 64, 3, 8, 16
TOKENS = sum(LENGTHS)

Numbers = dict[str, Tensor]


def random_numbers() -> Numbers:
    torch.manual_seed(0)
    sizes = {
        "x": (TOKENS, CHANNELS),
        "key": (TOKENS, CHANNELS),
        "value": (TOKENS, CHANNELS),
        "q": (TOKENS, HEADS, KEY),
        "k": (TOKENS, HEADS, KEY),
        "v": (TOKENS, HEADS, VALUE),
        "enter": (TOKENS, HEADS),
        "forget": (TOKENS, HEADS),
    }
    return {name: torch.randn(size) for name, size in sizes.items()} | {
        "decay": torch.rand(TOKENS, CHANNELS),
        "w": -torch.exp(torch.randn(CHANNELS)),
        "u": torch.randn(CHANNELS),
    }


def griffin(numbers: Numbers, rows: Tensor, states: StateCache) -> Tensor:
    return linear_recurrence(numbers["decay"][rows], numbers["x"][rows], states, 0)


def rwkv(numbers: Numbers, rows: Tensor, states: StateCache) -> Tensor:
    # Keys far below zero: what a fresh state holds must not count beside them.
    rates = (numbers["w"], numbers["u"])
    key = numbers["key"][rows] * 20 - 100
    return weighted_mean(key, numbers["value"][rows], rates, states, 0)


def mlstm(numbers: Numbers, rows: Tensor, states: StateCache) -> Tensor:
    qkv = (numbers["q"][rows], numbers["k"][rows], numbers["v"][rows])
    gates = (numbers["enter"][rows] * 3, numbers["forget"][rows])
    return matrix_memory(qkv, gates, 1e-6, states, 0)


def expected_griffin(numbers: Numbers, rows: slice) -> Tensor:
    state, outputs = torch.zeros(CHANNELS), []
    for decay, x in zip(numbers["decay"][rows], numbers["x"][rows], strict=True):
        state = decay * state + x
        outputs.append(state)
    return torch.stack(outputs)


def expected_rwkv(numbers: Numbers, rows: slice) -> Tensor:
    key = (numbers["key"][rows] * 20 - 100)[None]
    output, _ = rwkv_linear_attention_cpu(
        torch.log(-numbers["w"]), numbers["u"], key, numbers["value"][rows][None]
    )
    return output[0]


def expected_mlstm(numbers: Numbers, rows: slice) -> Tensor:
    def heads_first(name: str) -> Tensor:
        return numbers[name][rows].transpose(0, 1)[None]

    output = modeling_xlstm.mlstm_recurrent_sequence_native(
        heads_first("q"),
        heads_first("k"),
        heads_first("v"),
        heads_first("enter") * 3,
        heads_first("forget"),
    )
    return output[0].transpose(0, 1)


KINDS: dict[str, tuple[tuple[int, ...], Callable[..., Tensor], Callable[..., Tensor]]] = {
    "griffin": ((CHANNELS,), griffin, expected_griffin),
    "rwkv": ((3, CHANNELS), rwkv, expected_rwkv),
    "mlstm": ((HEADS, KEY, VALUE + 2), mlstm, expected_mlstm),
}


def states_of(kind: str) -> StateCache:
    return make_states(StateTensor("recurrent", KINDS[kind][0], torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_the_recurrence(kind: str) -> None:
    numbers, (_, ours, theirs) = random_numbers(), KINDS[kind]
    states = states_of(kind)
    got = run_whole(states, LENGTHS, lambda rows: ours(numbers, rows, states))
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        torch.testing.assert_close(got[rows], theirs(numbers, rows), atol=1e-5, rtol=1e-5)
        start += length


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_and_companions_change_no_bit(kind: str) -> None:
    numbers, ours = random_numbers(), KINDS[kind][1]

    def run(states: StateCache) -> Callable[[Tensor], Any]:
        return lambda rows: ours(numbers, rows, states)

    whole, mixed = states_of(kind), states_of(kind)
    expected = run_whole(whole, LENGTHS, run(whole))
    torch.testing.assert_close(run_mixed(mixed, LENGTHS, run(mixed)), expected, atol=0, rtol=0)
