"""What the engine's statistics add up to, for every message to carry."""

from __future__ import annotations

from typing import NamedTuple

from tgi_cli.engine.statistics import StepStatistics


class Totals(NamedTuple):
    """Since the engine's start; ``cached_blocks`` as of its latest step.

    Fields as :class:`tgi_cli.rpc.interface.EngineLoad` has them.
    """

    reused_tokens: int = 0
    prompt_tokens: int = 0
    cached_blocks: int = 0
    steps: int = 0
    context_tokens: int = 0


class Tally:
    """Give it to the core loop as ``on_statistics``.

    Attributes:
        now: replaced whole by the loop's thread at every step, never changed: others read it
            without a lock.
    """

    def __init__(self) -> None:
        self.now = Totals()

    def __call__(self, step: StepStatistics) -> None:
        """Take in one more step."""
        self.now = Totals(
            reused_tokens=step.reused_tokens,
            prompt_tokens=step.prompt_tokens,
            cached_blocks=step.cached_blocks,
            steps=step.iteration,
            context_tokens=self.now.context_tokens + step.context_tokens,
        )
