"""How long a step takes with draft rows, from measurements at warm-up and since.

The warm-up times rows of one sequence, which share their keys, and sequences of one row, each of
which costs the host and the attention more. A step of B sequences with d draft rows takes

    sequences(B) + rows(B + d) - rows(B) + (B a + d b) (context - measured context)

where a and b are the seconds per token of context of a sequence and of one more row of it. While
the engine runs, the durations of its steps correct the figures by classes of B: see
:mod:`tgi_cli.engine.speculation.row_costs`.

A step that also computes prompts is bound by computation: there a draft row takes as long as one of
many, though it is nearly free beside few.

A drafter with weights takes additional time after a step: a first pass, over the tokens that the
step has chosen, and one for each further draft. The first pass of a draft model is longer if it has
to compute a prompt first, or tokens that it missed while nothing was proposed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from tgi_cli.engine.speculation.draft_lengths import MARGIN, break_even
from tgi_cli.engine.speculation.row_costs import RowCosts
from tgi_cli.engine.step import MAX_DRAFT_ROWS, StepTime

_ROW_SHARE = 0.05
"""Assumed cost of a row, as a share of a step of one row, if nothing was measured."""

_LOOK_UP_SECONDS = 2e-5
"""Assumed time of a sequence's look-up, before any was measured."""

_LOOK_UP_WEIGHT = 0.02
"""Least weight of a new measurement in the average of look-ups."""

_ASSUMED_LOOK_UPS = 8
"""Look-ups that the assumed time weighs as much as."""

_CONTEXTS = 512
"""Contexts that differ by less have the same costs."""

_REFRESH = 16
"""Steps after which costs are calculated again."""

_LEAST_WEIGHT = 0.05
"""Weight of a new duration in an average, which covers about the last twenty."""

_HOPE = 2.0
"""Standard deviations by which a duration may be shorter than expected for drafts to be tried."""

_LEAST_SPEED = 0.1
"""Least share of its measured duration that a proposal, or catching up, is taken to last."""

_OUTLIER = 4.0
"""Factor by which a duration may differ from the expected one: beyond, other programs ran."""


