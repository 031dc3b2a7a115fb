"""Speculation costs next to nothing where drafts do not pay, and gains much where they do.

Durations of steps are simulated, and what looking up takes is charged: see ``simulation``.
"""

from __future__ import annotations

import random
from statistics import geometric_mean, mean

import pytest

from tests.unit.engine.speculation.simulation import LOOK_UP, Machine, Played, Server, Text, Writer

WAVES = 4


def play(waves: list[list[Text]], machine: Machine | None = None) -> tuple[Server, list[Played]]:
    server = Server(machine or Machine())
    return server, [server.wave(texts) for texts in waves]


def plain(waves: list[list[Text]]) -> list[Played]:
    server = Server(Machine(), speculates=False)
    return [server.wave(texts) for texts in waves]


def seconds(played: list[Played]) -> float:
    return sum(each.seconds for each in played)


@pytest.mark.parametrize("fixed", [0.0, 0.0015])
@pytest.mark.parametrize("phrases", [0.1, 0.3])
@pytest.mark.parametrize("clients", [8, 32])
def test_chats_lose_next_to_nothing(clients: int, phrases: float, fixed: float) -> None:
    """Also if each step with drafts takes longer than the warm-up has found."""
    writer = Writer(clients, phrases)
    waves = [writer.chats(clients) for _ in range(WAVES if clients == 8 else 2)]
    _, played = play(waves, Machine(fixed=fixed))
    assert seconds(plain(waves)) > 0.985 * seconds(played)
    assert sum(each.host for each in played) < 0.008 * seconds(played)


@pytest.mark.parametrize("phrases", [0.1, 0.3, 0.5])
def test_one_chat_is_no_slower(phrases: float) -> None:
    writer = Writer(1, phrases)
    waves = [writer.chats(1) for _ in range(8)]
    _, played = play(waves)
    assert seconds(plain(waves)) > 0.995 * seconds(played)


@pytest.mark.parametrize(("clients", "gain"), [(1, 3.5), (4, 2.5), (8, 2.0), (32, 1.5)])
def test_texts_that_are_copied_gain_as_much_as_rows_are_cheap(clients: int, gain: float) -> None:
    writer = Writer(clients)
    waves = [writer.copies(clients) for _ in range(WAVES)]
    _, played = play(waves)
    assert seconds(plain(waves)) > gain * seconds(played)


def test_a_copy_among_chats_gains_and_the_chats_lose_little() -> None:
    writer = Writer(0, phrases=0.1)
    waves = [writer.chats(7, answer=256) + writer.copies(1) for _ in range(WAVES)]
    _, played = play(waves)
    off = plain(waves)
    copy = mean(on.rates[0] / without.rates[-1] for on, without in zip(played, off, strict=True))
    assert copy > 2
    assert seconds(off) > 0.985 * seconds(played)


def test_what_rows_cost_is_noticed_where_it_was_not_measured() -> None:
    """Rows that look free to the warm-up take a third of a step each."""
    writer = Writer(0, phrases=0.5)
    waves = [writer.chats(8) for _ in range(WAVES)]
    machine = Machine(row=0.0, tile=0.0)
    server = Server(machine)
    machine.row = 4e-3
    played = [server.wave(texts) for texts in waves]
    without = Server(Machine(row=4e-3, tile=0.0), speculates=False)
    off = [without.wave(texts) for texts in waves]
    assert off[0].seconds > 0.9 * played[0].seconds
    assert seconds(off[1:]) > 0.985 * seconds(played[1:])


@pytest.mark.parametrize("clients", [2, 8, 32])
@pytest.mark.parametrize("mistake", [1.5, 3.0])
def test_rows_that_cost_less_than_was_measured_are_tried(clients: int, mistake: float) -> None:
    """Other programs may have run while the warm-up measured, after which no draft seems to pay."""
    writer = Writer(clients)
    waves = [writer.copies(clients) for _ in range(WAVES)]
    truth = {"row": 2.5e-3, "tile": 0.0, "sequence": 2e-3}
    _, misled = play(waves, Machine(**truth, mistake=mistake))
    _, informed = play(waves, Machine(**truth))
    assert seconds(misled) < 1.15 * seconds(informed)
    assert seconds(misled[1:]) < 1.06 * seconds(informed[1:])


