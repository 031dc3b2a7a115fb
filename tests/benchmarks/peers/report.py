"""Formats the tables of a run in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.benchmarks.peers.columns import Column
from tests.benchmarks.peers.rounds import PREPARATION, Results

GIGA = 1e9


@dataclass(frozen=True)
class Figure:
    """One column of the serving table.

    Attributes:
        key: key of ``Results.values``.
        title: column header.
        digits: decimal places.
        more_is_better: whether larger values are better.
    """

    key: str
    title: str
    digits: int = 0
    more_is_better: bool = True

    @property
    def column(self) -> str:
        return self.key.partition(".")[0]


def serving_figures(columns: Sequence[Column]) -> list[Figure]:
    """Return the figures of ``columns`` that the serving table shows."""
    found: list[Figure] = []
    for column in columns:
        if column.new > 1:
            found.append(Figure(f"{column.name}.rate", f"tok/s, {column.concurrency} at once", 1))
    for column in columns:
        if column.concurrency == 1 and column.new > 1:
            found.append(Figure(f"{column.name}.decode", "decode alone", 1))
            found.append(Figure(f"{column.name}.ttft", "TTFT ms", 0, False))
    for column in columns:
        if column.new == 1:
            found.append(Figure(f"{column.name}.prefill", f"prefill tok/s, {column.prompt}"))
    found.append(Figure("memory.peak", "peak MB", 0, False))
    found.append(Figure("memory.after", "after MB", 0, False))
    found.append(Figure("start.seconds", "start s", 1, False))
    return found


def spread(values: Sequence[float], digits: int) -> str:
    """Format the median, and the range if there are several values."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def ratio(ours: Sequence[float], theirs: Sequence[float], more_is_better: bool) -> float:
    """Return how many times better the median of ours is; above 1, ours is better."""
    a, b = statistics.median(ours), statistics.median(theirs)
    return a / b if more_is_better else b / a


def slope(lengths: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
    """Fit the cost without context and the cost per 1,000 tokens of context, by least squares."""
    line = statistics.linear_regression([length / 1000 for length in lengths], costs)
    return line.intercept, line.slope


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Report:
    """Tables of one model's results.

    Args:
        results: results of the run.
        transports: transport of each contestant, in the order of the rows.
        ours: names of our contestants.
        noisy: foreign share above which a star marks a figure.
    """

    def __init__(
        self, results: Results, transports: Mapping[str, str], ours: Sequence[str], noisy: float
    ) -> None:
        self._results = results
        self._transports = transports
        self._ours = ours
        self._noisy = noisy

    def serving(self, columns: Sequence[Column]) -> str:
        """Format the figures, then the ratios of each of our contestants to the others."""
        shown = serving_figures(columns)
        head = ["engine", "over", *(figure.title for figure in shown)]
        parts = [
            table(
                head,
                (
                    [name, transport, *(self._cell(name, figure) for figure in shown)]
                    for name, transport in self._transports.items()
                ),
            )
        ]
        for ours in self._ours:
            rivals = [name for name in self._transports if name != ours]
            if not rivals or ours not in self._results.values:
                continue
            rows = (
                [name, *(self._ratio(ours, name, figure) for figure in shown)] for name in rivals
            )
            head = [f"{ours}, times better than", *(figure.title for figure in shown)]
            parts.append(table(head, rows))
        return "\n\n".join(parts)

    def long(self, columns: Sequence[Column]) -> str:
        """Format decode cost after prompts of each length with slopes, and prefill rates."""
        parts: list[str] = []
        for what, title, digits in (
            ("token", "decode ms/token after a prompt of", 2),
            ("prefill", "prefill tok/s of a prompt of", 0),
        ):
            head = [title, *(str(column.prompt) for column in columns)]
            if what == "token":
                head += ["no context", "per 1,000 tokens"]
            rows: list[list[str]] = []
            for name in self._transports:
                keys = [Figure(f"{column.name}.{what}", "", digits) for column in columns]
                row = [name, *(self._cell(name, figure) for figure in keys)]
                if what == "token":
                    row += self._slope(name, columns)
                rows.append(row)
            parts.append(table(head, rows))
        return "\n\n".join(parts)

    def limit(self, weights: Mapping[str, int], bandwidth: float, column: Column) -> str:
        """Format the share of the bandwidth limit at batch 1, with weights read once per token."""
        rows = []
        for name in self._transports:
            values = self._values(name, f"{column.name}.decode")
            if values and name in weights:
                rate = statistics.median(values)
                most = bandwidth / weights[name]
                row = [name, f"{weights[name] / 1e6:.0f}", f"{most:.0f}"]
                rows.append([*row, f"{rate:.1f}", f"{rate / most:.0%}"])
        head = ["engine", "weights MB/token", "limit tok/s", "decode alone", "share"]
        intro = f"Read bandwidth in this run, all cores: {bandwidth / GIGA:.1f} GB/s."
        return f"{intro}\n\n{table(head, rows)}"

    def failures(self) -> str:
        """List the failures with their causes."""
        return "\n".join(
            f"- {name}, {stage}: {why}"
            for name, stages in self._results.failures.items()
            for stage, why in stages.items()
        )

    def _values(self, name: str, key: str) -> list[float]:
        return self._results.values.get(name, {}).get(key, [])

    def _cell(self, name: str, figure: Figure) -> str:
        values = self._values(name, figure.key)
        if not values:
            stages = self._results.failures.get(name, {})
            failed = any(figure.column in stage.split("+") for stage in stages)
            return "failed" if failed or PREPARATION in stages else "-"
        foreign = self._results.foreign.get(name, {}).get(figure.column, [])
        star = "*" if any(share > self._noisy for share in foreign) else ""
        return spread(values, figure.digits) + star

    def _ratio(self, ours: str, name: str, figure: Figure) -> str:
        a, b = self._values(ours, figure.key), self._values(name, figure.key)
        return f"{ratio(a, b, figure.more_is_better):.2f}" if a and b else "-"

    def _slope(self, name: str, columns: Sequence[Column]) -> list[str]:
        points = [
            (column.prompt + column.new / 2, statistics.median(values))
            for column in columns
            if (values := self._values(name, f"{column.name}.token"))
        ]
        if len(points) < 2:
            return ["-", "-"]
        base, step = slope(*zip(*points, strict=True))
        return [f"{base:.2f}", f"{step:.2f}"]
