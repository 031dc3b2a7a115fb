"""What the statistics of steps add up to."""

from __future__ import annotations

from tgi_cli.engine.statistics import StepStatistics
from tgi_cli.rpc.totals import Tally, Totals


def _step(iteration: int, context_tokens: int, **more: int) -> StepStatistics:
    names = [name for name in StepStatistics.__dataclass_fields__ if name != "timestamp"]
    counts = dict.fromkeys(names, 0) | {"iteration": iteration, "context_tokens": context_tokens}
    return StepStatistics(timestamp=0.0, **(counts | more))


def test_steps_are_summed_and_the_engines_own_sums_are_kept() -> None:
    tally = Tally()
    assert tally.now == Totals()
    tally(_step(1, 30, reused_tokens=16, prompt_tokens=46, cached_blocks=2))
    before = tally.now
    tally(_step(2, 5, reused_tokens=32, prompt_tokens=67, cached_blocks=1))
    assert tally.now == Totals(
        reused_tokens=32, prompt_tokens=67, cached_blocks=1, steps=2, context_tokens=35
    )
    assert before.context_tokens == 30, "who read it keeps what he read"
