"""The selective scan in C++, at each level of the instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.kernels.test_recurrence import LENGTHS, SLOTS, check_slots, near, starts, whole
from tgi_cli.kernels.recurrence import StepSlots
from tgi_cli.kernels.scan import selective_scan


@pytest.fixture(autouse=True)
def _seeded(level: str) -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize(("channels", "size"), [(300, 16), (70, 8), (5, 1), (65, 21), (9, 32)])
def test_scan(channels: int, size: int) -> None:
    total = sum(LENGTHS)
    x, steps = torch.randn(total, channels), 2 * torch.rand(total, channels)
    a = -4 * torch.rand(channels, size)
    b, c = torch.randn(2, total, size)
    states = torch.empty(SLOTS, channels, size)

    def run(tokens: Tensor, slots: StepSlots) -> Tensor:
        given = (each[tokens] for each in (x, steps))
        return selective_scan(*given, a, b[tokens], c[tokens], states, slots)

    states.fill_(float("nan"))
    ours = whole(run)
    for text, (first, last) in enumerate(zip(starts(), starts()[1:], strict=False)):
        state, wanted = torch.zeros(channels, size, dtype=torch.float64), []
        for t in range(first, last):
            step, value = steps[t, :, None].double(), x[t, :, None].double()
            state = (step * a.double()).exp() * state + step * value * b[t].double()
            wanted.append(state @ c[t].double())
        torch.testing.assert_close(
            ours[first:last].double(), torch.stack(wanted), atol=1e-5, rtol=0
        )
        near(states[text], state, torch.float32)
    check_slots(run, states)


def test_decays_of_zero_and_one_stay_numbers() -> None:
    """A step of 0 keeps the state; one of a large number forgets it."""
    steps = torch.tensor([[1.0], [0.0], [1e30], [1.0]])
    x, b, c = torch.ones(4, 1), torch.ones(4, 1), torch.ones(4, 1)
    x[2] = 0.0
    states = torch.empty(1, 1, 1)
    slots = StepSlots.of(4, torch.tensor([0, 4]), torch.tensor([[-1], [0], [0], [-1]]).unbind())
    read = selective_scan(x, steps, torch.tensor([[-1.0]]), b, c, states, slots)
    assert read[:, 0].tolist() == pytest.approx([1.0, 1.0, 0.0, 1.0])
