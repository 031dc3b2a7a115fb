"""What the engine measures: its load, and the number, size and duration of its steps.

:class:`EngineMetrics` is the one record of it, from the core loop to ``/metrics``.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from tgi_cli.engine.block_store import StoreEvent
from tgi_cli.engine.draft_source import DraftSource
from tgi_cli.engine.messages import StepOutputs
from tgi_cli.engine.step import Step

METHODS = ("prefill", "decode")
"""Kinds of steps: one that computes prompt tokens or encodes images is a ``prefill``."""
STAGES = ("total", "schedule", "forward", "update", "send")
"""Stages of a step: choosing what to compute, the worker's time from launch to result (less what
it still spent on the previous step), applying the result, and passing on the outputs."""
JOIN_REASONS = ("backpressure", "wait_exceeded", "chunking")
"""TGI's names of why waiting requests join a running batch."""

DRAFT_SOURCES = tuple(each.name.lower() for each in DraftSource if each is not DraftSource.UNSEEN)
"""Where drafts come from; see docs/speculation.md."""

POSITIONS = 32
"""Drafts of a request in one step whose acceptance is counted by position, from the first on."""

StepStats = dict[str, int | str]
"""Statistics of a step, with the names of TensorRT-LLM's batch manager where it has one.

https://nvidia.github.io/TensorRT-LLM/legacy/advanced/batch-manager.html#statistics
"""

SECONDS = tuple(0.0001 * 1.5**power for power in range(1, 36))
"""TGI's buckets for all durations, in seconds: 0.00015 to 145.6."""


class Histogram:
    """A Prometheus histogram; finds the bucket by bisection (0.3 us an observation).

    Attributes:
        bounds: upper bounds of the buckets, ascending and inclusive.
        counts: values per bucket, not cumulative; the last bucket has no bound.
        sum: sum of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def add(self, other: Histogram) -> None:
        """Add the values of another histogram with the same bounds."""
        self.counts = [
            mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)
        ]
        self.sum += other.sum


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's gauges at one moment, and its totals since it started.

    Attributes:
        queued, running: requests.
        used_blocks: KV blocks that requests hold.
        cached_blocks: KV blocks, used or free, that a prefix can find.
        used_state_slots: slots of recurrent states that requests hold.
        cached_states: slots, used or free, with a state that a prefix can find.
        preemptions: total.
        reused_tokens: total of prompt tokens found in the prefix cache.
        prompt_tokens: total of prompt tokens of all requests that have started.
        steps: total.
        context_tokens: total of prompt tokens computed, recomputation after preemption included.
        drafted_tokens: total of draft tokens verified.
        accepted_tokens: total of those that were accepted.
        encoded_images: total of images that the model's encoder has run over.
        reused_images: total of images in prompts whose features were cached, or being computed.
        stored_bytes: bytes of the files in ``--kv-cache-dir``.
    """

    queued: int = 0
    running: int = 0
    used_blocks: int = 0
    preemptions: int = 0
    reused_tokens: int = 0
    prompt_tokens: int = 0
    cached_blocks: int = 0
    steps: int = 0
    context_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    used_state_slots: int = 0
    cached_states: int = 0
    encoded_images: int = 0
    reused_images: int = 0
    stored_bytes: int = 0


def _histograms() -> dict[tuple[str, str], Histogram]:
    seconds = [(stage, method) for stage in STAGES for method in METHODS]
    histograms = {key: Histogram(SECONDS) for key in (*seconds, ("schedule", "join"))}
    histograms["next_size", ""] = Histogram(range(1, 1025))
    histograms["skipped_tokens", ""] = Histogram((*range(9), 12, 16))
    histograms["accepted_drafts", ""] = Histogram(range(POSITIONS))
    return histograms


def _counts() -> dict[tuple[str, str], int]:
    steps = {(name, method): 0 for name in ("launched", "failed") for method in METHODS}
    steps |= {("joined", reason): 0 for reason in JOIN_REASONS}
    drafts = ("drafted", "accepted")
    return steps | {(name, source): 0 for name in drafts for source in DRAFT_SOURCES}


