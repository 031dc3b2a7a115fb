"""Proposals of a head over pairs equal those of a plain computation, however steps are cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tools.draft_heads import LAYER, make_eagle3
from tests.tools.paged_run import CPU, random_ids
from tests.unit.models.speculators.plain import PlainEagle3
from tests.unit.models.speculators.steps import Entry, Steps, Target, states_of
from tgi_cli.models.speculators.detect import detect
from tgi_cli.models.speculators.load import ProposerOptions, load_proposer

IDS = [1, 3, 4]
WIDTH = 3 * 64


class Checked(Steps):
    """Steps whose drafts are compared with the plain head's."""

    plain: PlainEagle3

    def check(self, *entries: Entry) -> None:
        """Compute, and compare the drafts of all rows that propose."""
        found = self.step(*entries)
        assert set(found) == {entry.row for entry in entries if entry.proposes}
        for row, (ids, chances) in found.items():
            tokens = self.text(row)
            expected = self.plain.drafts(states_of(tokens[:-1], WIDTH), tokens, len(ids))
            assert ids == expected[0], row
            assert chances == pytest.approx(expected[1], rel=1e-3), row


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle3(tmp_path_factory.mktemp("head"), "vllm", layer_ids=IDS)


Make = Callable[..., Checked]


@pytest.fixture(params=["torch", "cpu"])
def make(request: pytest.FixtureRequest, head: Path) -> Make:
    def made(block_size: int = 4, num_drafts: int = 6) -> Checked:
        target = Target(64)
        options = ProposerOptions(
            torch.float32, CPU, num_drafts, 280, block_size, 6, 64, 256, attention=request.param
        )
        steps = Checked(load_proposer(detect(head), target, options), WIDTH, block_size)
        steps.plain = PlainEagle3(load_file(head / "model.safetensors"), LAYER, target.table)
        return steps

    return made


def test_a_prompt_and_the_tokens_behind_it(make: Make) -> None:
    steps = make()
    steps.add(2, random_ids(40, 1))
    steps.check(Entry(2, 21))
    for _ in range(6):
        steps.check(Entry(2))


def test_a_prompt_of_one_token(make: Make) -> None:
    steps = make()
    steps.add(0, random_ids(9, 2))
    steps.check(Entry(0))
    steps.check(Entry(0, 3))


@pytest.mark.parametrize("chunks", [(1, 1, 1), (3, 4, 1), (4, 4, 4), (5, 11, 2)])
def test_chunks_of_a_prompt(make: Make, chunks: tuple[int, ...]) -> None:
    steps = make()
    steps.add(1, random_ids(40, 3))
    for count in chunks:
        assert steps.step(Entry(1, count, proposes=False)) == {}
    steps.check(Entry(1, 2))


def test_rows_of_different_lengths_in_one_step(make: Make) -> None:
    steps = make()
    for row, seed in ((0, 4), (3, 5), (5, 6)):
        steps.add(row, random_ids(120, seed))
    steps.check(Entry(3, 30), Entry(0, 3, proposes=False))
    steps.check(Entry(3), Entry(0, 2), Entry(5, 90))
    steps.check(Entry(5), Entry(0), Entry(3, proposes=False))
    steps.check(Entry(3), Entry(5), Entry(0, 17))


def test_rejected_drafts_leave_nothing_behind(make: Make) -> None:
    steps = make()
    steps.add(0, random_ids(80, 7))
    steps.add(1, random_ids(80, 8))
    steps.check(Entry(0, 6), Entry(1, 9))
    for wrong, right in ((3, 1), (0, 4), (2, 2), (5, 3), (1, 1)):
        steps.check(Entry(0, right + wrong, wrong), Entry(1))


def test_steps_without_proposals_are_followed(make: Make) -> None:
    steps = make()
    steps.add(0, random_ids(60, 9))
    for _ in range(2):
        for _ in range(5):
            assert steps.step(Entry(0, proposes=False)) == {}
        steps.check(Entry(0))


def test_fewer_drafts_are_the_first_ones(make: Make) -> None:
    steps = make()
    steps.add(0, random_ids(30, 10))
    steps.most = 2
    steps.check(Entry(0, 10))
    assert len(steps.step(Entry(0))[0][0]) == 2


def test_a_cached_prefix_needs_no_earlier_state(make: Make) -> None:
    """The token behind the prefix is another one than that of the sequence that computed it."""
    steps = make()
    first, other = random_ids(60, 11), random_ids(60, 12)
    steps.add(0, first)
    steps.check(Entry(0, 23))
    shared = steps.rows[0].blocks[:5]
    steps.add(1, first[:20] + other, shared, 20)
    steps.check(Entry(1, 4), Entry(0))
    steps.add(2, first[:16] + other, shared[:4], 16)
    steps.check(Entry(0), Entry(1), Entry(2))
    steps.check(Entry(0), Entry(2, 3), Entry(1))


def test_a_row_forgets_the_sequence_that_it_had(make: Make) -> None:
    """The next one begins where it ended, behind another text."""
    steps = make()
    steps.add(0, random_ids(60, 20))
    steps.check(Entry(0, 12))
    other = random_ids(60, 21)
    steps.add(1, other)
    steps.check(Entry(1, 14))
    steps.add(0, other[:12] + random_ids(60, 22), steps.rows[1].blocks[:3], 12)
    steps.check(Entry(0), Entry(1))


