"""How much of an answer is probably left, from the lengths of earlier ones."""

from __future__ import annotations

from tgi_cli.engine.sequence import Sequence

_LEAST_WEIGHT = 0.05
"""Weight of a new length in the average, which covers about the last twenty."""

_LONGER = 0.5
"""Expected further tokens of an answer longer than the average, as a share of those so far."""


class AnswerLengths:
    """The average length of answers, in tokens; 0 before the first has ended."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._count = 0

    def left(self, sequence: Sequence) -> float:
        """The tokens that are expected to follow those of the sequence."""
        so_far = len(sequence.token_ids) - sequence.prompt_tokens
        expected = max(self._mean - so_far, _LONGER * so_far)
        return min(expected, sequence.max_tokens - sequence.num_tokens)

    def learn(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        length = len(sequence.token_ids) - sequence.prompt_tokens
        if length > 0:
            self._count += 1
            self._mean += (length - self._mean) * max(_LEAST_WEIGHT, 1 / self._count)
