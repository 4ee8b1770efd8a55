"""Tiers below the device's cache, host memory and disk: which blocks lie there, and when they go there and come back.

    device: free, named, soon to be reused --store--> each tier that has it not
    a tier --fetch, while its request waits--> device: free, and found by its name as if it had never left

The same index with another place: a block has one name wherever it lies, and what came back is shared like all else.
Nobody waits for a copy but the request whose prefix is fetched. A block that is needed before its copy is done is
overwritten, and the copy comes to nothing. Pure: standard library only; the engine's thread owns it, a `BlockMover`
copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.cache.blocks import BlockId, BlockPool
from engine.cache.prefix_index import ASIDE, BlockName, Landmarks, PrefixIndex
from engine.cache.reach import Reach, name_in
from engine.ports import BlockMover, FetchOrder, KeptBlock, StoreOrder

RESERVE_SHARE = 0.5
"""Of all blocks, as many are to be free without a loss: unnamed, or held by a tier. A long prompt takes many."""
MAX_STORING = 64
"""Blocks on their way down at once: what is ordered too early may be overwritten before it is copied."""
MAX_FETCHES = 4
"""Requests at once whose prefixes come back, and as many look for theirs before it is their turn."""
MAX_SEEKS = 2
"""So often may a request wait for a fetch: its own, and one of somebody else with the same beginning."""
MIN_PATIENCE_S, MAX_PATIENCE_S = 0.1, 10.0
"""A fetch is waited for as long as what it brings would take to compute, but within these: a disk may hang."""


class _Tier:
    """The slots of one tier by the names of what they hold, the least recently used first."""

    def __init__(self, num_slots: int, kept: Iterable[KeptBlock]) -> None:
        self.num_slots = num_slots
        self.slot_by_name: OrderedDict[BlockName, int] = OrderedDict((block.name, block.slot) for block in kept)
        taken = {*self.slot_by_name.values()}
        self._free = [slot for slot in range(num_slots) if slot not in taken]
        self._reading: set[BlockName] = set()

    def try_take(self) -> tuple[int, BlockName | None] | None:
        """Return a slot to be written, and whose content it had; None where each is being read or written."""
        if self._free:
            return self._free.pop(), None
        name = next((name for name in self.slot_by_name if name not in self._reading), None)
        return None if name is None else (self.slot_by_name.pop(name), name)

    def put(self, name: BlockName, slot: int) -> None:
        """Take it as a fact that a slot holds the content of a name; the first one keeps it."""
        if name in self.slot_by_name:
            self._free.append(slot)
        else:
            self.slot_by_name[name] = slot

    def give_back(self, slot: int) -> None:
        """Free a slot whose content came to nothing."""
        self._free.append(slot)

    def open(self, name: BlockName) -> int:
        """Return the slot of a name that it holds, kept from being overwritten until `close`."""
        self._reading.add(name)
        return self.slot_by_name[name]

    def close(self, name: BlockName, *, is_good: bool) -> None:
        """End an `open`; what could not be read is forgotten."""
        self._reading.remove(name)
        if not is_good:
            self._free.append(self.slot_by_name.pop(name))

    def touch(self, name: BlockName) -> None:
        """Count a name as used just now."""
        if name in self.slot_by_name:
            self.slot_by_name.move_to_end(name)

    def check(self, num_writing: int) -> None:
        """Raise AssertionError unless each slot is free, held by one name, or being written."""
        held = [*self.slot_by_name.values(), *self._free]
        assert len({*held}) == len(held), "a slot of a tier is counted twice"
        assert len(held) + num_writing == self.num_slots, "a slot of a tier is lost"
        assert self._reading <= self.slot_by_name.keys(), "what is read was overwritten"


@dataclass(slots=True)
class _Fetch:
    """What one fetch holds until it is done: its prefix on the device, and blocks for what follows it.

    Attributes:
        until_s: from when on nobody waits for it, and it holds nothing any more.
        is_given_up: it holds nothing any more; only its slots are still being read.
    """

    shared: list[BlockId]
    orders: list[FetchOrder]
    until_s: float
    is_given_up: bool = False

    @property
    def blocks(self) -> list[BlockId]:
        """What it holds, in the order of the chain."""
        return [] if self.is_given_up else [*self.shared, *(order.block for order in self.orders)]


class CacheTiers:
    """The tiers of one cache, the nearest first; without any every method does nothing.

    Attributes:
        num_stored_blocks, num_fetched_blocks: since the start.
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
        self._tiers = [] if mover is None else [_Tier(*tier) for tier in zip(mover.capacities, kept, strict=True)]
        self._dirty: OrderedDict[BlockId, tuple[BlockName, int]] = OrderedDict()
        self._storing: dict[BlockId, StoreOrder] = {}
        self._num_writing = [0] * len(self._tiers)
        self._fetch_by_ticket: dict[int, _Fetch] = {}
        self._ticket_by_name: dict[BlockName, int] = {}
        self._num_tickets = 0
        self.num_stored_blocks = self.num_fetched_blocks = 0
        for block in [block for tier in kept for block in tier]:
            landmarks.add_below(block.name, block.depth)

    @property
    def are_there(self) -> bool:
        """Whether there is any tier."""
        return bool(self._tiers)

    def holds(self, name: BlockName) -> bool:
        """Return whether some tier holds a block."""
        return any(name in tier.slot_by_name for tier in self._tiers)

    def is_worth_waiting_for(self, ticket: int | None) -> bool:
        """Return whether a fetch is not done yet, and has not been given up."""
        fetch = None if ticket is None else self._fetch_by_ticket.get(ticket)
        return fetch is not None and not fetch.is_given_up

    def held(self) -> Iterable[BlockId]:
        """Yield the blocks that fetches hold, each as often as they do."""
        for fetch in self._fetch_by_ticket.values():
            yield from fetch.blocks

    def use(self, block: BlockId) -> None:
        """Take note that a request holds a block."""
        self._dirty.pop(block, None)

    def let_go(self, blocks: Sequence[BlockId]) -> None:
        """Take note that somebody holds some blocks no more, given in the order of a chain."""
        if not self._tiers:
            return
        for block in reversed(blocks):
            name = self._index.name_of(block)
            if name is None or self._pool.ref_count(block) or block in self._storing:
                continue
            for tier in self._tiers:
                tier.touch(name)
            if any(name not in tier.slot_by_name for tier in self._tiers):
                self._dirty[block] = name, self._index.depth_of(block)

    def overwrite(self, block: BlockId) -> None:
        """Take note that a block is about to be given to somebody else."""
        self._dirty.pop(block, None)
        if self._storing.pop(block, None) is not None:
            assert self._mover is not None
            self._mover.abandon(block)

    def give_up_one(self) -> bool:
        """End a fetch for the sake of a request that runs and finds no block; False where none holds any."""
        return any(self._try_give_up(ticket) for ticket in [*self._fetch_by_ticket])

    def advance(self, *, now_s: float, is_idle: bool) -> None:
        """Take what has been copied as a fact, and order that what would be reused soon is copied.

        Args:
            now_s: on the clock of `try_fetch`.
            is_idle: nobody asks for anything, and all else may be copied too. What is asked for all the time is never
                reused, and a restart should find that first of all.
        """
        assert self._mover is not None
        for order, were_written in self._mover.stored():
            self._end_store(order, were_written)
        for ticket, num_good in self._mover.fetched():
            self._land(ticket, num_good)
        for ticket, fetch in [*self._fetch_by_ticket.items()]:
            if now_s >= fetch.until_s:
                self._try_give_up(ticket)
        orders = []
        reserve = (1.0 if is_idle else RESERVE_SHARE) * self._pool.num_blocks
        while self._dirty and len(self._storing) < MAX_STORING and self._pool.num_free - len(self._dirty) < reserve:
            block, (name, depth) = self._dirty.popitem(last=False)
            order = StoreOrder(block, name, depth, self._slots_for(name))
            if all(slot is None for slot in order.slots):
                # Every slot is being read or written.
                self._dirty[block] = name, depth
                self._dirty.move_to_end(block, last=False)
                break
            self._storing[block] = order
            orders.append(order)
        if orders:
            self._mover.store(orders)

    def try_fetch(
        self, names: Sequence[BlockName], *, spare: int, now_s: float, worth_s: Callable[[int], float]
    ) -> int | None:
        """Begin to bring back what follows the beginning of a chain that the device holds.

        Args:
            names: of the chain's full blocks.
            spare: blocks that are to stay free.
            now_s: see `BlockPool.try_take`.
            worth_s: how many seconds may pass until so many blocks are back.

        Returns:
            The ticket of a fetch to wait for, which may be another one's; None for nothing, or no room.
        """
        if self._pool.num_free <= spare:
            return None
        assert self._mover is not None
        count = self._reach.longest(names, self._index.__contains__)
        # What is on its way is held until it is there.
        could = self._reach.longest(names, lambda name: name in self._index or self.holds(name))
        _, missing = self._parts(names, could)
        if not missing:
            return None
        ticket = self._ticket_by_name.get(missing[0][0])
        if ticket is not None:
            will_be = self._reach.longest(
                names, lambda name: name in self._index or self._ticket_by_name.get(name) == ticket
            )
            num_coming = len(self._fetch_by_ticket[ticket].orders)
            is_worth = will_be > count and worth_s(will_be - count) >= self._mover.fetch_s(num_coming)
            return ticket if is_worth else None
        if len(self._fetch_by_ticket) >= MAX_FETCHES:
            return None
        could, shared, missing = self._fitting(names, could, spare)
        if could <= count or worth_s(could - count) < self._mover.fetch_s(len(missing)):
            return None
        for block in shared:
            # What follows them would be of no use without them.
            self._pool.share(block)
            self.use(block)
        blocks = self._pool.try_take(len(missing), now_s)
        assert blocks is not None, "the pool has fewer free blocks than it said"
        orders = [self._order(name, block, depth) for (name, depth), block in zip(missing, blocks, strict=True)]
        patience_s = min(max(worth_s(could - count), MIN_PATIENCE_S), MAX_PATIENCE_S)
        return self._begin(_Fetch(shared, orders, now_s + patience_s))

    def check(self) -> None:
        """Raise AssertionError unless slots, copies and free blocks tell one story."""
        for tier, num_writing in zip(self._tiers, self._num_writing, strict=True):
            tier.check(num_writing)
        for block, (name, _) in self._dirty.items():
            assert self._pool.ref_count(block) == 0, f"block {block} is held, and waits to be stored"
            assert self._index.name_of(block) == name, f"block {block} waits to be stored under a wrong name"
        for block, order in self._storing.items():
            assert self._index.name_of(block) == order.name, f"block {block} is stored under a wrong name"

    def _slots_for(self, name: BlockName) -> tuple[int | None, ...]:
        """Return a slot for a block of each tier, None where it is there already or no slot can be had."""
        slots: list[int | None] = []
        for number, tier in enumerate(self._tiers):
            taken = None if name in tier.slot_by_name else tier.try_take()
            slots.append(None if taken is None else taken[0])
            if taken is not None:
                self._num_writing[number] += 1
                self._forget_landmark(taken[1])
        return tuple(slots)

    def _end_store(self, order: StoreOrder, were_written: Sequence[bool]) -> None:
        if self._storing.get(order.block) is order:
            del self._storing[order.block]
        for number, (slot, was_written) in enumerate(zip(order.slots, were_written, strict=True)):
            if slot is None:
                continue
            self._num_writing[number] -= 1
            if was_written:
                self._tiers[number].put(order.name, slot)
            else:
                self._tiers[number].give_back(slot)
        if any(were_written):
            self.num_stored_blocks += 1
            if order.name not in self._index:
                self._landmarks.add_below(order.name, order.depth)

    def _fitting(
        self, names: Sequence[BlockName], count: int, spare: int
    ) -> tuple[int, list[BlockId], list[tuple[BlockName, int]]]:
        """Return the most leading blocks of a chain, up to `count`, that can be read and find room; and their parts."""
        while True:
            count = self._reach.longest(names[:count], self._can_be_had)
            shared, missing = self._parts(names, count)
            num_revived = sum(self._pool.ref_count(block) == 0 for block in shared)
            overflow = len(missing) - (self._pool.num_free - num_revived - spare)
            if not count or overflow <= 0:
                return count, shared, missing
            count = max(0, count - overflow)

    def _parts(self, names: Sequence[BlockName], count: int) -> tuple[list[BlockId], list[tuple[BlockName, int]]]:
        """Return what is seen behind `count` blocks: the device's blocks, and the names and depths of all others."""
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

    def _can_be_had(self, name: BlockName) -> bool:
        return name in self._index or (self.holds(name) and not self._comes(name))

    def _comes(self, name: BlockName) -> bool:
        return name in self._ticket_by_name

    def _order(self, name: BlockName, block: BlockId, depth: int) -> FetchOrder:
        number = next(number for number, tier in enumerate(self._tiers) if name in tier.slot_by_name)
        return FetchOrder(block, name, depth, number, self._tiers[number].open(name))

    def _begin(self, fetch: _Fetch) -> int:
        assert self._mover is not None
        self._num_tickets += 1
        ticket = self._num_tickets
        self._fetch_by_ticket[ticket] = fetch
        self._ticket_by_name.update((order.name, ticket) for order in fetch.orders)
        self._mover.fetch(ticket, fetch.orders)
        return ticket

    def _land(self, ticket: int, num_good: int) -> None:
        """Name what was brought back, and let go of it, so that whoever waits for it finds it."""
        fetch = self._fetch_by_ticket.pop(ticket)
        for i, order in enumerate(fetch.orders):
            del self._ticket_by_name[order.name]
            # Only the first that could not be read is known to be bad; behind it nothing was tried.
            self._tiers[order.tier].close(order.name, is_good=fetch.is_given_up or i != num_good)
            if i < num_good and not fetch.is_given_up:
                self._index.insert(order.name, order.block, order.depth)
                self.num_fetched_blocks += 1
            else:
                self._forget_landmark(order.name)
        self._let_go_of(fetch)

    def _try_give_up(self, ticket: int) -> bool:
        """Take back the blocks of a fetch, from now on unwritten; False where there is none."""
        fetch = self._fetch_by_ticket[ticket]
        assert self._mover is not None
        if fetch.is_given_up:
            return False
        self._mover.give_up(ticket)
        self._let_go_of(fetch)
        fetch.is_given_up = True
        return True

    def _let_go_of(self, fetch: _Fetch) -> None:
        self._pool.release(fetch.blocks)
        self.let_go(fetch.blocks)

    def _forget_landmark(self, name: BlockName | None) -> None:
        if name is not None and name not in self._index and not self.holds(name):
            self._landmarks.drop(name)
