"""A tier's slots: which are free, which hold a name, and which are kept from being overwritten."""

from __future__ import annotations

from engine.cache.blocks import BlockId, BlockPool
from engine.cache.prefix_index import BlockName, Landmarks, PrefixIndex
from engine.cache.tier import Tier
from engine.ports import KeptBlock, StoreOrder


def a_name(number: int) -> BlockName:
    return BlockName(bytes([number]) * 32)


def let_go(tier: Tier, *numbers: int) -> None:
    """Let go of blocks with the names of their numbers."""
    for number in numbers:
        tier.let_go(BlockId(number), a_name(number), number)


def ordered(tier: Tier) -> StoreOrder:
    found = tier.try_order()
    assert found is not None
    return found.order


def store(tier: Tier, *numbers: int) -> None:
    let_go(tier, *numbers)
    for _ in numbers:
        tier.end_store(ordered(tier), was_written=True)


def test_the_name_used_the_longest_ago_makes_room() -> None:
    tier = Tier(0, 2, [])
    store(tier, 1, 2)
    let_go(tier, 1)
    let_go(tier, 3)
    found = tier.try_order()
    assert found is not None
    assert (found.order.block, found.evicted) == (3, a_name(2))
    assert (a_name(1) in tier, a_name(2) in tier, a_name(3) in tier) == (True, False, False)


def test_what_is_read_is_not_overwritten() -> None:
    tier = Tier(0, 1, [KeptBlock(a_name(1), 0, 0)])
    assert tier.open(a_name(1)) == 0
    let_go(tier, 2)
    assert tier.try_order() is None
    tier.close(a_name(1), is_good=True)
    assert ordered(tier).slot == 0


def test_a_slot_that_was_not_written_is_free_again() -> None:
    tier = Tier(0, 1, [])
    for was_written in (False, True):
        let_go(tier, 1)
        tier.end_store(ordered(tier), was_written=was_written)
        assert (a_name(1) in tier) == was_written


def test_an_abandoned_order_counts_until_it_ends() -> None:
    tier = Tier(0, 2, [])
    let_go(tier, 1)
    order = ordered(tier)
    assert tier.overwrite(BlockId(1))
    assert not tier.overwrite(BlockId(1))
    assert tier.num_storing == 1
    tier.end_store(order, was_written=False)
    assert tier.num_storing == 0


def test_a_name_stored_twice_takes_one_slot() -> None:
    pool, tier = BlockPool(4), Tier(0, 2, [])
    orders = []
    for block in map(BlockId, (1, 2)):
        tier.let_go(block, a_name(7), 0)
        orders.append(ordered(tier))
        tier.overwrite(block)
    for order in orders:
        tier.end_store(order, was_written=True)
    index = PrefixIndex(Landmarks(pool.num_blocks))
    tier.check(index)
    store(tier, 3)
    assert a_name(7) in tier
    assert a_name(3) in tier
