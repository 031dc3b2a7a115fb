"""Proposers that read the target's last hidden state alone, and keep nothing: Medusa, MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tgi_cli.models.speculators.base import Drafts, TargetStates, TargetStep


class LastStateModule(Protocol):
    """The weights of such a proposer."""

    @property
    def weight_bytes(self) -> int: ...

    def draft(self, hidden: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Draft ``count`` tokens after each of N.

        Args:
            hidden: [N, H], the final hidden states that the tokens were chosen from.
            token_ids: int64 [N], these tokens.
            count: at most as many as there are heads.

        Returns:
            int64 and float32 [N, count], the drafts and their probabilities.
        """
        ...


class LastStateProposer:
    """Implements :class:`tgi_cli.models.speculators.base.Proposer`.

    Args:
        method: its name in ``--speculative-config``.
        module: loaded.
        num_drafts: tokens to draft at most.
    """

    block_bytes = 0
    catches_up = False
    needs: TargetStates = "final"

    def __init__(self, method: str, module: LastStateModule, num_drafts: int) -> None:
        self.method = method
        self.num_drafts = num_drafts
        self._module = module

    @property
    def weight_bytes(self) -> int:
        """See :class:`~tgi_cli.models.speculators.base.Proposer`."""
        return self._module.weight_bytes

    def allocate(self, num_blocks: int, max_rows: int) -> None:
        """Nothing is kept."""

    def apply(self, new_rows: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """Nothing is kept."""

    def assume_computed(self) -> None:
        """Nothing is kept."""

    def forget_computed(self) -> None:
        """Nothing: it does not catch up."""

    def propose(self, step: TargetStep) -> Drafts | None:
        """See :class:`~tgi_cli.models.speculators.base.Proposer`."""
        count = min(self.num_drafts, step.most)
        if not len(step.proposing) or not count:
            return None
        assert step.hidden is not None
        device = step.hidden.device
        begins = np.cumsum(step.counts) - step.counts
        last = (begins + step.valid - 1)[step.proposing]
        cells = step.rows * step.tokens.shape[1] + step.starts + step.valid
        hidden = step.hidden.index_select(0, torch.from_numpy(last).to(device))
        index = torch.from_numpy(cells[step.proposing]).to(device)
        token_ids = step.tokens.view(-1).index_select(0, index).long()
        return Drafts(*self._module.draft(hidden, token_ids, count))
