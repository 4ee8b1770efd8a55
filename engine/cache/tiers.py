"""Tiers below the device's cache, host memory and disk: which blocks they hold, and when blocks move down and back up.

    device: free, named, soon to be reused --store--> each tier that does not hold it
    a tier --fetch, while its request waits--> device: free, and found by its name as if it had never left

A block has the same name in every tier, and a fetched block is shared like any other. Only the request whose prefix is
fetched waits for a copy. A block that is needed before it has been stored is overwritten, and its copy is discarded.
Pure: standard library only; owned by the engine's thread, while a `BlockMover` copies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from engine.cache.blocks import BlockId, BlockPool
from engine.cache.prefix_index import ASIDE, BlockName, Landmarks, PrefixIndex
from engine.cache.reach import Reach, name_in
from engine.cache.tier import NamedBlock, Tier
from engine.cache.tier_fetch import TierFetch
from engine.ports import BlockMover, BlockOrder

RESERVE_SHARE = 0.5
"""Share of all blocks to keep free with nothing to lose: unnamed, or held by a tier. A long prompt takes many."""
MIN_STORING, STORING_STEPS = 64, 2
"""Most blocks being stored at once in a tier: those ordered too early may be overwritten before they are copied. But
orders are made once a step, so all that a few steps compute must find room."""
MAX_FETCHES = 4
"""Most concurrent fetches from a tier, and the number of next waiting requests that look for their prefixes."""
MAX_SEEKS = 2
"""Most fetches that a request waits for: its own, and one of another request with the same prefix."""
MIN_PATIENCE_S, MAX_PATIENCE_S = 0.1, 10.0
"""A fetch is awaited as long as computing its content would take, within these bounds, as a disk may hang."""


class CacheTiers:
    """The tiers of one cache, nearest first.

    Without any, `advance` and `try_fetch` must not be called, and the other methods do nothing.

    Attributes:
        num_stored_blocks, num_fetched_blocks: totals since the start. Parts in any table but the first do not count, as
            they are of the same tokens.
    """

    def __init__(
        self, pool: BlockPool, index: PrefixIndex, landmarks: Landmarks, reach: Reach, mover: BlockMover | None
    ) -> None:
        self._pool = pool
        self._index = index
        self._landmarks = landmarks
        self._reach = reach
        self._mover = mover
        kept = [] if mover is None else mover.contents()
        self._tiers = [Tier(i, mover.capacities[i], blocks) for i, blocks in enumerate(kept)] if mover else []
        self._fetch_by_ticket: dict[int, TierFetch] = {}
        self._being_read: set[BlockName] = set()
        self._max_storing = max(MIN_STORING, STORING_STEPS * reach.step_blocks)
        self._num_tickets = 0
        self.num_stored_blocks = self.num_fetched_blocks = 0
        for block in [block for tier in kept for block in tier]:
            landmarks.add_below(block.name, block.depth)

    @property
    def are_there(self) -> bool:
        """Whether there are any tiers."""
        return bool(self._tiers)

    @property
    def are_fetching(self) -> bool:
        """Whether a fetch is in flight."""
        return bool(self._fetch_by_ticket)

    def may_bring(self, names: Sequence[BlockName]) -> bool:
        """Return whether a fetch in flight brings some block of a chain, in O(1)."""
        return any(fetch.begins_on(names) for fetch in self._fetch_by_ticket.values())

    def holds(self, name: BlockName) -> bool:
        """Return whether any tier holds a block."""
        # A loop, as a generator takes three times as long; a long prompt asks thousands of times.
        for tier in self._tiers:  # noqa: SIM110
            if name in tier:
                return True
        return False

    def is_worth_waiting_for(self, ticket: int | None) -> bool:
        """Return whether a fetch is neither done nor given up."""
        fetch = None if ticket is None else self._fetch_by_ticket.get(ticket)
        return fetch is not None and not fetch.is_given_up

    def num_held(self, ticket: int | None) -> int:
        """Return how many blocks a fetch holds; 0 if it is done or given up, or there is none."""
        fetch = None if ticket is None else self._fetch_by_ticket.get(ticket)
        return 0 if fetch is None else len(fetch.blocks)

    def held(self) -> Iterable[BlockId]:
        """Yield the blocks that fetches hold, once per fetch."""
        for fetch in self._fetch_by_ticket.values():
            yield from fetch.blocks

    def use(self, block: BlockId) -> None:
        """Record that a request holds a block."""
        for tier in self._tiers:
            tier.use(block)

    def let_go(self, blocks: Sequence[BlockId], *, are_behind: bool = False) -> None:
        """Record that a holder has released some blocks, given in the order of a chain.

        Args:
            are_behind: whether they are behind the windows of a request that goes on.
        """
        if not self._tiers:
            return
        free = [
            NamedBlock(block, name, self._index.depth_of(block))
            for block in blocks
            if (name := self._index.name_of(block)) is not None and not self._pool.ref_count(block)
        ]
        for tier in self._tiers:
            tier.let_go(free, are_behind=are_behind)

    def overwrite(self, block: BlockId) -> None:
        """Record that a block is about to be reused, and abandon its copy."""
        if sum(tier.overwrite(block) for tier in self._tiers):
            assert self._mover is not None
            self._mover.abandon(block)

    def forget(self, name: BlockName) -> None:
        """Drop a block from all tiers, except where it is being read."""
        for tier in self._tiers:
            tier.forget(name)
        self._forget_landmark(name)

    def give_up_one(self) -> bool:
        """Give up a fetch because a running request finds no free block; False if no fetch holds any."""
        return any(self._try_give_up(ticket) for ticket in [*self._fetch_by_ticket])

    def advance(self, *, now_s: float, is_idle: bool) -> None:
        """Process finished copies, give up overdue fetches, and order stores of blocks that would be reused soon.

        Args:
            now_s: time on the clock of `try_fetch`.
            is_idle: whether there are no requests, so that all other free blocks may be stored too. Blocks in constant
                use are never about to be reused, yet are the most valuable after a restart.
        """
        assert self._mover is not None
        for order, was_written in self._mover.stored():
            self._end_store(order, was_written=was_written)
        for ticket, num_good in self._mover.fetched():
            self._land(ticket, num_good)
        for ticket, fetch in [*self._fetch_by_ticket.items()]:
            if now_s >= fetch.until_s:
                self._try_give_up(ticket)
        reserve = (1.0 if is_idle else RESERVE_SHARE) * self._pool.num_blocks
        orders = [order for tier in self._tiers for order in self._orders_for(tier, reserve)]
        if orders:
            self._mover.store(orders)

    def num_had(self, names: Sequence[BlockName], worth_s: Callable[[int], float]) -> int:
        """Return how many leading blocks of a chain need not be computed; any thread.

        Those in tiers count by what a fetch of them saves of their time: none if it saves nothing. For `worth_s` see
        `try_fetch`.
        """
        assert self._mover is not None
        count = self._reach.longest(names, self._index.__contains__)
        could = self._reach.longest(names, self._is_anywhere)
        if could <= count:
            return count
        num_parts = sum(min(len(seen), could - count) for seen in self._reach.seen(could))
        # Ends of chains leave a tier first, so the last block lies in the farthest.
        fetch_s, most_s = self._mover.fetch_s({self._tier_of(names[could - 1]): num_parts}), worth_s(could - count)
        return count + round((could - count) * (1 - fetch_s / most_s)) if fetch_s < most_s else count

    def try_join(self, names: Sequence[BlockName], worth_s: Callable[[int], float]) -> int | None:
        """Return the ticket of another request's fetch that brings so much of a chain that it is worth waiting for.

        It looks up nothing. For `worth_s` see `try_fetch`.
        """
        assert self._mover is not None
        for ticket in self._fetch_by_ticket:
            num_more = self._num_brought(ticket, names)
            if num_more and worth_s(num_more) >= self._coming_s(ticket):
                return ticket
        return None

    def patience_s(self, ticket: int, names: Sequence[BlockName], worth_s: Callable[[int], float]) -> float:
        """Return how long to wait for a fetch that brings a part of a chain; for `worth_s` see `try_fetch`."""
        return _patience_s(worth_s(self._num_brought(ticket, names)))

    def try_fetch(
        self, names: Sequence[BlockName], *, spare: int, now_s: float, worth_s: Callable[[int], float]
    ) -> int | None:
        """Start to fetch the part of a chain that follows what the device holds.

        Args:
            names: names of the chain's full blocks.
            spare: blocks that must stay free.
            now_s: see `BlockPool.try_take`.
            worth_s: returns the longest time in seconds that fetching a number of blocks may take to pay off.

        Returns:
            The ticket of the fetch to wait for, maybe another request's; None if no fetch is possible or pays off.
        """
        ticket = self.try_join(names, worth_s)
        if ticket is not None or self._pool.num_free <= spare:
            return ticket
        assert self._mover is not None
        if len(self._fetch_by_ticket) >= MAX_FETCHES * len(self._tiers):
            return None
        count = self._reach.longest(names, self._index.__contains__)
        could, shared, missing = self._fitting(names, count, spare)
        fetch_s = math.inf if could <= count else self._fetch_s(missing)
        if math.isinf(fetch_s) or worth_s(could - count) < fetch_s:
            return None
        for block in shared:
            # The fetched blocks would be useless without the ones before them.
            self._pool.share(block)
            self.use(block)
        blocks = self._pool.try_take(len(missing), now_s)
        assert blocks is not None, "the pool has fewer free blocks than it said"
        orders = [self._order(name, block, depth) for (name, depth), block in zip(missing, blocks, strict=True)]
        until_s = now_s + _patience_s(worth_s(could - count))
        return self._begin(TierFetch(names[:could], count, shared, orders, until_s))

    def check(self) -> None:
        """Raise AssertionError unless slots, copies and free blocks agree."""
        for tier in self._tiers:
            tier.check(self._index)

    def _orders_for(self, tier: Tier, reserve: float) -> Iterator[BlockOrder]:
        """Yield orders to store blocks until `reserve` are free with nothing to lose: unnamed, or held by the tier."""
        while tier.num_storing < self._max_storing and self._pool.num_free - tier.num_dirty < reserve:
            ordered = tier.try_order()
            if ordered is None:
                return
            self._forget_landmark(ordered.evicted)
            yield ordered.order

    def _end_store(self, order: BlockOrder, *, was_written: bool) -> None:
        is_new = was_written and not self.holds(order.name)
        self._tiers[order.tier].end_store(order, was_written=was_written)
        if is_new:
            self.num_stored_blocks += order.depth != ASIDE
            if order.name not in self._index:
                self._landmarks.add_below(order.name, order.depth)

    def _fitting(
        self, names: Sequence[BlockName], num_found: int, spare: int
    ) -> tuple[int, list[BlockId], list[tuple[BlockName, int]]]:
        """Return how many leading blocks can be fetched and fit in free blocks, with their `_parts`.

        `num_found` of them are on the device; if it is no more than these, the parts are left out.
        """
        count, overflow = len(names), math.inf
        if not all(self._reach.windows):
            # A table without a window takes a block for each: what cannot fit need not be looked up.
            count = min(count, num_found + self._pool.num_free - spare)
        while True:
            count = self._reach.longest(names[:count], self._can_be_had)
            if count <= num_found:
                return num_found, [], []
            shared, missing = self._parts(names, count)
            num_revived = sum(self._pool.ref_count(block) == 0 for block in shared)
            last, overflow = overflow, len(missing) + num_revived + spare - self._pool.num_free
            if overflow <= 0:
                return count, shared, missing
            if overflow >= last:
                # Windows show as many blocks wherever they end.
                return num_found, [], []
            count = max(0, count - overflow)

    def _parts(self, names: Sequence[BlockName], count: int) -> tuple[list[BlockId], list[tuple[BlockName, int]]]:
        """Return the parts read after `count` blocks: blocks on the device, and names and depths of missing ones."""
        shared: list[BlockId] = []
        missing: list[tuple[BlockName, int]] = []
        for table, seen in enumerate(self._reach.seen(count)):
            for i in seen:
                name = name_in(names[i], table)
                if name in self._index:
                    shared.append(self._index.block_of(name))
                else:
                    missing.append((name, ASIDE if table else i))
        return shared, missing

    def _is_anywhere(self, name: BlockName) -> bool:
        return name in self._index or self.holds(name)

    def _can_be_had(self, name: BlockName) -> bool:
        return name in self._index or (self.holds(name) and name not in self._being_read)

    def _num_brought(self, ticket: int, names: Sequence[BlockName]) -> int:
        return self._fetch_by_ticket[ticket].num_brought(names, is_whole=any(self._reach.windows))

    def _fetch_s(self, missing: Sequence[tuple[BlockName, int]]) -> float:
        """Return the expected time of a new fetch; infinite if as many as may be are in flight from its tier."""
        assert self._mover is not None
        num_by_tier = Counter(self._tier_of(name) for name, _ in missing)
        before = [ticket for ticket, fetch in self._fetch_by_ticket.items() if fetch.farthest == max(num_by_tier)]
        if len(before) >= MAX_FETCHES:
            return math.inf
        return self._mover.fetch_s(num_by_tier) + (self._coming_s(before[-1]) if before else 0.0)

    def _coming_s(self, ticket: int) -> float:
        """Return the expected time of a fetch in flight and of those before it on the same thread."""
        assert self._mover is not None
        farthest = self._fetch_by_ticket[ticket].farthest
        return sum(
            self._mover.fetch_s(fetch.num_by_tier)
            for number, fetch in self._fetch_by_ticket.items()
            if number <= ticket and fetch.farthest == farthest and not fetch.is_given_up
        )

    def _tier_of(self, name: BlockName) -> int:
        """Return the nearest tier that holds a name; 0 if none does."""
        return next((number for number, tier in enumerate(self._tiers) if name in tier), 0)

    def _order(self, name: BlockName, block: BlockId, depth: int) -> BlockOrder:
        number = self._tier_of(name)
        return BlockOrder(block, name, depth, number, self._tiers[number].open(name))

    def _begin(self, fetch: TierFetch) -> int:
        assert self._mover is not None
        self._num_tickets += 1
        ticket = self._num_tickets
        self._fetch_by_ticket[ticket] = fetch
        self._being_read.update(order.name for order in fetch.orders)
        self._mover.fetch(ticket, fetch.orders)
        return ticket

    def _land(self, ticket: int, num_good: int) -> None:
        """Name the fetched blocks and release them, so that waiting requests find them."""
        fetch = self._fetch_by_ticket.pop(ticket)
        for i, order in enumerate(fetch.orders):
            self._being_read.remove(order.name)
            # Only the first unreadable order is known to be bad; those after it were not tried.
            self._tiers[order.tier].close(order.name, is_good=fetch.is_given_up or i != num_good)
            if i < num_good and not fetch.is_given_up:
                self._index.insert(order.name, order.block, order.depth)
                self.num_fetched_blocks += order.depth != ASIDE
            else:
                self._forget_landmark(order.name)
        self._let_go_of(fetch)

    def _try_give_up(self, ticket: int) -> bool:
        """Stop a fetch from writing and release its blocks; False if it was given up before."""
        fetch = self._fetch_by_ticket[ticket]
        assert self._mover is not None
        if fetch.is_given_up:
            return False
        self._mover.give_up(ticket)
        self._let_go_of(fetch)
        fetch.is_given_up = True
        return True

    def _let_go_of(self, fetch: TierFetch) -> None:
        self._pool.release(fetch.blocks)
        self.let_go(fetch.blocks)

    def _forget_landmark(self, name: BlockName | None) -> None:
        if name is not None and name not in self._index and not self.holds(name):
            self._landmarks.drop(name)


def _patience_s(worth_s: float) -> float:
    return min(max(worth_s, MIN_PATIENCE_S), MAX_PATIENCE_S)
