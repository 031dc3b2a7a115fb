"""The interface between the worker and what drafts tokens with weights.

After each step the worker hands a :class:`TargetStep` to its proposer, which returns the tokens
that it expects next. They are verified by a later step, which samples each position as if alone:
a proposer decides how much is computed at once, never what is generated. So its own caches may be
wrong without harm to an answer; that they are right is a matter of acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

TargetStates = Literal["none", "final"] | tuple[int, ...]
"""Which hidden states of the target a proposer reads: none; those that its output head is given; or
the inputs of these layers, side by side (as many as there are layers stands for the last layer's
output, before the final norm)."""


@dataclass(frozen=True, slots=True)
class TargetStep:
    """What the target has computed in a step of E entries and T tokens, all tokens chosen.

    Entry i has computed positions ``starts[i] .. starts[i] + counts[i]`` of row ``rows[i]``. Of
    them the first ``valid[i]`` were given tokens that the row keeps: all of a prompt's chunk and of
    a decode; of an entry with drafts, the known token and the accepted drafts.

    Attributes:
        rows, starts, counts, valid: int64 [E].
        proposing: int64 [S], ascending: the entries for which drafts are wanted. The token at
            ``starts + valid`` of each is known, usually since the step has chosen it. May be empty.
        hidden: [T, W], the target's hidden states in the order of the entries, as
            :attr:`Proposer.needs` states; None if it needs none, and while drafts are not wanted,
            so that the drafter need not follow the step.
        tokens: int32 [rows, positions], all rows' tokens, those chosen in this step included.
        block_tables: int32 [rows, blocks], on the host: all rows' blocks. Of a row only those that
            hold its first ``starts + counts`` tokens are read.
        most: how many drafts are wanted after each proposing entry, at most; 0 if none proposes.
    """

    rows: Ints
    starts: Ints
    counts: Ints
    valid: Ints
    proposing: Ints
    hidden: Tensor | None
    tokens: Tensor
    block_tables: NDArray[np.int32]
    most: int = 0


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a proposer expects to follow S entries.

    Attributes:
        token_ids: int64 [S, n], in order; n is at most :attr:`TargetStep.most`; -1 after the last
            draft of a row that has fewer.
        chances: float32 [S, n], the probability that the drafter itself gives to each, those before
            it taken as given; None where it is not known.
    """

    token_ids: Tensor
    chances: Tensor | None = None


def spread(drafts: Drafts, indices: Tensor, count: int) -> Drafts:
    """The drafts of some of ``count`` entries as those of all: the others have none.

    Args:
        drafts: drafts of len(indices) entries.
        indices: int64, of these entries among all.
        count: S.
    """
    shape = (count, drafts.token_ids.shape[1])
    token_ids = drafts.token_ids.new_full(shape, -1).index_copy_(0, indices, drafts.token_ids)
    chances = drafts.chances
    if chances is not None:
        chances = chances.new_zeros(shape).index_copy_(0, indices, chances)
    return Drafts(token_ids, chances)


class Proposer(Protocol):
    """Drafts tokens for the rows of the persistent batch.

    A proposer may keep keys and values of its own. They are in tensors of their own under the
    target's block ids, so that prefix sharing, preemption and copy-on-write hold for them: what a
    block has depends on nothing but the tokens up to its end. Tokens whose blocks the target does
    not have yet are kept in scratch blocks of the row (:mod:`tgi_cli.models.speculators.cache`).

    Attributes:
        method: its name in ``--speculative-config``.
        num_drafts: how many tokens it drafts for a row, at most.
        needs: which hidden states of the target it reads.
        weight_bytes: bytes of weights that are not the target's.
        block_bytes: bytes that it keeps per block of the target's KV cache; may be 0.
        catches_up: whether it computes what it lacks of a row once drafts are wanted for it, a
            prompt included. Others read what the target computes in each step.
    """

    method: str
    num_drafts: int
    needs: TargetStates
    catches_up: bool

    @property
    def weight_bytes(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def allocate(self, num_blocks: int, max_rows: int) -> None:
        """Take the memory of its caches; what they had is lost.

        Args:
            num_blocks: blocks of the target's KV cache.
            max_rows: number of rows of the persistent batch.
        """
        ...

    def apply(self, new_rows: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """Take in the changes of a step, before its :class:`TargetStep`.

        Args:
            new_rows: rows that another sequence has taken.
            copies: (source, destination) blocks that are copied (copy-on-write).
        """
        ...

    def assume_computed(self) -> None:
        """Take all blocks for computed, whatever they have: for steps that are only timed.

        A proposer that catches up needs not do anything.
        """
        ...

    def forget_computed(self) -> None:
        """Consider no block computed. A proposer that does not catch up does nothing."""
        ...

    def propose(self, step: TargetStep) -> Drafts | None:
        """The tokens that are likely to follow.

        To be called after every step, even if no drafts are wanted. A proposer that reads hidden
        states cannot catch up on a step without any: rows of such a step are not drafted for, until
        others take them.

        Returns:
            The drafts after the last known token of each proposing entry; None if there is none.
        """
        ...
