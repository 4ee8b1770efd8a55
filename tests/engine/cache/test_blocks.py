from __future__ import annotations

import pytest

from engine.cache.blocks import BlockId, BlockPool


def test_all_blocks_are_free_at_first_and_are_taken_in_order() -> None:
    pool = BlockPool(3)
    assert (pool.num_free, pool.num_held) == (3, 0)
    assert pool.try_take(2) == [0, 1]
    assert (pool.num_free, pool.num_held) == (1, 2)


def test_too_many_blocks_are_refused_and_nothing_is_taken() -> None:
    pool = BlockPool(3)
    pool.try_take(1)
    assert pool.try_take(3) is None
    assert pool.num_free == 2


def test_taking_none_is_always_possible() -> None:
    pool = BlockPool(1)
    pool.try_take(1)
    assert pool.try_take(0) == []


def test_the_end_of_a_released_table_is_reused_before_its_beginning() -> None:
    pool = BlockPool(3)
    table = pool.try_take(3)
    assert table is not None
    pool.release(table)
    assert pool.try_take(3) == [2, 1, 0]


def test_a_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    [block] = pool.try_take(1) or []
    pool.share(block)
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_a_free_block_that_is_shared_leaves_the_free_list() -> None:
    pool = BlockPool(2)
    table = pool.try_take(2) or []
    pool.release(table)
    pool.share(BlockId(1))
    assert pool.try_take(2) is None
    assert pool.try_take(1) == [0]
    pool.check()


def test_reuse_is_told_and_revival_is_not() -> None:
    reused: list[BlockId] = []
    pool = BlockPool(2, on_reuse=reused.append)
    table = pool.try_take(1) or []
    pool.release(table)
    pool.share(table[0])
    assert reused == [0]
    pool.try_take(1)
    assert reused == [0, 1]


def test_blocks_that_are_wished_for_are_taken_last_until_their_time_has_passed() -> None:
    pool = BlockPool(4)
    table = pool.try_take(4, 1.0) or []
    pool.release(table[:2], 10.0)
    pool.release(table[2:])
    assert pool.try_take(3, 9.0) == [3, 2, 1]
    pool.release([BlockId(3), BlockId(2), BlockId(1)])
    # Nobody wished for block 1 again, and block 0 has had its time.
    assert pool.try_take(4, 10.0) == [1, 2, 3, 0]


def test_a_wish_outlives_who_shares_the_block_without_one() -> None:
    pool = BlockPool(2)
    first, second = pool.try_take(2, 1.0) or []
    pool.release([first], 10.0)
    pool.share(first)
    pool.release([first])
    pool.release([second])
    assert pool.try_take(1, 9.0) == [second]


def test_no_more_than_half_are_kept_and_the_oldest_wish_gives_way() -> None:
    pool = BlockPool(4)
    table = pool.try_take(4, 1.0) or []
    for block in table[:3]:
        pool.release([block], 10.0)
    pool.release(table[3:])
    pool.check()
    assert pool.try_take(4, 2.0) == [0, 3, 1, 2]


def test_a_block_released_too_often_is_a_bug_that_is_named() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="block 0 is released more often"):
        pool.release([BlockId(0)])


def test_check_finds_a_lost_block() -> None:
    pool = BlockPool(2)
    pool.try_take(1)
    pool._ref_count[0] = 0
    with pytest.raises(AssertionError, match="a block is lost"):
        pool.check()