class _Curve:
    """A function of a whole number that never falls, between and beyond measured points.

    Other programs can only have made a step slower: one of more rows bounds those of fewer.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        self._x = sorted(points)
        least = accumulate((points[x] for x in reversed(self._x)), min)
        self._y = list(least)[::-1]

    def __call__(self, x: int) -> float:
        xs, ys = self._x, self._y
        if len(xs) == 1:
            return ys[0] * (1 + _ROW_SHARE * (x - xs[0]))
        right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
        slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
        return ys[right - 1] + slope * (x - xs[right - 1])

    @property
    def slope(self) -> float:
        """The average increase from half of the last point to it."""
        last = self._x[-1]
        return (self(last) - self(last // 2)) / (last - last // 2)


@dataclass(slots=True)
class _Average:
    """A moving average of ratios; 1 before the first."""

    value: float = 1.0
    count: int = 0

    def add(self, ratio: float) -> None:
        self.count += 1
        ratio = min(max(ratio, self.value / _OUTLIER), self.value * _OUTLIER)
        self.value += (ratio - self.value) * max(_LEAST_WEIGHT, 0.5 / self.count)


@dataclass(slots=True)
class Costs:
    """The costs of steps with one number of sequences and about one context.

    Attributes:
        sequences: number of sequences in a step.
        seconds: duration without drafts, as measured at warm-up.
        measured: durations with 0, 1, 2, ... draft rows, as multiples of that.
        durations: the same, corrected.
        limits: durations that steps do not exceed on average, as far as is known.
        hopes: durations that steps may well have, as far as is known.
        look_up: time to look a sequence up, as a multiple of a step without drafts.
        break_even: the survival below which no number of drafts is worth it and their look-up,
            even if all have it.
        pay: whether any number of drafts is worth it, if all are right.
        may_pay: the same, if steps have the durations that are hoped for.
    """

    sequences: int
    seconds: float
    measured: list[float]
    durations: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    hopes: list[float] = field(default_factory=list)
    look_up: float = 0.0
    break_even: float = 1.0
    pay: bool = False
    may_pay: bool = False
    version: int = -1


class StepCosts:
    """Predicts the durations of steps with drafts.

    Args:
        times: measured at warm-up; without any, a draft row is assumed to cost a twentieth of a
            step of one row.
        most_drafts: most drafts of a sequence in a step.

    Attributes:
        catches_up: whether the drafter computes the tokens it lacks of a sequence only when it is
            asked for drafts, as measured; if not, it follows every step.
    """

    def __init__(self, times: Iterable[StepTime], most_drafts: int) -> None:
        times = list(times) or [StepTime(1, 1, 0, 1.0)]
        self._most_drafts = most_drafts
        catching_up = [time for time in times if time.lag]
        proposing = [time for time in times if time.proposals and not time.lag]
        times = [time for time in times if not time.proposals]
        self._context = min(time.context for time in times)
        near = [time for time in times if time.context == self._context]
        self._rows = _Curve({time.rows: time.seconds for time in near if time.sequences == 1})
        alone = {time.sequences: time.seconds for time in near if time.rows == time.sequences}
        self._sequences = _Curve({**alone, 1: self._rows(1)})
        self._per_sequence, self._per_draft = _context_slopes(times, self._context)
        self._proposals = _ProposalCosts(proposing, self._sequences)
        self._lag_seconds = max(map(self._per_lag, catching_up), default=0.0)
        self._lag_speed = _Average()
        self.catches_up = bool(catching_up)
        self._speeds: dict[int, _Average] = {}
        self._row_costs: dict[int, RowCosts] = {}
        self._costs: dict[tuple[int, int, bool], Costs] = {}
        self._observed = 0
        self._look_up_seconds = _LOOK_UP_SECONDS
        self._looked_up = 0

    def of(self, sequences: int, context: int, prompts: bool = False) -> Costs:
        """The costs of steps of ``sequences`` with ``context`` tokens each. 0.3 us if known.

        With ``prompts``, of draft rows in a step that computes prompts, too.
        """
        costs = self._uncorrected(sequences, context, prompts)
        version = self._observed // _REFRESH
        if costs.version != version:
            self._correct(costs)
            costs.version = version
        return costs

    def _uncorrected(self, sequences: int, context: int, prompts: bool = False) -> Costs:
        """The same, corrected some time ago or never."""
        key = (sequences, context // _CONTEXTS, prompts)
        costs = self._costs.get(key)
        if costs is None:
            if len(self._costs) >= 256:
                self._costs.clear()
            costs = self._costs[key] = self._measured(sequences, key[1] * _CONTEXTS, prompts)
        return costs

    def proposing(self, sequences: int, drafts: int) -> float:
        """Seconds that the worker takes to propose ``drafts`` for each sequence. Takes 1 us."""
        return self._proposals.seconds(sequences, drafts)

    def catching_up(self, tokens: int) -> float:
        """Seconds that the drafter takes to compute ``tokens`` that it lacks."""
        return tokens * self._lag_seconds * self._lag_speed.value

    def _per_lag(self, time: StepTime) -> float:
        """Seconds of each token that the drafter lacked before a step of one sequence."""
        without = self._sequences(1) + self.proposing(1, time.proposals)
        return max(0.0, time.seconds - without) / time.lag

    def speed(self, sequences: int) -> float:
        """What steps without drafts have taken recently, as a multiple of what was measured."""
        average = self._speeds.get(batch_class(sequences))
        return 1.0 if average is None else average.value

    def _measured(self, sequences: int, context: int, prompts: bool) -> Costs:
        more = max(0, context - self._context)
        seconds = self._sequences(sequences) + sequences * self._per_sequence * more
        rows, row = self._rows(sequences), self._per_draft * more
        drafts = range(min(sequences * self._most_drafts, MAX_DRAFT_ROWS) + 1)
        if prompts:
            added = [each * (self._rows.slope + row) for each in drafts]
        else:
            added = [max(0.0, self._rows(sequences + each) - rows) + each * row for each in drafts]
        return Costs(sequences, seconds, [(seconds + each) / seconds for each in added])

    def _correct(self, costs: Costs) -> None:
        row_costs = self._row_costs.get(batch_class(costs.sequences)) or RowCosts()
        found = row_costs.predict(each - 1.0 for each in costs.measured[1:])
        costs.durations = [1.0] + [duration for duration, _ in found]
        costs.limits = [1.0] + [duration + deviation for duration, deviation in found]
        costs.hopes = [1.0] + [max(1.0, each - _HOPE * deviation) for each, deviation in found]
        costs.look_up = self._look_up_seconds / (costs.seconds * self.speed(costs.sequences))
        margin = MARGIN + costs.sequences * costs.look_up
        costs.break_even = break_even(costs.sequences, costs.limits, margin)
        costs.pay = costs.break_even < 1.0
        costs.may_pay = costs.pay or break_even(costs.sequences, costs.hopes, margin) < 1.0

    def looked_up(self, seconds: float) -> None:
        """Learn that looking a sequence up took ``seconds``."""
        self._looked_up += 1
        seconds = min(seconds, self._look_up_seconds * _OUTLIER)
        weight = max(_LOOK_UP_WEIGHT, 1.0 / (_ASSUMED_LOOK_UPS + self._looked_up))
        self._look_up_seconds += (seconds - self._look_up_seconds) * weight

    def learn_proposing(self, step: StepTime) -> None:
        """Learn from a step after which drafts were proposed."""
        costs = self.of(step.sequences, step.context)
        drafts = step.rows - step.sequences
        if drafts < len(costs.durations):
            speed = self.speed(step.sequences)
            left = step.seconds - costs.seconds * speed * costs.durations[drafts]
            self._proposals.learn(step.sequences, step.proposals, left)

    def learn_catching_up(self, step: StepTime) -> None:
        """Learn from a step after which the drafter has computed ``lag`` tokens in all."""
        costs, measured = self.of(step.sequences, step.context), self._lag_seconds * step.lag
        drafts = step.rows - step.sequences
        if measured and drafts < len(costs.durations):
            known = costs.seconds * self.speed(step.sequences) * costs.durations[drafts]
            known += self.proposing(step.sequences, step.proposals)
            self._lag_speed.add(max(_LEAST_SPEED, (step.seconds - known) / measured))

    def learn(self, sequences: int, drafts: int, context: int, seconds: float) -> None:
        """Learn from a step of ``sequences`` with ``drafts`` draft rows. Takes 1 to 2 us."""
        costs = self._uncorrected(sequences, context)
        if drafts >= len(costs.measured):
            return
        kind = batch_class(sequences)
        speed = self._speeds.setdefault(kind, _Average())
        row_costs = self._row_costs.setdefault(kind, RowCosts())
        if not drafts:
            row_costs.learn_plain(seconds / (costs.seconds * speed.value))
            speed.add(seconds / costs.seconds)
        else:
            duration = seconds / (costs.seconds * speed.value)
            row_costs.learn(costs.measured[drafts] - 1.0, duration)
        self._observed += 1


class _ProposalCosts:
    """The time of proposals, from a few durations of steps that end with them.

    Args:
        times: durations of steps of one row per sequence.
        without: seconds of such steps without proposals, by the number of sequences.
    """

    def __init__(self, times: Iterable[StepTime], without: _Curve) -> None:
        added: dict[int, dict[int, float]] = {}
        for time in times:
            seconds = max(0.0, time.seconds - without(time.sequences))
            added.setdefault(time.sequences, {})[time.proposals] = seconds
        self._first: _Curve | None = None
        self._each: _Curve | None = None
        if added:
            each = {count: _per_pass(points) for count, points in added.items()}
            first = {
                count: max(0.0, max(points.values()) - (max(points) - 1) * each[count])
                for count, points in added.items()
            }
            self._first, self._each = _Curve(first), _Curve(each)
        self._speed = _Average()

    def seconds(self, sequences: int, drafts: int) -> float:
        if not drafts or self._first is None or self._each is None:
            return 0.0
        each = self._each(sequences)
        return self._speed.value * max(0.0, self._first(sequences) + (drafts - 1) * each)

    def learn(self, sequences: int, drafts: int, seconds: float) -> None:
        measured = self.seconds(sequences, drafts) / self._speed.value
        if measured > 0:
            self._speed.add(max(_LEAST_SPEED, seconds / measured))


def _per_pass(points: Mapping[int, float]) -> float:
    """Seconds of each draft beyond the first, from durations by the number of drafts."""
    fewest, most = min(points), max(points)
    if fewest == most:
        return points[most] / most
    return max(0.0, (points[most] - points[fewest]) / (most - fewest))


def _context_slopes(times: list[StepTime], context: int) -> tuple[float, float]:
    """Seconds per token of context, of a sequence and of each draft row of it."""
    seconds = {(t.rows, t.context): t.seconds for t in times if t.sequences == 1}
    longest = max((t.context for t in times if t.sequences == 1), default=context)
    if longest == context:
        return 0.0, 0.0
    slopes = {
        rows: (there - seconds[rows, context]) / (longest - context)
        for (rows, at), there in seconds.items()
        if at == longest and (rows, context) in seconds
    }
    sequence = max(0.0, slopes.pop(1, 0.0))
    if not slopes:
        return sequence, 0.0
    rows = max(slopes)
    return sequence, max(0.0, (slopes[rows] - sequence) / (rows - 1))


def batch_class(count: int) -> int:
    """The class of a count, within which corrections are shared: 1, 2, 3 to 4, 5 to 8, ..."""
    return (count - 1).bit_length()
