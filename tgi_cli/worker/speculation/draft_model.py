"""A smaller model that drafts for the target: one token after another, with a KV cache of its own.

A token's keys and values are in the slot of its own position, so that a block depends on the tokens
up to its end only, as the target's does. Positions whose blocks the target does not have yet (the
chosen token may be the first of the next block, and drafts follow it) are in scratch blocks, and
are computed again in the next step.

Drafts are chosen as the target's tokens are: by the request's own parameters, and by the noise of
its seed and the position. So a draft model that equals the target is always right, with sampling,
too, and one that is like it is right more often than one that takes the likeliest token
(https://arxiv.org/abs/2408.07978 has the bounds for noise that both share).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgi_cli.models.speculators.base import Drafts, Ints, TargetStates, TargetStep, spread
from tgi_cli.models.speculators.cache import DraftCache
from tgi_cli.sampling.sampler import Sampler
from tgi_cli.sampling.table import ADJUSTED, TOP_LOGPROBS, SamplingBatch
from tgi_cli.worker.executors import Forward, RunnableModel
from tgi_cli.worker.input_batch import InputBatch
from tgi_cli.worker.speculation.progress import DraftProgress
from tgi_cli.worker.speculation.vocabulary import TokenMap

_NEVER = -1e9
"""Score of tokens that the draft model does not know: finite, so that penalties do not make NaN."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What a draft model is to serve.

    Attributes:
        max_tokens: positions that it computes: of the target's context, as far as its own goes.
        step_tokens: that it computes in one pass, at most; what is left, it catches up on later.
        vocab_size: vocabulary size of the target.
        own_vocab_size: vocabulary size of the draft model.
        logits_at_once: rows of logits computed at once.
        scores_at_once: rows of them sampled at once.
    """

    max_tokens: int
    step_tokens: int
    vocab_size: int
    own_vocab_size: int
    logits_at_once: int
    scores_at_once: int


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A loaded draft model, and what runs it.

    Attributes:
        model: computes hidden states and logits.
        program: compiled from the model, where one could be.
        cache: cache of its layers, without blocks yet.
        weight_bytes: bytes of the model's weights.
    """

    model: RunnableModel
    program: Forward | None
    cache: DraftCache
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class _Pass:
    """What a step's first pass computes: positions ``begins`` and ``counts`` more of ``rows``.

    Attributes:
        entries: int64 [B], indices of the step's entries, those of one token first.
        rows, begins, counts: int64 [B].
        held: int64 [B], tokens of each whose blocks the target has.
        drafting: [B], whether each is drafted for after its last token.
    """

    entries: Ints
    rows: Ints
    begins: Ints
    counts: Ints
    held: Ints
    drafting: NDArray[np.bool_]


