"""What the engine's statistics add up to: a few sums for every message, the rest for who asks."""

from __future__ import annotations

import time
from typing import NamedTuple

from tgi_cli.engine.distribution import SECONDS, Distribution
from tgi_cli.engine.step_stats import StepStatistics, StepTimes

METHODS = ("prefill", "decode")
STAGES = ("total", "schedule", "forward", "update", "send")
REASONS = ("backpressure", "wait_exceeded", "chunking")
_SIZES = tuple(range(1, 1025))
_ACCEPTED = (*range(9), 12, 16)


class EngineCounters(NamedTuple):
    """Since the engine's start; ``cached_blocks`` as of its latest step.

    Fields as :class:`tgi_cli.rpc.interface.EngineLoad` has them.
    """

    reused_tokens: int = 0
    prompt_tokens: int = 0
    cached_blocks: int = 0
    steps: int = 0
    context_tokens: int = 0


class EngineMetrics:
    """Give it to the core loop as ``on_statistics``, and its :meth:`timed` as ``on_times``.

    Attributes:
        now: replaced whole by the loop's thread at every step, never changed: others read it
            without a lock.
        seconds: of a stage of the steps of a method; ``("schedule", "join")``: of choosing those
            that let somebody in.
        sizes: how many got their place together.
        accepted: tokens that a step gave a request beyond its first.
        launched, failed: steps, by method.
        joined: times that newcomers joined running requests, by reason.

    The distributions and counts grow in place; who reads one meanwhile sees it a step old.
    """

    def __init__(self) -> None:
        self.now = EngineCounters()
        self.seconds = {
            (stage, method): Distribution(SECONDS) for stage in STAGES for method in METHODS
        }
        self.seconds["schedule", "join"] = Distribution(SECONDS)
        self.sizes = Distribution(_SIZES)
        self.accepted = Distribution(_ACCEPTED)
        self.launched = dict.fromkeys(METHODS, 0)
        self.failed = dict.fromkeys(METHODS, 0)
        self.joined = dict.fromkeys(REASONS, 0)
        self._oldest_ns = 0

    def __call__(self, step: StepStatistics) -> None:
        """Take in one more step."""
        self.now = EngineCounters(
            reused_tokens=step.reused_tokens,
            prompt_tokens=step.prompt_tokens,
            cached_blocks=step.cached_blocks,
            steps=step.iteration,
            context_tokens=self.now.context_tokens + step.context_tokens,
        )
        self._oldest_ns = step.oldest_ns
        self.launched["prefill" if step.context_tokens else "decode"] += 1
        if step.new_requests:
            self.sizes.observe(step.new_requests)
        if step.joined:
            self.joined[step.joined] += 1
        if step.generation_requests:
            # A step gives a request one token as long as nothing speculates.
            self.accepted.observe(0, step.generation_requests)

    def timed(self, step: StepTimes) -> None:
        """Take in what one took, when it has ended."""
        method = "prefill" if step.prefill else "decode"
        if step.failed:
            self.failed[method] += 1
            return
        for stage in STAGES:
            self.seconds[stage, method].observe(getattr(step, stage))
        if step.joined:
            self.seconds["schedule", "join"].observe(step.schedule)

    @property
    def queue_age(self) -> float:
        """Seconds that the longest waiting request had waited, and has since the latest step."""
        oldest = self._oldest_ns
        return (time.monotonic_ns() - oldest) / 1e9 if oldest else 0.0
