"""Random steps, as a scheduler may give them, against the tokens that must come out.

Sequences arrive, share a prefix's blocks, are computed in chunks, decode, are forked by copying
a block, preempted and resumed, and end; rows and blocks are reused. Results are taken in one
step late, as an overlapped loop does.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.unit.worker.fakes import VOCAB, make_runner, new_row, next_token
from tgi_cli.engine.step import BlockAppend, PendingResult, Step
from tgi_cli.worker import runner

BLOCK, ROWS, LONGEST = 4, 6, 48
BLOCKS = ROWS * LONGEST // BLOCK


@dataclass
class Sequence:
    tokens: list[int]
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    waits_for: bool = False
    """A token that the step in flight chooses, which the host does not know."""

    @property
    def known(self) -> int:
        return len(self.tokens) + self.waits_for


class Driver:
    """A scheduler that decides by dice."""

    def __init__(self, seed: int, like_a_device: bool) -> None:
        self.random = random.Random(seed)
        self.runner, _, _ = make_runner(
            max_rows=ROWS,
            max_tokens=LONGEST,
            num_blocks=BLOCKS,
            block_size=BLOCK,
            like_a_device=like_a_device,
        )
        self.free_rows = list(range(ROWS))
        self.free_blocks = list(range(BLOCKS))
        self.holders: Counter[int] = Counter()
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.freed: list[int] = []
        self.in_flight: tuple[PendingResult, list[Sequence]] | None = None
        self.checked = self.resumed = self.forked = self.reused_prefix = 0

    def advance(self) -> None:
        step = Step(0)
        self._end_or_preempt()
        sampled: list[Sequence] = []
        entries = []
        for sequence in self.running:
            pending = sequence.known - sequence.computed
            if self.random.random() < 0.85:
                entries.append((sequence, min(pending, self.random.randint(1, 9))))
        entries += self._admit(step)
        entries.sort(key=lambda entry: entry[0].known - entry[0].computed != 1)
        for sequence, count in entries:
            self._grow(step, sequence, sequence.computed + count)
            samples = sequence.computed + count == sequence.known
            step.rows.append(sequence.row)
            step.starts.append(sequence.computed)
            step.counts.append(count)
            step.samples.append(samples)
            step.num_decodes += sequence.known - sequence.computed == 1
            sequence.computed += count
            if samples:
                sampled.append(sequence)
        if not entries:
            self._collect()
            return
        step.freed, self.freed = self.freed, []
        launched = self.runner.launch(step)
        self._collect()
        for sequence in sampled:
            sequence.waits_for = True
        self.in_flight = self.runner.sample(launched), sampled

    def _collect(self) -> None:
        if self.in_flight is None:
            return
        pending, sequences = self.in_flight
        result = pending.wait()
        assert len(result.token_ids) == len(result.logprobs) == len(sequences)
        assert not result.errors
        for sequence, token in zip(sequences, result.token_ids, strict=True):
            assert token == next_token(sequence.tokens)
            sequence.tokens.append(token)
            sequence.waits_for = False
            self.checked += 1
        self.in_flight = None

    def _end_or_preempt(self) -> None:
        for sequence in list(self.running):
            if sequence.known + 2 >= LONGEST or self.random.random() < 0.02:
                self._collect()
                self._leave(sequence)
            elif self.random.random() < 0.03:
                self._collect()
                self._leave(sequence)
                self.waiting.append(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.freed.append(sequence.row)
        self.free_rows.append(sequence.row)
        for block in sequence.blocks:
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free_blocks.append(block)
        self.random.shuffle(self.free_blocks)
        sequence.row, sequence.blocks, sequence.computed = -1, [], 0

    def _admit(self, step: Step) -> list[tuple[Sequence, int]]:
        entries = []
        parents = [other for other in self.running if other.computed > BLOCK]
        while self.free_rows and self.random.random() < 0.5:
            if self.waiting:
                sequence = self.waiting.pop()
                self.resumed += 1
            else:
                length = self.random.randint(1, 20)
                sequence = Sequence([self.random.randrange(VOCAB) for _ in range(length)])
                if parents and self.random.random() < 0.5:
                    self._inherit(step, sequence, self.random.choice(parents))
            missing = -(-len(sequence.tokens) // BLOCK) - len(sequence.blocks)
            sequence.blocks += [self._take() for _ in range(missing)]
            sequence.row = self.free_rows.pop(self.random.randrange(len(self.free_rows)))
            step.new.append(new_row(sequence.row, sequence.tokens, sequence.blocks))
            pending = len(sequence.tokens) - sequence.computed
            entries.append((sequence, self.random.randint(1, pending)))
            self.running.append(sequence)
        return entries

    def _inherit(self, step: Step, sequence: Sequence, parent: Sequence) -> None:
        """Begin like a running sequence: share its full blocks, copy the one it is filling."""
        computed = min(parent.computed, len(parent.tokens))
        if computed + len(sequence.tokens) + 2 >= LONGEST:
            return
        full = computed // BLOCK
        sequence.blocks = parent.blocks[:full]
        self.holders.update(sequence.blocks)
        sequence.computed = full * BLOCK
        self.reused_prefix += 1
        if computed % BLOCK:
            copy = self._take()
            step.copies.append((parent.blocks[full], copy))
            sequence.blocks.append(copy)
            sequence.computed = computed
            self.forked += 1
        sequence.tokens = parent.tokens[: sequence.computed] + sequence.tokens

    def _take(self) -> int:
        block = self.free_blocks.pop()
        self.holders[block] = 1
        return block

    def _grow(self, step: Step, sequence: Sequence, end: int) -> None:
        missing = -(-end // BLOCK) - len(sequence.blocks)
        if missing > 0:
            taken = [self._take() for _ in range(missing)]
            step.appended.append(BlockAppend(sequence.row, len(sequence.blocks), taken))
            sequence.blocks += taken


@pytest.mark.parametrize("like_a_device", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_steps_give_every_sequence_its_own_tokens(monkeypatch, seed, like_a_device):
    if seed % 2:
        monkeypatch.setitem(runner.MAX_LOGITS, "cpu", 2 * VOCAB)  # logits in parts of two rows
    driver = Driver(seed, like_a_device)
    for _ in range(150):
        driver.advance()
    driver._collect()
    assert driver.checked > 200
    assert driver.resumed > 3
    assert driver.reused_prefix > 2
    assert driver.forked > 1
