"""The contract between the scheduler and a proposer of draft tokens (speculative decoding).

Drafts never change a request's output: each position is sampled as if alone, and a draft is
accepted if it is the token that was sampled for its position (see docs/speculation.md). A
speculator only decides how much is computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from tgi_cli.engine.sequence import Sequence
from tgi_cli.engine.step import Proposal, Step


class Speculator(Protocol):
    """Proposes drafts for the running sequences, and learns which of them were right."""

    @property
    def asks_worker(self) -> bool:
        """Whether the worker has a drafter with weights, whose proposals it asks for."""
        ...

    def may_propose(self, sequences: Many[Sequence], others: int = 0) -> bool:
        """Whether it may propose drafts for the next step.

        If not, that step may be scheduled before the tokens of the step in flight are known.

        Args:
            sequences, others: as for :meth:`propose`, before the host knows all tokens.
        """
        ...

    def propose(self, sequences: Many[Sequence], waiting: bool, others: int = 0) -> list[list[int]]:
        """Propose draft tokens for each sequence.

        Args:
            sequences: at least one of those that the step decodes, in order of priority. The host
                knows all their tokens.
            waiting: whether prompts wait, of which the step computes a part.
            others: number of further sequences that the step decodes, without drafts.

        Returns:
            A list per sequence, empty for none. If its length or its blocks allow fewer, the first
            ones are used.
        """
        ...

    def ask(self, sequences: Many[Sequence]) -> list[int] | None:
        """How many drafts the worker is to propose after each sequence, after a step.

        Called only if ``asks_worker``.

        Args:
            sequences: sequences that the step chooses a token for, which is counted as theirs
                already; may be empty.

        Returns:
            A number per sequence; None if drafts with weights do not pay for any of them now.
        """
        ...

    def proposed(self, sequence: Sequence, proposal: Proposal) -> None:
        """Take the drafts that the worker has proposed after the sequence's known tokens."""
        ...

    def learn(self, sequence: Sequence, drafts: Many[int], accepted: int) -> None:
        """Learn that a step has verified ``drafts`` and accepted the first ``accepted`` of them."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, perhaps without having run."""
        ...

    def timed(self, step: Step, seconds: float) -> None:
        """Learn that a step was applied, for which streams have waited ``seconds``.

        Called once for each step.
        """
        ...
