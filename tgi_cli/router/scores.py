"""Log-probabilities of a prompt, and how they are written down."""

from __future__ import annotations

from tgi_cli.engine.messages import PromptLogprobs


def shortest(value: float) -> float:
    """A 32-bit float without the digits that 64 bits add: -0.1, not -0.10000000149011612."""
    return float(f"{value:.7g}")


class PromptScores:
    """What the engine reports of one prompt, run by run: parallel lists from token 1 on.

    Attributes:
        logprobs: of each token after the first, which nothing precedes.
        tops: (token id, log-probability) pairs of the likeliest in its place.
    """

    __slots__ = ("logprobs", "tops")

    def __init__(self) -> None:
        self.logprobs: list[float] = []
        self.tops: list[list[tuple[int, float]]] = []

    def take(self, run: PromptLogprobs) -> None:
        """Append a run; one that starts earlier (a prompt computed again) replaces the rest."""
        place = run.start - 1
        self.logprobs[place:] = map(shortest, run.logprobs)
        top_ids = run.top_ids or [[]] * len(run.logprobs)
        top_logprobs = run.top_logprobs or [[]] * len(run.logprobs)
        self.tops[place:] = [
            list(zip(ids, map(shortest, values), strict=True))
            for ids, values in zip(top_ids, top_logprobs, strict=True)
        ]
