"""Speculative decoding: finds drafts of the next tokens, and chooses how many a step verifies.

See docs/speculation.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from tgi_cli.config import EngineConfig
from tgi_cli.engine.speculation.adaptive import AdaptiveSpeculator
from tgi_cli.engine.speculation.lookup import GrammarDrafter, LookupDrafter
from tgi_cli.engine.speculation.step_costs import StepCosts
from tgi_cli.engine.step import StepTime

__all__ = ["create_speculator"]


def create_speculator(
    config: EngineConfig, times: Iterable[StepTime], most_proposed: int = 0
) -> AdaptiveSpeculator | None:
    """What proposes drafts to a scheduler, or None without speculative decoding.

    Args:
        config: with the limits that hold after warm-up.
        times: durations of steps, measured at warm-up.
        most_proposed: drafts that the worker proposes for a sequence; 0 without a drafter that has
            weights.
    """
    if not config.speculate:
        return None
    drafters = (GrammarDrafter(), LookupDrafter(config.drafts_from_answers))
    costs = StepCosts(times, config.speculate)
    return AdaptiveSpeculator(
        config.speculate,
        costs,
        drafters,
        most_proposed=most_proposed,
        most_lag=config.max_batch_prefill_tokens,
    )
