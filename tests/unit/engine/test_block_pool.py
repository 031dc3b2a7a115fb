"""Reference counts, eviction order and the accounting of blocks."""

from __future__ import annotations

import random

import pytest

from tgi_cli.engine.block_pool import BlockPool


def test_take_gives_distinct_blocks_and_refuses_more_than_there_are() -> None:
    pool = BlockPool(4)
    taken = pool.take(3)
    assert len(set(taken)) == 3
    with pytest.raises(IndexError, match="1 available"):
        pool.take(2)
    assert pool.num_available == 1, "a refused take must leave the pool as it was"


def test_a_shared_block_is_available_only_after_its_last_release() -> None:
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_used == 1
    pool.release(blocks)
    assert pool.num_used == 0
    with pytest.raises(ValueError, match="more often"):
        pool.release(blocks)


def test_blocks_without_content_are_reused_before_cached_ones_and_those_oldest_first() -> None:
    pool = BlockPool(4)
    first, second, plain, _ = pool.take(4)
    pool.index(first, b"first")
    pool.index(second, b"second")
    pool.release([second])
    pool.release([first])
    pool.release([plain])
    assert pool.take(1) == [plain]
    assert pool.take(1) == [second], "released first, evicted first"
    assert pool.find(b"second") is None
    assert pool.find(b"first") == first


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block in blocks:
        pool.index(block, bytes([block]))
    pool.release(blocks)
    assert pool.take(3) == list(reversed(blocks))


def test_a_cached_block_can_be_shared_again_with_its_content() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.index(block, b"content")
    pool.release([block])
    assert pool.num_available == 1
    pool.share([block])
    assert pool.num_available == 0
    assert pool.find(b"content") == block


def test_the_first_of_two_equal_blocks_stays_indexed() -> None:
    pool = BlockPool(2)
    one, two = pool.take(2)
    pool.index(one, b"same")
    pool.index(two, b"same")
    assert pool.find(b"same") == one
    pool.release([two])
    assert pool.find(b"same") == one


def test_random_use_never_loses_or_duplicates_a_block() -> None:
    random_ = random.Random(7)
    pool = BlockPool(20)
    held: list[list[int]] = []
    for turn in range(5000):
        action = random_.random()
        if action < 0.45 and pool.num_available:
            blocks = pool.take(random_.randint(1, min(4, pool.num_available)))
            for block in blocks:
                if random_.random() < 0.5:
                    pool.index(block, f"{turn}-{block}".encode())
            held.append(blocks)
        elif action < 0.55 and held:
            shared = random_.choice(held)
            pool.share(shared)
            held.append(list(shared))
        elif held:
            pool.release(held.pop(random_.randrange(len(held))))
        used = {block for blocks in held for block in blocks}
        assert pool.num_used == len(used)
        assert pool.num_used + pool.num_available == 20


def test_a_block_that_is_forgotten_is_taken_first_and_not_found() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block in blocks:
        pool.index(block, bytes([block]))
    pool.release(blocks)
    assert pool.evicts
    pool.forget(blocks[0])
    assert not pool.evicts
    assert pool.find(bytes([blocks[0]])) is None
    assert pool.take(1) == [blocks[0]]
    assert pool.evicts


def test_a_block_in_use_that_is_forgotten_may_have_new_content() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.index(block, b"old")
    pool.forget(block)
    assert pool.is_used(block)
    assert pool.num_available == 1
    pool.index(block, b"new")
    assert pool.find(b"new") == block
    pool.release([block])
    assert not pool.is_used(block)
    assert pool.take(1) != [block], "what has no content is taken first"
