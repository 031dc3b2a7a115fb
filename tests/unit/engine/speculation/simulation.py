"""Servers whose steps take simulated time, with texts that are known beforehand.

A step's duration follows from its sequences and draft rows, with noise. Looking a sequence up takes
the host :data:`LOOK_UP` seconds, and considering one :data:`CONSIDER`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from tests.unit.engine.speculation.sequences import sequence
from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.speculation.adaptive import AdaptiveSpeculator
from tgi_cli.engine.speculation.drafter import Draft
from tgi_cli.engine.speculation.lookup import LookupDrafter
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import Step, StepTime, TokenAppend

LOOK_UP = 25e-6
CONSIDER = 0.5e-6
MOST = 7

Text = tuple[list[int], list[int]]
"""A prompt and its answer."""


@dataclass
class Machine:
    """What steps take: about those of a model of 135M parameters on two cores, in seconds.

    Attributes:
        step: of one row.
        sequence: of each further sequence.
        row: of each further row.
        tile: of each further dozen of rows, begun or not.
        fixed: of a step with drafts, which the warm-up has not seen.
        mistake: factor by which the warm-up overestimates what further rows take.
        noise: standard deviation of the logarithm of a duration.
    """

    step: float = 10.4e-3
    sequence: float = 0.6e-3
    row: float = 0.15e-3
    tile: float = 2e-3
    fixed: float = 0.0
    mistake: float = 1.0
    noise: float = 0.08
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def expected(self, sequences: int, drafts: int) -> float:
        rows = sequences + drafts
        more = self.sequence * (sequences - 1) + self.row * (rows - 1)
        return self.step + more + self.tile * ((rows - 1) // 12) + self.fixed * (drafts > 0)

    def measured(self, sequences: int, drafts: int) -> float:
        return self.expected(sequences, drafts) * math.exp(self.chance.gauss(0, self.noise))

    def times(self) -> list[StepTime]:
        """What a warm-up finds, which knows nothing of the fixed part."""
        fixed, self.fixed = self.fixed, 0.0
        alone = self.expected(1, 0)
        found = [
            StepTime(1, 1 + drafts, 128, alone + self.mistake * (self.expected(1, drafts) - alone))
            for drafts in (0, 1, 2, 3, 5, 7, 11, 12, 15, 31)
        ]
        found += [StepTime(n, n, 128, self.expected(n, 0)) for n in (2, 4, 8, 16, 32)]
        self.fixed = fixed
        return found


class _Drafter:
    """Takes simulated time."""

    def __init__(self) -> None:
        self._lookup = LookupDrafter(shares_answers=False)
        self.now = 0.0
        self.asked = 0

    def draft(self, asked: Sequence, most: int) -> Draft | None:
        self.now += LOOK_UP
        self.asked += 1
        return self._lookup.draft(asked, most)

    def finish(self, ended: Sequence) -> None:
        self._lookup.finish(ended)


@dataclass
class Played:
    """What some requests took, in simulated seconds.

    Attributes:
        rates: tokens per second of each stream, in the order in which they ended.
        drafts: draft rows of each step.
    """

    seconds: float = 0.0
    host: float = 0.0
    accepted: int = 0
    rates: list[float] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)


class Server:
    """Decodes requests, with speculation or without."""

    def __init__(self, machine: Machine, speculates: bool = True) -> None:
        self.machine = machine
        self.drafter = _Drafter()
        self._speculates = speculates
        costs = StepCosts(machine.times(), MOST)
        self.speculator = AdaptiveSpeculator(MOST, costs, [self.drafter], self._now)
        self._ids = itertools.count()

    def _now(self) -> float:
        return self.drafter.now

    def wave(self, texts: Many[Text]) -> Played:
        """Requests that begin at once, to the end of the last."""
        played = Played()
        live = [(sequence(p, a[:1], next(self._ids), len(a)), p, a) for p, a in texts]
        while live:
            played.seconds += self._step(live, played)
            for each in list(live):
                running, prompt, answer = each
                if len(running.token_ids) == len(prompt) + len(answer):
                    live.remove(each)
                    played.rates.append((len(answer) - 1) / played.seconds)
                    self.speculator.finish(running)
        return played

    def _step(self, live: list[tuple[Sequence, list[int], list[int]]], played: Played) -> float:
        count, host = len(live), 0.0
        proposals: list[list[int]] = [[] for _ in live]
        if self._speculates:
            began = self.drafter.now
            sequences = [each for each, _, _ in live]
            considered = count * CONSIDER if self.speculator.may_propose(sequences) else 0.0
            proposals = self.speculator.propose(sequences, False)
            host = self.drafter.now - began + considered
        step = Step(0, num_decodes=count, rows=list(range(count)))
        for (running, prompt, answer), drafts in zip(live, proposals, strict=True):
            known = len(running.token_ids)
            follow = answer[known - len(prompt) :]
            drafts = drafts[: len(follow) - 1]
            pairs = zip(drafts, follow, strict=False)
            right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            step.starts.append(known - 1)
            step.counts.append(1 + len(drafts))
            if drafts:
                step.drafts.append(TokenAppend(0, known, drafts))
                self.speculator.learn(running, drafts, right)
            running.token_ids.extend(follow[: right + 1])
            played.accepted += right
        seconds = self.machine.measured(count, step.num_drafts) + host
        played.drafts.append(step.num_drafts)
        played.host += host
        if self._speculates:
            self.speculator.timed(step, seconds)
        return seconds


class Writer:
    """Writes texts of words by Zipf's law and of phrases, which recur now and then.

    So matches are found all the time, and what follows them is right less often than not: as in the
    answers of a chat.
    """

    def __init__(self, seed: int, phrases: float = 0.3) -> None:
        self.chance = random.Random(seed)
        self._share = phrases
        self._words = [1 / rank for rank in range(1, 3001)]
        self._phrases = [self._some_words(self.chance.randint(2, 6)) for _ in range(300)]
        self._common = [1 / rank for rank in range(1, 301)]

    def _some_words(self, count: int) -> list[int]:
        return self.chance.choices(range(3000), self._words, k=count)

    def text(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            if self.chance.random() < self._share:
                found += self.chance.choices(self._phrases, self._common)[0]
            else:
                found += self._some_words(1)
        return found[:count]

    def chats(self, count: int, answer: int = 128) -> list[Text]:
        return [(self.text(130), self.text(answer)) for _ in range(count)]

    def copies(self, count: int, answer: int = 128, changed: float = 0.05) -> list[Text]:
        """Answers that repeat their prompts with changes."""
        found = []
        for _ in range(count):
            prompt = self.text(200)
            copy = [
                self.chance.randrange(3000) if self.chance.random() < changed else word
                for word in prompt
            ]
            found.append((prompt + prompt[:20], copy[20 : 20 + answer]))
        return found
