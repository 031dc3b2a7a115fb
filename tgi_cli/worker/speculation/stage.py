"""The last part of a step: the proposer follows what was sampled, and drafts what may be next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.engine.step import Proposal, Step, StepResult
from tgi_cli.models.speculators.base import Proposer, TargetStep
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.upload import to_host


@dataclass(slots=True)
class DeviceProposals:
    """Drafts on the device, or on their way to the host.

    Attributes:
        entries: which of the step's entries they follow.
        wanted: how many after each.
        token_ids: int64 [S, n]; a negative one ends its row.
        chances: float32 [S, n], or None.
    """

    entries: list[int]
    wanted: list[int]
    token_ids: Tensor
    chances: Tensor | None

    def send(self) -> None:
        """Start the copies to the host."""
        self.token_ids = to_host(self.token_ids)
        self.chances = None if self.chances is None else to_host(self.chances)

    def append_to(self, result: StepResult) -> None:
        """Add them to a result, once they are on the host."""
        rows = self.token_ids.tolist()
        chances = [[]] * len(rows) if self.chances is None else self.chances.tolist()
        for entry, wanted, row, sure in zip(self.entries, self.wanted, rows, chances, strict=True):
            token_ids = row[:wanted]
            if -1 in token_ids:
                token_ids = token_ids[: token_ids.index(-1)]
            # A drafter's logits may be poisoned, too: then it knows nothing.
            shares = [share if share == share else 0.0 for share in sure[: len(token_ids)]]
            if token_ids:
                result.proposals[entry] = Proposal(token_ids, shares)


class ProposalStage:
    """Runs a proposer after each step.

    Args:
        proposer: drafts with weights.
        rows: the persistent batch.
    """

    def __init__(self, proposer: Proposer, rows: InputBatch) -> None:
        self._proposer = proposer
        self._rows = rows

    def apply(self, step: Step) -> None:
        """Take in the changes of a step that is about to run."""
        if step.new or step.copies:
            self._proposer.apply([new.row for new in step.new], step.copies)

    def propose(
        self, step: Step, chosen: list[Tensor], hidden: Tensor | None
    ) -> DeviceProposals | None:
        """Follow a step whose tokens are chosen.

        Args:
            step: with its entries in the order of ``hidden``.
            chosen: int64, the tokens of all its samples, in parts.
            hidden: [T, W], states that the proposer reads.
        """
        counts = np.array(step.counts, np.int64)
        wanted = step.proposals
        proposing = np.flatnonzero(wanted) if wanted else np.zeros(0, np.int64)
        drafts = self._proposer.propose(
            TargetStep(
                rows=np.array(step.rows, np.int64),
                starts=np.array(step.starts, np.int64),
                counts=counts,
                valid=_kept(step, chosen) if step.drafts and wanted else counts,
                proposing=proposing,
                hidden=hidden,
                tokens=self._rows.tokens,
                block_tables=self._rows.host_blocks,
                most=max(1, *wanted) if wanted else 0,
            )
        )
        if drafts is None:
            return None
        entries = proposing.tolist()
        return DeviceProposals(
            entries, [wanted[entry] for entry in entries], drafts.token_ids, drafts.chances
        )


def _kept(step: Step, chosen: list[Tensor]) -> NDArray[np.int64]:
    """How many of each entry's tokens its row keeps: all but rejected drafts.

    Waits for the device, as long as it samples: how far the rows are is needed on the host.
    """
    tokens = [token for part in chosen for token in part.tolist()]
    drafts = {draft.row: draft.token_ids for draft in step.drafts}
    kept = np.array(step.counts, np.int64)
    end = 0
    for entry, (row, samples) in enumerate(zip(step.rows, step.samples, strict=True)):
        begin, end = end, end + samples
        drafted = drafts.get(row)
        if drafted is None:
            continue
        accepted = 0
        for draft, token in zip(drafted, tokens[begin:end], strict=False):
            if draft != token:
                break
            accepted += 1
        kept[entry] -= len(drafted) - accepted
    return kept
