"""The contract between the scheduler and what proposes draft tokens (speculative decoding).

Drafts never change a request's output: each position is sampled as if alone, and a draft is
accepted if it is the token that was sampled for its position (see docs/speculation.md). So a
speculator only decides how much is computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.step import Proposal, Step


class Speculator(Protocol):
    """Proposes drafts for the running sequences, and learns which of them were right.

    Attributes:
        asks_worker: whether the worker has a drafter with weights, whose proposals it asks for.
    """

    asks_worker: bool

    def propose(self, sequences: Many[Sequence], waiting: bool) -> list[list[int]]:
        """Draft tokens behind each sequence, likely ones first to be dropped from the end.

        Args:
            sequences: that the step decodes, in order of priority. The host knows all their tokens.
            waiting: whether the step may compute prompts, too.

        Returns:
            A list per sequence, empty for none. Of a sequence that can take fewer (its length, its
            blocks), the first ones are used.
        """
        ...

    def ask(self, sequences: Many[Sequence]) -> list[int] | None:
        """How many drafts the worker is to propose behind each sequence, after a step.

        Called only if ``asks_worker``.

        Args:
            sequences: that the step chooses a token for, which counts as one of theirs already; may
                be empty.

        Returns:
            A number per sequence; None if drafts with weights do not pay for now, for any.
        """
        ...

    def proposed(self, sequence: Sequence, proposal: Proposal) -> None:
        """The worker has proposed drafts behind the sequence's known tokens."""
        ...

    def learn(self, sequence: Sequence, drafts: Many[int], accepted: int) -> None:
        """A step has verified ``drafts`` and found the first ``accepted`` of them right."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """The sequence has ended, perhaps without having run."""
        ...

    def timed(self, step: Step, seconds: float) -> None:
        """A step has been applied, ``seconds`` after its scheduling began."""
        ...
