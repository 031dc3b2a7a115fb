"""Proposers that read pairs: a token, and the target's hidden state at the position before it.

EAGLE-3 heads (https://arxiv.org/abs/2503.01840) and MTP layers (https://arxiv.org/abs/2412.19437,
section 2.2) predict the token after a pair. They are given pairs of the target's hidden states as
far as it has computed; after them, each draft is paired with the head's own output.

A step computes hidden states of positions s to e and the token after them is known, so it makes
the pairs of positions s + 1 to e + 1. The pair of s needs the hidden state before the step:

- of a row that goes on, it is that of the row's last valid position, which is kept;
- of a row that begins after a cached prefix, it is that of the last position of a block, which is
  kept with the block;
- of a fork, the pair is in the block that was copied.

It is computed again even if the step before did so: forced tokens may have replaced the token, and
the slot may have been one of a scratch block.

While drafts do not pay, steps come without hidden states, and nothing is computed. What such a step
has written cannot be made up for, so its rows are not drafted for any more, nor are sequences that
begin after blocks which it has written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.attention import PagedAttention
from tgi_cli.attention.memory import empty
from tgi_cli.models.speculators.base import Drafts, Ints, TargetStates, TargetStep, spread
from tgi_cli.models.speculators.cache import DraftCache


class PairOutput(NamedTuple):
    """What a module computes of pairs, [T, H] each."""

    final: Tensor
    """For the output head."""
    fed_back: Tensor
    """The hidden state of the next pair."""


class PairModule(Protocol):
    """The weights of a proposer of pairs."""

    hidden_size: int
    dtype: torch.dtype

    @property
    def weight_bytes(self) -> int: ...

    def combine(self, states: Tensor) -> Tensor:
        """The target's hidden states [T, W] to those of pairs, [T, H]."""
        ...

    def __call__(
        self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attention: PagedAttention
    ) -> PairOutput:
        """Compute pairs of a planned pass.

        Args:
            hidden: [T, H].
            token_ids: int64 [T], of the target's vocabulary.
            positions: int64 [T], those of the hidden states.
            attention: has been planned.
        """
        ...

    def choose(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens, int64 [N], of the target's vocabulary, and their probabilities."""
        ...


class PairProposer:
    """Implements :class:`tgi_cli.models.speculators.base.Proposer` over a module and a cache.

    Args:
        method: its name in ``--speculative-config``.
        module: loaded.
        cache: cache of the module's layers, with 1 as the first position.
        needs: the target's hidden states that the module combines.
    """

    def __init__(
        self, method: str, module: PairModule, cache: DraftCache, needs: TargetStates
    ) -> None:
        self.method = method
        self.needs = needs
        self.catches_up = False
        self.num_drafts = cache.shape.num_drafts
        self._module = module
        self._cache = cache
        self._device = cache.attention.device
        self._row_states = torch.empty(0)
        """[rows, H]: the hidden state of each row's last valid position."""
        self._row_positions: Ints = np.empty(0, np.int64)
        """int64 [rows]: that position, or -1."""
        self._block_states = torch.empty(0)
        """[blocks, H]: the hidden state of each full block's last position."""
        self._new_rows: NDArray[np.bool_] = np.empty(0, np.bool_)
        """[rows]: those that other sequences have taken since their last step."""
        self._whole_rows: NDArray[np.bool_] = np.empty(0, np.bool_)
        """[rows]: those of which all pairs were made."""
        self._whole_blocks: NDArray[np.bool_] = np.empty(0, np.bool_)
        """[blocks]: those of which all pairs were made, as far as the target has written them."""

    @property
    def weight_bytes(self) -> int:
        """See :class:`~tgi_cli.models.speculators.base.Proposer`."""
        return self._module.weight_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: keys and values, and a hidden state."""
        return self._cache.block_bytes + self._module.hidden_size * self._module.dtype.itemsize

    def allocate(self, num_blocks: int, max_rows: int) -> None:
        """See :class:`~tgi_cli.models.speculators.base.Proposer`."""
        self._cache.allocate(num_blocks, max_rows)
        size, dtype = self._module.hidden_size, self._module.dtype
        self._row_states = empty((max_rows, size), dtype, self._device)
        self._block_states = empty((num_blocks, size), dtype, self._device)
        self._row_positions = np.full(max_rows, -1)
        self._new_rows = np.ones(max_rows, np.bool_)
        self._whole_rows = np.zeros(max_rows, np.bool_)
        self._whole_blocks = np.ones(num_blocks, np.bool_)  # until they are written to

    def apply(self, new_rows: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """See :class:`~tgi_cli.models.speculators.base.Proposer`."""
        self._row_positions[list(new_rows)] = -1
        self._new_rows[list(new_rows)] = True
        for source, destination in copies:
            self._whole_blocks[destination] = self._whole_blocks[source]
        # Not the blocks' states: a block is copied to be written to, up to its end.
        self._cache.copy_blocks(copies)

    def assume_computed(self) -> None:
        """See :class:`~tgi_cli.models.speculators.base.Proposer`."""
        self._whole_blocks[:] = True

    def forget_computed(self) -> None:
        """Nothing: it does not catch up."""

    def propose(self, step: TargetStep) -> Drafts | None:
        """See :class:`~tgi_cli.models.speculators.base.Proposer`."""
        whole = self._follow(step)
        if step.hidden is None or not whole.any():
            return None
        states = self._module.combine(step.hidden)
        pairs = _Pairs(step, self._row_positions, self._cache.shape.block_size, whole)
        before = self._states_before(pairs, states)
        self._keep(step, pairs, states)
        final = fed_back = states[:0]
        if len(pairs.entries):
            hidden = states.index_select(0, self._upload(pairs.sources))
            hidden.index_copy_(0, self._upload(pairs.from_before), before)
            rows = step.rows[pairs.entries]
            held = (step.starts + step.counts)[pairs.entries]
            self._cache.begin(rows, held, step.block_tables)
            positions = self._cache.plan(pairs.first, pairs.counts)
            ids = self._tokens(step, np.repeat(rows, pairs.counts), positions)
            final, fed_back = self._module(hidden, ids, positions - 1, self._cache.attention)
        count = min(self.num_drafts, step.most)
        if not len(pairs.proposing) or not count:
            return None
        last = self._upload(pairs.last)
        drafts = self._chain(step, pairs.proposing, PairOutput(final[last], fed_back[last]), count)
        if len(pairs.proposing) == len(step.proposing):
            return drafts
        indices = np.flatnonzero(whole[step.proposing])
        return spread(drafts, self._upload(indices), len(step.proposing))

    def _follow(self, step: TargetStep) -> NDArray[np.bool_]:
        """Whether all pairs of each entry's row are made, those of this step included; [E]."""
        size, rows, starts = self._cache.shape.block_size, step.rows, step.starts
        for entry in np.flatnonzero(self._new_rows[rows]):
            row = rows[entry]
            held = step.block_tables[row, : -(-starts[entry] // size)]
            self._whole_rows[row] = self._whole_blocks[held].all()
            self._new_rows[row] = False
        if step.hidden is None:
            self._whole_rows[rows] = False
        whole = self._whole_rows[rows]
        first, last = starts // size, (starts + step.counts - 1) // size
        self._whole_blocks[step.block_tables[rows, first]] = whole
        for entry in np.flatnonzero(first != last):  # few entries enter a block in a step
            blocks = step.block_tables[rows[entry], first[entry] : last[entry] + 1]
            self._whole_blocks[blocks] = whole[entry]
        return whole

    def _chain(self, step: TargetStep, entries: Ints, output: PairOutput, count: int) -> Drafts:
        """Drafts after the last pair of each of some entries."""
        rows = step.rows[entries]
        held = (step.starts + step.counts)[entries]
        # The first draft's own pair.
        position = (step.starts + step.valid)[entries] + 1
        drafts, chances = [], []
        self._cache.begin(rows, held, step.block_tables)
        while True:
            token_ids, chance = self._module.choose(output.final)
            drafts.append(token_ids)
            chances.append(chance)
            if len(drafts) == count:
                return Drafts(torch.stack(drafts, 1), torch.stack(chances, 1))
            positions = self._cache.plan(position, np.ones_like(position))
            output = self._module(output.fed_back, token_ids, positions - 1, self._cache.attention)
            position = position + 1

    def _states_before(self, pairs: _Pairs, states: Tensor) -> Tensor:
        """[n, H]: the states of the pairs that need one from before the step."""
        if not len(pairs.rows_before):
            return states[:0]
        kept = self._row_states.index_select(0, self._upload(pairs.rows_before))
        cached = np.flatnonzero(pairs.blocks_before >= 0)
        if len(cached):
            blocks = self._upload(pairs.blocks_before[cached])
            kept[self._upload(cached)] = self._block_states.index_select(0, blocks)
        return kept

    def _keep(self, step: TargetStep, pairs: _Pairs, states: Tensor) -> None:
        """Keep the states that later steps may need."""
        last = pairs.begins + step.valid - 1
        self._row_states.index_copy_(
            0, self._upload(step.rows), states.index_select(0, self._upload(last))
        )
        self._row_positions[step.rows] = step.starts + step.valid - 1
        if len(pairs.full_blocks):
            ends = states.index_select(0, self._upload(pairs.block_ends))
            self._block_states.index_copy_(0, self._upload(pairs.full_blocks), ends)

    def _tokens(self, step: TargetStep, rows: Ints, positions: Tensor) -> Tensor:
        """int64: the tokens at some positions of rows."""
        width = step.tokens.shape[1]
        return step.tokens.view(-1).index_select(0, self._upload(rows * width) + positions).long()

    def _upload(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class _Pairs:
    """Which pairs a step makes, and where their hidden states are; no torch.

    Attributes:
        begins: int64 [E], where each entry begins in the step's hidden states.
        entries: int64 [B], those that make a pair.
        proposing: int64 [S], those of them that drafts are wanted for.
        first, counts: int64 [B], the position of the first pair of each, and their number.
        sources: int64 [P], of each pair the index of its hidden state; any, if it is from before.
        from_before: int64 [n], the pairs whose hidden state is from before the step.
        rows_before, blocks_before: int64 [n], the rows of these, and the blocks whose last position
            it is, or -1 if it is the row's.
        last: int64 [S], the last pair of each proposing entry.
        block_ends, full_blocks: int64, the hidden states of last positions of blocks, and these.
    """

    def __init__(
        self,
        step: TargetStep,
        row_positions: Ints,
        block_size: int,
        whole: NDArray[np.bool_],
    ) -> None:
        starts, rows = step.starts, step.rows
        self.begins = np.cumsum(step.counts) - step.counts
        goes_on = (row_positions[rows] == starts - 1) & (starts > 0)
        cached = (starts % block_size == 0) & (starts > 0) & ~goes_on
        earlier = goes_on | cached
        first = starts + ~earlier
        ends = starts + step.valid
        ends[step.proposing] += 1
        counts = np.where(whole, ends - first, 0)
        self.entries = np.flatnonzero(counts > 0)
        self.first, self.counts = first[self.entries], counts[self.entries]
        offsets = np.cumsum(self.counts) - self.counts
        # The state of a pair is the one before it: of the first pair of an entry whose state is
        # from before, that index is the one before the entry's, or -1.
        shift = (self.begins - 1 + first - starts)[self.entries] - offsets
        self.sources = np.arange(int(self.counts.sum())) + np.repeat(shift, self.counts)
        np.maximum(self.sources, 0, out=self.sources)
        needing = earlier[self.entries]
        self.from_before = offsets[needing]
        chosen = self.entries[needing]
        self.rows_before = rows[chosen]
        blocks = step.block_tables[rows[chosen], np.maximum(starts[chosen] // block_size - 1, 0)]
        self.blocks_before = np.where(cached[chosen], blocks, -1).astype(np.int64)
        index = np.empty(len(rows), np.int64)
        index[self.entries] = offsets + self.counts - 1
        self.proposing = step.proposing[whole[step.proposing]]
        self.last = index[self.proposing]
        full = (starts + step.valid) // block_size - starts // block_size
        entry = np.repeat(np.arange(len(rows)), full)
        nth = np.arange(len(entry)) - np.repeat(np.cumsum(full) - full, full)
        columns = starts[entry] // block_size + nth
        self.full_blocks = step.block_tables[rows[entry], columns].astype(np.int64)
        self.block_ends = self.begins[entry] + (columns + 1) * block_size - 1 - starts[entry]
