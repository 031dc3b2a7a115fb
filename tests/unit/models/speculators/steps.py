"""Drives a proposer as the worker does, over sequences whose hidden states are made up."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tgi_cli.attention import PagedAttention
from tgi_cli.models import CausalLM
from tgi_cli.models.speculators.base import Proposer, TargetStep

VOCAB = 256
WIDTH = 300
"""Positions of a row."""


class Target(CausalLM):
    """A target that gives vectors of tokens and logits, and runs no layers."""

    captures_states = True

    def __init__(self, hidden_size: int, seed: int = 5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB, hidden_size, generator=generator)
        self.head = torch.randn(VOCAB, hidden_size, generator=generator) * hidden_size**-0.5
        self.kv_specs = []

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: PagedAttention, images: object = None
    ) -> Tensor:
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = hidden @ self.head.T
        return logits

    def token_vectors(self, input_ids: Tensor) -> Tensor:
        vectors: Tensor = self.table[input_ids]
        return vectors


def state_of(tokens: Sequence[int], width: int) -> Tensor:
    """The target's hidden state behind some tokens: it depends on all of them."""
    seed = zlib.crc32(np.array(tokens, np.int64).tobytes())
    return torch.randn(width, generator=torch.Generator().manual_seed(seed))


def states_of(tokens: Sequence[int], width: int) -> Tensor:
    """[n, width], of all positions."""
    return torch.stack([state_of(tokens[: end + 1], width) for end in range(len(tokens))])


@dataclass(slots=True)
class Held:
    """A row's tokens and blocks; ``computed`` of its tokens have been computed."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0


@dataclass(slots=True)
class Entry:
    """What a step does with a row.

    Attributes:
        row: of the sequence.
        count: tokens to compute, wrong drafts included.
        wrong: how many of them, the last ones, are drafts that are rejected.
        proposes: whether drafts are wanted.
    """

    row: int
    count: int = 1
    wrong: int = 0
    proposes: bool = True


@dataclass(slots=True)
class Steps:
    """Sequences in rows, and a proposer that follows them.

    The blocks of a row are exactly those that its computed tokens need: others would hide that a
    proposer reads beyond them.
    """

    proposer: Proposer
    width: int
    block_size: int
    rows: dict[int, Held] = field(default_factory=dict)
    max_rows: int = 6
    num_blocks: int = 128
    free: list[int] = field(default_factory=list)
    most: int | None = None
    followed: bool = True

    def __post_init__(self) -> None:
        self.free = random.Random(0).sample(range(self.num_blocks), self.num_blocks)
        self.proposer.allocate(self.num_blocks, self.max_rows)

    def add(
        self, row: int, tokens: list[int], prefix: Sequence[int] = (), computed: int = 0
    ) -> None:
        """Give a row to a sequence with ``computed`` tokens in the blocks ``prefix``."""
        self.rows[row] = Held(list(tokens), list(prefix), computed)
        self.proposer.apply([row], [])

    def fork(self, row: int, source: int, tokens: list[int], computed: int) -> None:
        """Give a row to a fork of another one's sequence; a block that both write is copied."""
        whole, rest = divmod(computed, self.block_size)
        theirs, copies = self.rows[source].blocks, []
        blocks = theirs[:whole]
        if rest:
            blocks.append(self.free.pop())
            copies.append((theirs[whole], blocks[whole]))
        self.rows[row] = Held(list(tokens), blocks, computed)
        self.proposer.apply([row], copies)

    def step(self, *entries: Entry) -> dict[int, tuple[list[int], list[float]]]:
        """Compute; returns the drafts and their probabilities by row.

        The tokens of a row must be known up to one behind those that are valid.
        """
        counts, valid, starts, states = [], [], [], []
        pool = torch.full((self.max_rows, WIDTH), -1, dtype=torch.int32)
        tables = np.full((self.max_rows, WIDTH), 10**6, np.int32)
        for entry in entries:
            sequence = self.rows[entry.row]
            start, right = sequence.computed, entry.count - entry.wrong
            while len(sequence.blocks) * self.block_size < start + entry.count:
                sequence.blocks.append(self.free.pop())
            tables[entry.row, : len(sequence.blocks)] = sequence.blocks
            known = sequence.tokens[: start + right + entry.proposes]
            pool[entry.row, : len(known)] = torch.tensor(known)
            own = [state_of(sequence.tokens[: start + i + 1], self.width) for i in range(right)]
            own += [torch.full((self.width,), 7.0)] * entry.wrong
            states += own
            starts.append(start)
            counts.append(entry.count)
            valid.append(right)
            sequence.computed += right
        proposing = [index for index, entry in enumerate(entries) if entry.proposes]
        most = self.proposer.num_drafts if self.most is None else self.most
        with torch.inference_mode():
            drafts = self.proposer.propose(
                TargetStep(
                    rows=np.array([entry.row for entry in entries]),
                    starts=np.array(starts),
                    counts=np.array(counts),
                    valid=np.array(valid),
                    proposing=np.array(proposing, np.int64),
                    hidden=torch.stack(states) if self.followed else None,
                    tokens=pool,
                    block_tables=tables,
                    most=most if proposing else 0,
                )
            )
        if drafts is None:
            assert not proposing
            return {}
        assert drafts.chances is not None
        return {
            entries[index].row: (ids.tolist(), chances.tolist())
            for index, ids, chances in zip(proposing, drafts.token_ids, drafts.chances, strict=True)
        }

    def text(self, row: int) -> list[int]:
        """The row's tokens up to the one behind the last that was computed."""
        sequence = self.rows[row]
        return sequence.tokens[: sequence.computed + 1]