class DraftModel:
    """Implements :class:`tgi_cli.models.speculators.base.Proposer` over a whole model.

    It may miss steps, those of prompts among them: what it lacks then, it computes before the next
    drafts.

    Args:
        weights: loaded.
        rows: the persistent batch of the target.
        limits: see there.
        tokens: how its tokens correspond to the target's. Default: an id below both vocabularies'
            sizes is the same token in both.
    """

    method = "draft_model"
    needs: TargetStates = "none"
    catches_up = True

    def __init__(
        self,
        weights: DraftWeights,
        rows: InputBatch,
        limits: DraftLimits,
        tokens: TokenMap | None = None,
    ) -> None:
        self.num_drafts = weights.cache.shape.num_drafts
        self._weights = weights
        self._forward = (weights.program or weights.model).forward
        self._cache = weights.cache
        self._table = rows
        self._limits = limits
        self._tokens: _DeviceTokenMap | None = None
        if tokens is not None:
            self._tokens = _DeviceTokenMap(tokens, limits.own_vocab_size, rows.tokens.device)
        self._sampler = Sampler(rows.upload)
        self._progress = DraftProgress(rows.block_size)

    @property
    def weight_bytes(self) -> int:
        """See the protocol."""
        return self._weights.weight_bytes

    @property
    def block_bytes(self) -> int:
        """See the protocol."""
        return self._cache.block_bytes

    def allocate(self, num_blocks: int, max_rows: int) -> None:
        """See the protocol."""
        self._cache.allocate(num_blocks, max_rows)
        self._progress.allocate(num_blocks, max_rows)

    def apply(self, new_rows: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """See the protocol."""
        self._cache.copy_blocks(copies)
        self._progress.apply(new_rows, copies)

    def assume_computed(self) -> None:
        """Nothing: a first step catches up."""

    def forget_computed(self) -> None:
        """See the protocol."""
        self._progress.forget()

    def propose(self, step: TargetStep) -> Drafts | None:
        """See the protocol. Where no drafts are wanted, nothing is computed.

        Entries that cannot be drafted for yet, or whose context is too long for the draft model,
        have -1 in place of drafts.
        """
        ends = step.starts + step.counts
        self._progress.follow(step.rows, step.starts, ends, step.block_tables)
        first = self._plan(step) if step.most else None
        if first is None or not len(first.entries):
            return None
        self._cache.begin(first.rows, first.held, step.block_tables)
        hidden = self._run(first.rows, first.begins, first.counts)
        kept = np.minimum(first.begins + first.counts, self._capacity(first.held))
        for row, begin, end in zip(first.rows, first.begins, kept, strict=True):
            self._progress.advance(int(row), int(begin), int(end), step.block_tables[row])
        if not first.drafting.any():
            return None
        (last,) = self._table.upload((np.cumsum(first.counts) - 1)[first.drafting])
        drafts = self._draft(first, hidden.index_select(0, last), step)
        return self._placed(drafts, first.entries[first.drafting], step.proposing)

    # ------------------------------------------------------------------ what is computed

    def _plan(self, step: TargetStep) -> _Pass:
        """All tokens that proposing entries lack.

        Other entries, prompts among them, catch up once drafts are wanted for them.
        """
        wanted = np.zeros(len(step.rows), np.bool_)
        wanted[step.proposing] = True
        ends = step.starts + step.valid + wanted  # the chosen token is known
        begins = np.minimum(self._progress.computed(step.rows), ends - 1)
        counts = np.where(wanted, ends - begins, 0)
        counts[np.maximum(ends, step.starts + step.counts) > self._limits.max_tokens] = 0
        wanted &= ends + step.most <= self._limits.max_tokens + 1
        # The entries that lack least come first: they can be drafted for at once.
        order = np.lexsort((counts, ~wanted))
        before = np.cumsum(counts[order]) - counts[order]
        granted = np.empty_like(counts)
        granted[order] = np.clip(self._limits.step_tokens - before, 0, counts[order])
        entries = np.flatnonzero(granted)
        entries = entries[np.argsort(granted[entries] > 1, kind="stable")]
        return _Pass(
            entries,
            step.rows[entries],
            begins[entries],
            granted[entries],
            (step.starts + step.counts)[entries],
            (wanted & (granted == counts))[entries],
        )

    def _capacity(self, held: Ints) -> Ints:
        """Tokens that the blocks hold which the target has."""
        size = self._table.block_size
        return -(-held // size) * size

    def _run(self, rows: Ints, begins: Ints, counts: Ints, ids: Tensor | None = None) -> Tensor:
        """Hidden states [T, H] of a pass; of the rows' own tokens unless ``ids`` are given."""
        positions = self._cache.plan(begins, counts)
        if ids is None:
            (firsts,) = self._table.upload(np.repeat(rows * self._table.width, counts))
            ids = self._table.gather(firsts + positions)
        if self._tokens is not None:
            ids = self._tokens.inputs.index_select(0, ids)
        elif self._limits.own_vocab_size < self._limits.vocab_size:
            ids = ids.clamp(max=self._limits.own_vocab_size - 1)
        return self._forward(ids, positions, self._cache.attention)

    # ------------------------------------------------------------------ drafts

    def _draft(self, first: _Pass, hidden: Tensor, step: TargetStep) -> Drafts:
        """Drafts after the entries of a pass that are drafted for, [S, most].

        Args:
            first: the pass.
            hidden: [S, H], of the last token of each.
            step: the target's.
        """
        chosen = first.drafting
        rows, held = first.rows[chosen], first.held[chosen]
        positions = (first.begins + first.counts)[chosen]
        ones = np.ones_like(positions)
        self._cache.begin(rows, held, step.block_tables)
        drafts, chances = [], []
        ended: Tensor | None = None
        while True:
            ids, chance, unknown = self._choose(hidden, rows, positions)
            if unknown is not None:
                ended = unknown if ended is None else ended | unknown
            drafts.append(ids if ended is None else ids.masked_fill(ended, -1))
            chances.append(chance)
            if len(drafts) == min(step.most, self.num_drafts):
                return Drafts(torch.stack(drafts, 1), torch.stack(chances, 1))
            hidden = self._run(rows, positions, ones, ids)
            positions = positions + 1

    def _choose(
        self, hidden: Tensor, rows: Ints, positions: Ints
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """A token for each of ``positions``, its probability, and whether it is none of the target.

        The last is None where the target has all tokens of the draft model.
        """
        batch = self._table.sampling.select(rows, positions)
        if batch.flags & TOP_LOGPROBS:  # of no use for drafts
            batch.records["flags"] &= ~TOP_LOGPROBS
            flags = batch.flags & ~TOP_LOGPROBS
            batch = SamplingBatch(rows, positions, batch.records, flags, batch.lists)
        parts, unknown, limits = [], [], self._limits
        for begin in range(0, len(rows), limits.logits_at_once):
            states = hidden[begin : begin + limits.logits_at_once]
            logits = self._weights.model.logits(states)
            if self._tokens is not None:
                unknown.append(self._tokens.ends(logits))
            known = self._known(logits)
            for first in range(0, len(known), limits.scores_at_once):
                scores = known[first : first + limits.scores_at_once]
                at = begin + first
                part = batch if len(scores) == len(rows) else batch[at : at + len(scores)]
                parts.append(self._sampler(scores, part, self._table.tokens))
        ids = torch.cat([part.token_ids for part in parts])
        if batch.flags & ADJUSTED:  # the next choice reads the tokens before it
            (targets,) = self._table.upload(rows * self._table.width + positions)
            self._table.write(targets, ids)
        chances = torch.cat([part.logprobs for part in parts]).exp_()
        return ids, chances, torch.cat(unknown) if unknown else None

    def _known(self, logits: Tensor) -> Tensor:
        """Logits of the target's tokens."""
        if self._tokens is not None:
            return self._tokens.of_target(logits)
        width, own = self._limits.vocab_size, logits.shape[1]
        if own > width:
            return logits[:, :width].contiguous()
        if own < width:
            return torch.nn.functional.pad(logits, (0, width - own), value=_NEVER)
        return logits

    def _placed(self, drafts: Drafts, entries: Ints, proposing: Ints) -> Drafts:
        """The drafts of ``entries`` among those of all proposing ones."""
        if np.array_equal(entries, proposing):
            return drafts
        (at,) = self._table.upload(np.searchsorted(proposing, entries))
        return spread(drafts, at, len(proposing))


class _DeviceTokenMap:
    """A :class:`TokenMap` on the device.

    Args:
        tokens: as compared.
        own_vocab_size: vocabulary size of the draft model.
        device: device of its logits.

    Attributes:
        inputs: int64 [target's vocabulary], the draft model's token for each.
    """

    def __init__(self, tokens: TokenMap, own_vocab_size: int, device: torch.device) -> None:
        outputs = torch.from_numpy(tokens.outputs).to(device)
        self.inputs = torch.from_numpy(tokens.inputs).to(device)
        self._missing = outputs < 0
        self._outputs = outputs.clamp(min=0)
        self._unshared = torch.ones(own_vocab_size, dtype=torch.bool, device=device)
        self._unshared[self._outputs[~self._missing]] = False

    def of_target(self, logits: Tensor) -> Tensor:
        """float32 [N, own] to [N, target's vocabulary]."""
        return logits.index_select(1, self._outputs).masked_fill_(self._missing, _NEVER)

    def ends(self, logits: Tensor) -> Tensor:
        """[N]: whether the likeliest token of float32 [N, own] is none of the target's.

        What follows would be a draft for another text.
        """
        return self._unshared.index_select(0, logits.argmax(dim=1))
