"""The run itself: rounds in turn, and what is kept of each."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.benchmarks.peers.columns import Column
from tests.benchmarks.peers.contestant import Contestant, Failure, Running, Setup, Wave
from tests.benchmarks.peers.machine import Clock, memory
from tests.tools.checkpoints import FIRST_WORD

PREPARATION = "preparation"  # the stage before there are columns
WARM_NEW = 8

Say = Callable[[str], None]


@dataclass
class Results:
    """All figures of one model.

    Attributes:
        values: contestant, then figure, then one value of each round. Figures are named
            ``COLUMN.what``: ``rate`` output tokens per second, ``decode`` those after the first
            alone, ``prefill`` prompt tokens per second, ``ttft`` and ``token`` (between two
            tokens) in ms; ``memory.what`` in MB.
        foreign: likewise for each column, what others took of the cores (0 to 1).
        failures: contestant, then column or stage, then why.
    """

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    foreign: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, name: str, figures: dict[str, float]) -> None:
        for key, value in figures.items():
            self.values.setdefault(name, {}).setdefault(key, []).append(value)

    def fail(self, name: str, stage: str, why: str) -> None:
        self.failures.setdefault(name, {})[stage] = why


@dataclass(frozen=True)
class Rules:
    """How often and how carefully.

    Attributes:
        rounds: visits to each contestant.
        foreign: share of the cores that others may take; above it a figure is taken again.
        retries: how often at most.
        timeout: seconds that a wave may take.
        vocabulary: prompts are of ids below it.
        skipped: ``CONTESTANT:COLUMN`` of figures that are left out.
    """

    rounds: int
    foreign: float
    retries: int
    timeout: float
    vocabulary: int
    skipped: frozenset[str] = frozenset()


def in_turn(contestants: Sequence[Contestant], number: int) -> list[Contestant]:
    """The order of a round: each begins one further."""
    shift = number % len(contestants) if contestants else 0
    return [*contestants[shift:], *contestants[:shift]]


def figures(column: Column, waves: Sequence[Wave]) -> dict[str, float]:
    """What a column's waves say, the median of them."""
    found: dict[str, list[float]] = {}
    for wave in waves:
        first = statistics.median(wave.first)
        values = {"ttft": first * 1000}
        if column.concurrency == 1:
            values["prefill"] = column.prompt / first
        if column.new > 1:
            values["rate"] = column.concurrency * column.new / wave.seconds
            spans = [end - begin for begin, end in zip(wave.first, wave.last, strict=True)]
            if (span := statistics.median(spans)) > 0:  # else all came at once
                values["token"] = span / (column.new - 1) * 1000
                values["decode"] = column.concurrency * (column.new - 1) / span
        for key, value in values.items():
            found.setdefault(key, []).append(value)
    return {f"{column.name}.{key}": statistics.median(values) for key, values in found.items()}


def prompts(column: Column, vocabulary: int, seed: str) -> list[list[int]]:
    """Random words; the same for the same ``seed``."""
    source = random.Random(seed)
    return [
        [source.randrange(FIRST_WORD, vocabulary) for _ in range(column.prompt)]
        for _ in range(column.concurrency)
    ]


class Run:
    """Measures all contestants on one model.

    Args:
        columns: what to measure.
        rules: how.
        logs: a folder for what the contestants say.
        say: told of every figure.
    """

    def __init__(self, columns: Sequence[Column], rules: Rules, logs: Path, say: Say) -> None:
        self.results = Results()
        self._columns = columns
        self._rules = rules
        self._logs = logs
        self._say = say

    def visit(self, contestant: Contestant, model: Path, number: int) -> None:
        """Start it, send it every column's waves, and end it; of the round ``number``."""
        log = self._logs / f"{contestant.name.replace(' ', '-')}.log"
        used: list[dict[str, float]] = []
        skipped = self._rules.skipped
        columns = [one for one in self._columns if f"{contestant.name}:{one.name}" not in skipped]
        for group in contestant.visits(columns):
            names = "+".join(column.name for column in group)
            self._say(f"{contestant.name}: starts for {names}")
            try:
                running = contestant.start(model, Setup.of(group), log)
            except (Failure, OSError) as error:
                self.fail(contestant, names, error)
                continue
            try:
                for column in group:
                    self._column(contestant, running, column, number)
                if running.process.poll() is None:
                    used.append(asdict(memory(running.process.pid)))
            finally:
                running.close()
        if used:
            highest = {key: max(use[key] for use in used) for key in used[0]}
            self.results.add(
                contestant.name, {f"memory.{key}": value for key, value in highest.items()}
            )

    def _column(
        self, contestant: Contestant, running: Running, column: Column, number: int
    ) -> None:
        rules, name = self._rules, contestant.name
        try:
            warm = prompts(column, rules.vocabulary, f"{number} {column.name} warm")
            running.wave(warm, min(column.new, WARM_NEW), rules.timeout)
            foreign, found = min(
                self._attempts(running, column, f"{number} {column.name}"),
                key=lambda attempt: attempt[0],
            )
        except (Failure, OSError, ValueError) as error:  # the last: an answer is no JSON
            self.fail(contestant, column.name, error)
            return
        self.results.add(name, found)
        self.results.foreign.setdefault(name, {}).setdefault(column.name, []).append(foreign)
        said = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
        self._say(f"{name}: {said} (foreign {foreign:.2f})")

    def _attempts(
        self, running: Running, column: Column, seed: str
    ) -> Iterator[tuple[float, dict[str, float]]]:
        """Foreign share and figures, again until it is quiet or has been tried often enough."""
        rules = self._rules
        for attempt in range(rules.retries + 1):
            sent = [
                prompts(column, rules.vocabulary, f"{seed} {attempt} {repeat}")
                for repeat in range(column.repeats)
            ]
            before = Clock.read()
            waves = [running.wave(wave, column.new, rules.timeout) for wave in sent]
            foreign = Clock.read().foreign_since(before)
            yield foreign, figures(column, waves)
            if foreign <= rules.foreign:
                return

    def fail(self, contestant: Contestant, stage: str, error: Exception) -> None:
        """Note that it could not do that, and go on."""
        self.results.fail(contestant.name, stage, str(error))
        self._say(f"{contestant.name}: {stage} failed: {error}")