@pytest.mark.parametrize("clients", [1, 8, 32])
def test_trials_of_rows_that_are_as_dear_as_they_seem_lose_little(clients: int) -> None:
    writer = Writer(clients)
    waves = [writer.copies(clients) for _ in range(2)] + [writer.chats(clients) for _ in range(2)]
    truth = {"row": 12e-3, "tile": 0.0, "sequence": 12e-3}
    _, played = play(waves, Machine(**truth))
    without = Server(Machine(**truth), speculates=False)
    off = [without.wave(texts) for texts in waves]
    assert seconds(off) > 0.99 * seconds(played)


def test_drafts_come_back_soon_after_the_load_has_gone() -> None:
    """A request that copies is left alone by 31 chats, which have ended all attempts."""
    writer = Writer(3, phrases=0.3)
    server = Server(Machine())
    for _ in range(3):
        server.wave(writer.chats(32))
    alone = server.wave(writer.copies(1))
    fresh = Server(Machine()).wave(writer.copies(1))
    first = next(number for number, drafts in enumerate(alone.drafts) if drafts)
    assert first <= 4
    assert alone.seconds < 1.25 * fresh.seconds


def test_a_sequence_gets_drafts_once_those_beside_it_have_ended() -> None:
    writer = Writer(4, phrases=0.1)
    server = Server(Machine())
    (copy,) = writer.copies(1, answer=160, changed=0.0)
    played = server.wave([copy, *writer.chats(31, answer=32)])
    busy, rest = played.drafts[:31], played.drafts[31:]
    tried = sum(1 for drafts in busy if drafts)
    assert tried <= 8, "rows are dear beside 31 others"
    assert next(number for number, drafts in enumerate(rest) if drafts) <= 2
    assert len(rest) < (160 - 31) / 3


def test_where_no_draft_can_pay_the_host_does_next_to_nothing() -> None:
    writer = Writer(5)
    machine = Machine(row=4e-3, tile=0.0, mistake=4.0)
    server, played = play([writer.copies(32)], machine)
    assert not server.drafter.asked
    assert played[0].host < LOOK_UP * len(played[0].drafts)


@pytest.mark.parametrize("seed", range(12))
def test_any_load_loses_little(seed: int) -> None:
    """Machines, texts and numbers of streams at random; some steps last a millisecond."""
    chance = random.Random(seed)
    step, clients = 10 ** chance.uniform(-3, -1.5), chance.choice([1, 2, 4, 8, 16, 32])
    machine = {
        "step": step,
        "sequence": step * chance.uniform(0, 0.08),
        "row": step * chance.uniform(0, 0.06),
        "tile": step * chance.uniform(0, 0.3),
        "fixed": step * chance.choice([0, 0.1, 0.3]),
        "noise": 0.04,
    }
    writer, copies = (
        Writer(seed, chance.choice([0.1, 0.3, 0.5])),
        chance.choice([0, 0, clients // 4]),
    )
    waves = [
        writer.copies(copies) + writer.chats(clients - copies) for _ in range(max(2, 8 // clients))
    ]
    _, played = play(waves, Machine(**machine))
    without = Server(Machine(**machine), speculates=False)
    off = [without.wave(texts) for texts in waves]
    ratios = [
        on / alone
        for one, other in zip(played, off, strict=True)
        for on, alone in zip(sorted(one.rates), sorted(other.rates), strict=True)
    ]
    assert geometric_mean(ratios) > 0.97
    if not copies:
        assert sum(each.host for each in played) < 0.02 * seconds(played)