def test_a_preempted_sequence_comes_back_to_its_blocks(make: Make) -> None:
    steps = make()
    tokens = random_ids(60, 13)
    steps.add(0, tokens)
    steps.check(Entry(0, 9))
    for _ in range(6):
        steps.check(Entry(0))
    steps.add(4, tokens, steps.rows[0].blocks[:3], 12)
    steps.add(0, random_ids(60, 14))
    steps.check(Entry(0, 2), Entry(4, 5))
    steps.check(Entry(0), Entry(4))


@pytest.mark.parametrize("length", [9, 12, 13])
def test_forks_share_what_they_begin_with(make: Make, length: int) -> None:
    steps = make()
    tokens = random_ids(60, 15)
    steps.add(0, tokens)
    steps.check(Entry(0, length))
    steps.check(Entry(0))
    steps.fork(1, 0, tokens[:length] + random_ids(40, 16), length - 1)
    steps.check(Entry(1), Entry(0))
    for _ in range(5):
        steps.check(Entry(0), Entry(1))


def test_a_forced_token_replaces_the_one_that_was_chosen(make: Make) -> None:
    steps = make()
    tokens = random_ids(60, 17)
    steps.add(0, tokens)
    steps.check(Entry(0, 10))
    for computed in (10, 11, 12):
        forced = (tokens[computed] + 1) % 256
        steps.rows[0].tokens[computed] = forced
        steps.check(Entry(0))


def test_blocks_are_longer_than_drafts(make: Make) -> None:
    steps = make(block_size=16, num_drafts=3)
    steps.add(0, random_ids(200, 18))
    steps.check(Entry(0, 15))
    for _ in range(4):
        steps.check(Entry(0))
    steps.check(Entry(0, 130))


def test_drafts_reach_behind_the_context(make: Make) -> None:
    """A row's last tokens may be drafted for, though no draft can be used."""
    steps = make()
    steps.add(0, random_ids(290, 19))
    steps.check(Entry(0, 278))
    steps.check(Entry(0))


def test_memory_of_a_block(make: Make) -> None:
    """Keys and values of its tokens, and one hidden state."""
    proposer = make(block_size=4).proposer
    assert proposer.block_bytes == 4 * (4 * 2 * 2 * 16 + 64)


def missed(steps: Checked, *entries: Entry) -> None:
    """Compute without hidden states, as while drafts do not pay."""
    steps.followed = False
    for entry in entries:
        entry.proposes = False
    assert steps.step(*entries) == {}
    steps.followed = True


def check_all_but(steps: Checked, without: set[int], *entries: Entry) -> None:
    """Compute; rows ``without`` have no drafts, and the others the plain head's."""
    for row, (ids, chances) in steps.step(*entries).items():
        if row in without:
            assert set(ids) == {-1}
            continue
        tokens = steps.text(row)
        expected = steps.plain.drafts(states_of(tokens[:-1], WIDTH), tokens, len(ids))
        assert ids == expected[0], row
        assert chances == pytest.approx(expected[1], rel=1e-3), row


def test_rows_of_steps_that_were_missed_are_not_drafted_for(make: Make) -> None:
    steps = make()
    for row in range(3):
        steps.add(row, random_ids(80, 30 + row))
    steps.check(Entry(0, 9), Entry(1, 6), Entry(2, 3))
    missed(steps, Entry(0), Entry(2, 11))
    for _ in range(5):
        check_all_but(steps, {0, 2}, Entry(0), Entry(2), Entry(1))
    steps.add(0, random_ids(80, 40))
    check_all_but(steps, {2}, Entry(0, 7), Entry(1, 5), Entry(2, 6))


def test_what_begins_behind_blocks_that_were_missed_is_not_drafted_for(make: Make) -> None:
    steps = make()
    first, other = random_ids(60, 41), random_ids(60, 42)
    steps.add(0, first)
    steps.check(Entry(0, 13))
    missed(steps, Entry(0, 7))
    blocks = steps.rows[0].blocks
    steps.add(1, first[:12] + other, blocks[:3], 12)
    steps.add(2, first[:16] + other, blocks[:4], 16)
    steps.add(3, first[:20] + other, blocks[:5], 20)
    check_all_but(steps, {2, 3}, Entry(1, 4), Entry(2, 4), Entry(3, 3))
    check_all_but(steps, {2, 3}, Entry(3), Entry(1), Entry(2))


def test_a_fork_of_what_was_missed_is_not_drafted_for(make: Make) -> None:
    steps = make()
    tokens = random_ids(60, 43)
    steps.add(0, tokens)
    steps.check(Entry(0, 5))
    missed(steps, Entry(0, 5))
    steps.fork(1, 0, tokens[:10] + random_ids(40, 44), 9)
    steps.fork(2, 0, tokens[:4] + random_ids(40, 45), 4)
    check_all_but(steps, {0, 1}, Entry(0), Entry(1), Entry(2, 6))


def test_blocks_that_were_missed_are_whole_again_for_their_next_owner(make: Make) -> None:
    steps = make()
    steps.add(0, random_ids(60, 46))
    missed(steps, Entry(0, 16))
    blocks = steps.rows[0].blocks
    tokens = random_ids(60, 47)
    steps.add(1, tokens)
    steps.rows[1].blocks = list(blocks)
    steps.check(Entry(1, 9))
    steps.check(Entry(1, 7))
    steps.add(2, tokens[:16] + random_ids(30, 48), blocks, 16)
    steps.check(Entry(2, 3))


def test_for_timed_steps_all_blocks_count_as_whole(make: Make) -> None:
    steps = make()
    steps.add(0, random_ids(60, 49))
    missed(steps, Entry(0, 16))
    steps.proposer.assume_computed()
    steps.add(1, random_ids(60, 50), steps.rows[0].blocks, 16)
    assert min(steps.step(Entry(1, 2))[1][0]) >= 0
