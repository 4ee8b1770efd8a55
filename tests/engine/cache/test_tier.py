"""A tier's slots: which are free, which hold a name, and which are kept from being overwritten."""

from __future__ import annotations

from engine.cache.blocks import BlockId, BlockPool
from engine.cache.prefix_index import BlockName, Landmarks, PrefixIndex
from engine.cache.tier import NamedBlock, Tier
from engine.ports import BlockOrder, KeptBlock


def a_name(number: int) -> BlockName:
    return BlockName(bytes([number]) * 32)


def let_go(tier: Tier, *numbers: int) -> None:
    """Let go of blocks with the names of their numbers."""
    tier.let_go([NamedBlock(BlockId(number), a_name(number), number) for number in numbers], are_behind=False)


def ordered(tier: Tier) -> BlockOrder:
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


def test_a_chain_is_stored_from_its_beginning_and_overwritten_from_its_end() -> None:
    tier = Tier(0, 3, [])
    store(tier, 1, 2, 3)
    let_go(tier, 1, 2, 3)
    let_go(tier, 4, 5)
    found = [tier.try_order() for _ in range(2)]
    assert [(of_block.order.block, of_block.evicted) for of_block in found if of_block is not None] == [
        (4, a_name(3)),
        (5, a_name(2)),
    ]


def test_no_more_of_a_chain_is_stored_than_there_are_slots() -> None:
    tier = Tier(0, 2, [])
    store(tier, 1, 2)
    let_go(tier, 3, 4, 5)
    assert tier.num_dirty == 2


def test_what_a_request_goes_on_without_is_stored_last() -> None:
    tier = Tier(0, 4, [])
    tier.let_go([NamedBlock(BlockId(1), a_name(1), 0)], are_behind=True)
    let_go(tier, 2)
    assert [ordered(tier).block, ordered(tier).block] == [2, 1]


def test_what_is_read_is_not_overwritten() -> None:
    tier = Tier(0, 1, [KeptBlock(a_name(1), 0, 0)])
    assert tier.open(a_name(1)) == 0
    let_go(tier, 2)
    assert tier.try_order() is None
    tier.close(a_name(1), is_good=True)
    assert ordered(tier).slot == 0


def test_what_is_read_is_passed_over_once() -> None:
    """Each order passed over all of a long prefix, which is what was used the longest ago, until it was fetched."""
    tier = Tier(0, 3, [])
    store(tier, 1, 2, 3)
    tier.open(a_name(1))
    let_go(tier, 4)
    found = tier.try_order()
    assert found is not None
    assert found.evicted == a_name(2)
    tier.close(a_name(1), is_good=True)
    let_go(tier, 5)
    found = tier.try_order()
    assert found is not None
    assert found.evicted == a_name(3)


def test_a_slot_that_was_not_written_is_free_again() -> None:
    tier = Tier(0, 1, [])
    for was_written in (False, True):
        let_go(tier, 1)
        tier.end_store(ordered(tier), was_written=was_written)
        assert (a_name(1) in tier) == was_written


def test_a_name_that_is_forgotten_leaves_its_slot_unless_it_is_being_read() -> None:
    tier = Tier(0, 2, [])
    store(tier, 1, 2)
    slot = tier.open(a_name(1))
    tier.close(a_name(1), is_good=True)
    tier.open(a_name(2))
    for number in (1, 2, 3):
        tier.forget(a_name(number))
    assert (a_name(1) in tier, a_name(2) in tier) == (False, True)
    let_go(tier, 4)
    assert ordered(tier).slot == slot


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
        tier.let_go([NamedBlock(block, a_name(7), 0)], are_behind=False)
        orders.append(ordered(tier))
        tier.overwrite(block)
    for order in orders:
        tier.end_store(order, was_written=True)
    index = PrefixIndex(Landmarks(pool.num_blocks))
    tier.check(index)
    store(tier, 3)
    assert a_name(7) in tier
    assert a_name(3) in tier