@dataclass(slots=True)
class EngineMetrics:
    """Counts and histograms since the engine started, by name and label.

    The core loop's thread updates them without a lock, so other threads may see a step half
    recorded.

    Attributes:
        load: as of the latest read of :attr:`tgi_cli.engine.core.EngineCore.metrics`.
        histograms: seconds by stage and method; ``("schedule", "join")``: seconds of scheduling
            steps that requests join; ``next_size``: requests that join together;
            ``skipped_tokens``: tokens of a request in one step beyond its first;
            ``accepted_drafts``: draft tokens of a request accepted in one step that verified any.
        counts: steps ``launched`` and ``failed`` by method; ``joined``: times that requests joined
            a running batch, by reason; draft tokens ``drafted`` and ``accepted``, by source; with
            ``--kv-cache-dir``, blocks ``stored`` by event
            (:class:`tgi_cli.engine.block_store.StoreEvent`).
        oldest_ns: arrival of the longest waiting request, or 0 if none waits, in
            ``time.monotonic_ns()``; as of the latest step.
    """

    load: EngineLoad = EngineLoad()
    histograms: dict[tuple[str, str], Histogram] = field(default_factory=_histograms)
    counts: dict[tuple[str, str], int] = field(default_factory=_counts)
    oldest_ns: int = 0

    @classmethod
    def total(cls, parts: Sequence[EngineMetrics]) -> EngineMetrics:
        """The sum over several engines, with the longest waiting request of all.

        Engines share the folder of ``--kv-cache-dir``, whose bytes count once.
        """
        sums = {
            each.name: sum(getattr(part.load, each.name) for part in parts)
            for each in fields(EngineLoad)
        }
        sums["stored_bytes"] = max((part.load.stored_bytes for part in parts), default=0)
        found = cls(EngineLoad(**sums))
        for part in parts:
            for key, histogram in part.histograms.items():
                found.histograms[key].add(histogram)
            for name, count in part.counts.items():
                found.counts[name] = found.counts.get(name, 0) + count
        found.oldest_ns = min((part.oldest_ns for part in parts if part.oldest_ns), default=0)
        return found

    @property
    def queue_seconds(self) -> float:
        """How long the longest waiting request has been waiting."""
        oldest = self.oldest_ns  # read once: the loop's thread may replace it
        return (time.monotonic_ns() - oldest) / 1e9 if oldest and self.load.queued else 0.0

    def store_counted(self, counts: Mapping[StoreEvent, int]) -> None:
        """Take the counts of a store of blocks."""
        for event, count in counts.items():
            self.counts["stored", event.value] = count

    def step_launched(self, step: Step, join_reason: str, oldest_ns: int) -> None:
        """Record a step; ``join_reason`` is empty unless requests join a running batch."""
        self.counts["launched", _method(step)] += 1
        if step.new:
            self.histograms["next_size", ""].observe(len(step.new))
        if join_reason:
            self.counts["joined", join_reason] += 1
        self.oldest_ns = oldest_ns

    def step_updated(self, outputs: StepOutputs) -> None:
        """Record the outputs of a step: 0.8 us for 32 requests, 40 with four tokens each.

        As in TGI, every request that got tokens counts, by those beyond the first: accepted drafts,
        and tokens that a grammar forced.
        """
        ids = outputs.request_ids
        if not ids:
            return
        skipped = self.histograms["skipped_tokens", ""]
        if len(set(ids)) == len(ids):
            skipped.observe(0, len(ids))
        else:
            for count, times in Counter(Counter(ids).values()).items():
                skipped.observe(count - 1, times)
        if outputs.drafts:
            accepted = self.histograms["accepted_drafts", ""]
            for count, times in Counter(drafts.accepted for drafts in outputs.drafts).items():
                accepted.observe(count, times)
            for drafts in outputs.drafts:
                if drafts.source:
                    self.counts["drafted", drafts.source] += drafts.drafted
                    self.counts["accepted", drafts.source] += drafts.accepted


def _method(step: Step) -> str:
    prompts = len(step.rows) > step.num_decodes or step.encodes
    return "prefill" if prompts else "decode"


class StageTimer:
    """Times the stages of steps, which end in the order of their launches.

    Args:
        metrics: gets the durations.
    """

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._launched: deque[tuple[str, bool, float, float]] = deque()
        self._previous = self._arrived = self._updated = self._ended = 0.0

    def launch(self, step: Step, began: float) -> None:
        """Record that a step, whose scheduling began at ``began``, is about to be launched."""
        now = time.perf_counter()
        self._launched.append((_method(step), bool(step.new), now - began, now))

    def arrive(self) -> None:
        """Record that the result of the oldest step has arrived."""
        self._arrived = time.perf_counter()

    def update(self) -> None:
        """Record that the result was applied."""
        self._updated = time.perf_counter()

    def end(self) -> float:
        """Record that the oldest step's outputs were passed on.

        Returns:
            Seconds since its scheduling began, or since the step before it ended if that was later,
            as it is with a step in flight: what streams wait for it.
        """
        method, joined, schedule, launched = self._launched.popleft()
        now = time.perf_counter()
        forward = self._arrived - max(launched, self._previous)
        update, send = self._updated - self._arrived, now - self._updated
        seconds = now - max(launched - schedule, self._ended)
        self._previous, self._ended = self._arrived, now
        histograms = self._metrics.histograms
        total = schedule + forward + update + send
        histograms["total", method].observe(total)
        histograms["schedule", method].observe(schedule)
        histograms["forward", method].observe(forward)
        histograms["update", method].observe(update)
        histograms["send", method].observe(send)
        if joined:
            histograms["schedule", "join"].observe(schedule)
        return seconds

    def fail(self) -> None:
        """Drop the oldest step, which failed."""
        self._metrics.counts["failed", self._launched.popleft()[0]] += 1
        self._previous = time.perf_counter()
