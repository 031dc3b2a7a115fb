"""Runs the rounds and collects their results."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.peers.columns import Column
from tests.benchmarks.peers.contestant import Contestant, Failure, Running, Setup, Wave
from tests.benchmarks.peers.machine import Clock
from tests.benchmarks.peers.process_memory import Memory, PeakMemory, memory
from tests.tools.checkpoints import FIRST_WORD
from tgi_cli.process.resident_memory import release_file_pages

PREPARATION = "preparation"  # the stage before the columns
WARM_NEW = 8

Print = Callable[[str], None]


@dataclass
class Results:
    """All results of one model.

    Attributes:
        values: one value per round, by contestant and figure. Figures are named
            ``COLUMN.FIGURE``: ``rate`` is output tokens per second, ``decode`` the same without
            the first token, ``prefill`` prompt tokens per second, ``ttft`` and ``token`` (between
            tokens) are in ms; ``start.seconds`` is until it is ready. ``memory.FIGURE`` is in MB:
            ``peak`` and ``after`` the waves count shared pages once (Pss), ``peak_resident`` and
            ``resident`` for each process (RSS).
        foreign: likewise, the CPU share of other programs (0 to 1) by contestant and column.
        failures: error message by contestant and column or stage.
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
    """Parameters of a run.

    Attributes:
        rounds: visits to each contestant.
        foreign: CPU share that other programs may use; above it, a figure is measured again.
        retries: largest number of such repetitions.
        timeout: timeout of a wave in seconds.
        vocabulary: prompts consist of token ids below it.
        skipped: ``CONTESTANT:COLUMN`` of figures to skip.
    """

    rounds: int
    foreign: float
    retries: int
    timeout: float
    vocabulary: int
    skipped: frozenset[str] = frozenset()


def in_turn(contestants: Sequence[Contestant], number: int) -> list[Contestant]:
    """Return the order of a round, which rotates by one each time."""
    shift = number % len(contestants) if contestants else 0
    return [*contestants[shift:], *contestants[:shift]]


def figures(column: Column, waves: Sequence[Wave]) -> dict[str, float]:
    """Compute the figures of a column as medians over its waves."""
    found: dict[str, list[float]] = {}
    for wave in waves:
        first = statistics.median(wave.first)
        values = {"ttft": first * 1000}
        if column.concurrency == 1:
            values["prefill"] = column.prompt / first
        if column.new > 1:
            values["rate"] = column.concurrency * column.new / wave.seconds
            spans = [end - begin for begin, end in zip(wave.first, wave.last, strict=True)]
            if (span := statistics.median(spans)) > 0:  # zero if all tokens came at once
                values["token"] = span / (column.new - 1) * 1000
                values["decode"] = column.concurrency * (column.new - 1) / span
        for key, value in values.items():
            found.setdefault(key, []).append(value)
    return {f"{column.name}.{key}": statistics.median(values) for key, values in found.items()}


def prompts(column: Column, vocabulary: int, seed: str) -> list[list[int]]:
    """Return random prompts, which are the same for the same ``seed``."""
    source = random.Random(seed)
    return [
        [source.randrange(FIRST_WORD, vocabulary) for _ in range(column.prompt)]
        for _ in range(column.concurrency)
    ]


class Run:
    """Measures all contestants on one model.

    Args:
        columns: columns to measure.
        rules: parameters of the run.
        logs: folder for the contestants' logs.
        print_line: called with every figure.
    """

    def __init__(
        self, columns: Sequence[Column], rules: Rules, logs: Path, print_line: Print
    ) -> None:
        self.results = Results()
        self._columns = columns
        self._rules = rules
        self._logs = logs
        self._print_line = print_line

    def visit(self, contestant: Contestant, model: Path, number: int) -> None:
        """Start a contestant, send it the waves of every column, and stop it."""
        log = self._logs / f"{contestant.name.replace(' ', '-')}.log"
        used: list[dict[str, float]] = []
        skipped = self._rules.skipped
        columns = [one for one in self._columns if f"{contestant.name}:{one.name}" not in skipped]
        for group in contestant.visits(columns):
            release_file_pages()  # of this process, which shares libraries with contestants
            with PeakMemory() as peak:
                last = self._visit_group(contestant, model, group, log, number)
            if last is not None:
                highest = max(peak.megabytes, last.proportional)
                used.append(
                    {
                        "peak": highest,
                        "after": last.proportional,
                        "peak_resident": last.peak_resident,
                        "resident": last.resident,
                    }
                )
        if used:
            most = {key: max(use[key] for use in used) for key in used[0]}
            self.results.add(
                contestant.name, {f"memory.{key}": value for key, value in most.items()}
            )

    def _visit_group(
        self,
        contestant: Contestant,
        model: Path,
        group: Sequence[Column],
        log: Path,
        number: int,
    ) -> Memory | None:
        """Measure some columns in one process; returns its memory after them if it still runs."""
        names = "+".join(column.name for column in group)
        self._print_line(f"{contestant.name}: starting for {names}")
        began = time.monotonic()
        try:
            running = contestant.start(model, Setup.of(group), log)
        except (Failure, OSError) as error:
            self.fail(contestant, names, error)
            return None
        self.results.add(contestant.name, {"start.seconds": time.monotonic() - began})
        try:
            for column in group:
                self._column(contestant, running, column, number)
            return memory(running.process.pid) if running.process.poll() is None else None
        finally:
            running.close()

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
        except (Failure, OSError, ValueError) as error:  # ValueError: invalid JSON
            self.fail(contestant, column.name, error)
            return
        self.results.add(name, found)
        self.results.foreign.setdefault(name, {}).setdefault(column.name, []).append(foreign)
        values = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
        self._print_line(f"{name}: {values} (foreign {foreign:.2f})")

    def _attempts(
        self, running: Running, column: Column, seed: str
    ) -> Iterator[tuple[float, dict[str, float]]]:
        """Yield foreign share and figures, until the share or the retries reach their limits."""
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
        """Record a failure."""
        self.results.fail(contestant.name, stage, str(error))
        self._print_line(f"{contestant.name}: {stage} failed: {error}")
