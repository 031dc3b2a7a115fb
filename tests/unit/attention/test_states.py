from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tgi_cli.attention import StateCache, StateMetadata, StateSpec, StateTensor

CPU = torch.device("cpu")
SPEC = StateSpec((StateTensor("sum", (2,), torch.float32), StateTensor("ids", (1,), torch.int64)))
NAN = float("nan")


def make(slots: int = 6) -> StateCache:
    """A cache whose every slot is spoiled."""
    states = StateCache([SPEC], CPU)
    states.allocate(slots)
    states.tensors[0]["sum"].fill_(NAN)
    states.tensors[0]["ids"].fill_(-(10**6))
    return states


def advance(states: StateCache, metadata: StateMetadata, numbers: Tensor) -> None:
    """States follow the numbers in such a way that their order matters."""
    states.plan(metadata)

    def run(tokens: slice, state: Tensor) -> None:
        for number in numbers[tokens]:
            state.mul_(3).add_(number)

    states.advance(0, "sum", run)


def expected(numbers: Tensor) -> list[float]:
    value = 0.0
    for number in numbers.tolist():
        value = 3 * value + number
    return [value, value]


def test_sizes_are_of_all_layers() -> None:
    states = StateCache([SPEC, SPEC], CPU)
    assert states.slot_bytes == 2 * (2 * 4 + 8)
    states.allocate(3)
    assert states.num_slots == 3
    assert [tensors["sum"].shape for tensors in states.tensors] == [(3, 2), (3, 2)]


def test_a_fresh_state_is_zero_whatever_its_slot_has_held() -> None:
    states = make()
    numbers = torch.arange(1.0, 6.0)
    advance(states, StateMetadata.of([2, 3], [-1, -1], [4, 0], CPU), numbers)
    assert states.tensors[0]["sum"][4].tolist() == expected(numbers[:2])
    assert states.tensors[0]["sum"][0].tolist() == expected(numbers[2:])
    assert states.load(0, "ids").tolist() == [[0], [0]]


def test_the_slot_that_is_only_read_keeps_its_state() -> None:
    states = make()
    numbers = torch.arange(1.0, 8.0)
    advance(states, StateMetadata.of([3], [-1], [2], CPU), numbers[:3])
    advance(states, StateMetadata.of([2, 2], [2, 2], [3, 5], CPU), numbers[3:])
    held = states.tensors[0]["sum"]
    assert held[2].tolist() == expected(numbers[:3])
    assert held[3].tolist() == expected(numbers[:5])
    assert held[5].tolist() == expected(torch.cat([numbers[:3], numbers[5:]]))


@pytest.mark.parametrize("seed", range(5))
def test_any_cut_any_slots_and_any_snapshot_give_the_same_states(seed: int) -> None:
    dice = random.Random(seed)
    states = make(20)
    numbers = [torch.randint(-3, 4, (12,)).float() for _ in range(3)]
    done, at = [0, 0, 0], [-1, -1, -1]
    free = list(range(20))
    while min(done) < 12:
        counts = [min(dice.randrange(1, 6), 12 - n) for n in done]
        named = [i for i in range(3) if counts[i]]
        outs = [at[i] if at[i] >= 0 and dice.random() < 0.5 else free.pop() for i in named]
        snapshots = {
            index: (dice.randrange(1, counts[i]), free.pop())
            for index, i in enumerate(named)
            if counts[i] > 1 and len(free) > 3
        }
        lengths = [counts[i] for i in named]
        flat = torch.cat([numbers[i][done[i] : done[i] + counts[i]] for i in named])
        before = [at[i] for i in named]
        advance(states, StateMetadata.of(lengths, before, outs, CPU, snapshots), flat)
        for index, i in enumerate(named):
            if index in snapshots:
                count, slot = snapshots[index]
                kept = states.tensors[0]["sum"][slot].tolist()
                assert kept == expected(numbers[i][: done[i] + count])
                free.insert(0, slot)
            if at[i] not in (-1, outs[index]):
                free.insert(0, at[i])
            at[i], done[i] = outs[index], done[i] + counts[i]
            assert states.tensors[0]["sum"][at[i]].tolist() == expected(numbers[i][: done[i]])


