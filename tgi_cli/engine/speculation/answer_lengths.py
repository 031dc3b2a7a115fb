"""How much of an answer is probably left, from the lengths of earlier ones."""

from __future__ import annotations

from tgi_cli.engine.sequence import Sequence

_LEAST_WEIGHT = 0.05
"""Of a new length in the average: the average is of the last twenty or so."""

_LONGER = 0.5
"""Of the tokens so far, those that an answer longer than the average is expected to go on for."""


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