def test_what_is_stored_goes_to_its_slots_alone() -> None:
    states = make()
    given = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    states.plan(StateMetadata.of([1, 4], [-1, -1], [3, 1], CPU, {1: (2, 5)}))
    states.store(0, "sum", given)
    states.store(0, "sum", 10 * given, snapshots=True)
    held = states.tensors[0]["sum"]
    assert held[[3, 1, 5]].tolist() == [[1.0, 2.0], [3.0, 4.0], [30.0, 40.0]]
    assert held[[0, 2, 4]].isnan().all()
    states.plan(StateMetadata.of([1, 1], [3, -1], [3, -1], CPU))
    assert states.load(0, "sum").tolist() == [[1.0, 2.0], [0.0, 0.0]]
    states.store(0, "sum", 7 * given)
    assert held[3].tolist() == [7.0, 14.0]
    assert held[[0, 2, 4]].isnan().all(), "padding has no slot"


def test_metadata_says_whether_there_are_snapshots() -> None:
    with_one = StateMetadata.of([3, 3], [-1, 2], [1, 2], CPU, {1: (1, 4)})
    assert with_one.has_snapshots
    assert with_one.snapshot_after_host == with_one.snapshot_after.tolist() == [0, 1]
    assert with_one.snapshot_slots_host == with_one.snapshot_slots.tolist() == [-1, 4]
    assert with_one.query_start_loc.tolist() == [0, 3, 6]
    assert not StateMetadata.of([3], [-1], [1], CPU).has_snapshots


def test_a_step_that_a_graph_holds_is_known_to_the_device_alone() -> None:
    """What would move states on the host fails; what reads slots on the device sees changes."""
    states = make()
    slots = torch.tensor([[3, -1], [3, 4]])
    step = StateMetadata.of_decodes(slots[0], slots[1])
    assert step.query_start_loc.tolist() == [0, 1, 2]
    assert step.query_start_loc.dtype == torch.int32
    assert step.query_lens_host == [1, 1]
    assert step.snapshot_slots.tolist() == [-1, -1]
    assert step.snapshot_after.tolist() == [0, 0]
    assert not step.on_host
    assert not step.has_snapshots
    assert step.chunks() is None
    states.plan(step)
    states.tensors[0]["sum"][3:5] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert states.load(0, "sum").tolist() == [[1.0, 2.0], [0.0, 0.0]]
    slots[0] = torch.tensor([4, 3])
    assert states.load(0, "sum").tolist() == [[3.0, 4.0], [1.0, 2.0]]
    with pytest.raises(RuntimeError, match="on the host"):
        states.advance(0, "sum", lambda tokens, state: None)
    with pytest.raises(RuntimeError, match="on the host"):
        states.store(0, "sum", torch.zeros(2, 2))
    states.plan(StateMetadata.of([1, 1], [3, -1], [3, 4], CPU))
    states.store(0, "sum", torch.zeros(2, 2))
    assert not states.tensors[0]["sum"][3:5].any()


def test_the_leading_sequences_are_a_step_of_their_own() -> None:
    whole = StateMetadata.of([1, 3, 2], [4, -1, 2], [5, 0, 2], CPU, {1: (2, 3), 2: (1, 1)})
    part = whole.leading(2)
    assert part.query_start_loc.tolist() == [0, 1, 4]
    assert part.query_lens_host == [1, 3]
    assert part.slots_in.tolist() == part.slots_in_host == [4, -1]
    assert part.slots_out.tolist() == part.slots_out_host == [5, 0]
    assert part.snapshot_after.tolist() == part.snapshot_after_host == [0, 2]
    assert part.snapshot_slots.tolist() == part.snapshot_slots_host == [-1, 3]
