"""One tier below the device's cache: which slot holds which block, and which blocks are still to be copied there.

    a block is let go --> dirty --order--> being stored --end_store--> its name has a slot
                            |                    |
                            +-- used, or overwritten: not copied, or the copy is discarded

Tiers do not wait for each other: one that hangs holds no slot of another. Pure: standard library only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.cache.blocks import BlockId
from engine.cache.prefix_index import BlockName, PrefixIndex
from engine.ports import BlockOrder, KeptBlock


class NamedBlock(NamedTuple):
    """A block, the name of its content, and its index in its chain."""

    block: BlockId
    name: BlockName
    depth: int


class Ordered(NamedTuple):
    """A block to copy to a slot, and the name that the slot held before, if any."""

    order: BlockOrder
    evicted: BlockName | None


class Tier:
    """The slots of one tier by the names of their content, least recently used first, and the blocks it lacks.

    Args:
        number: which of the tiers it is; 0 is the nearest to the device.
        kept: its content at the start, least recently used first.

    Attributes:
        num_storing: orders that have not ended, abandoned ones too.
    """

    def __init__(self, number: int, num_slots: int, kept: Iterable[KeptBlock]) -> None:
        self.num_storing = 0
        self._number = number
        self._num_slots = num_slots
        self._slot_by_name: OrderedDict[BlockName, int] = OrderedDict((block.name, block.slot) for block in kept)
        taken = {*self._slot_by_name.values()}
        self._free = [slot for slot in range(num_slots) if slot not in taken]
        self._reading: set[BlockName] = set()
        self._dirty: OrderedDict[BlockId, NamedBlock] = OrderedDict()
        self._behind: OrderedDict[BlockId, NamedBlock] = OrderedDict()
        self._order_by_block: dict[BlockId, BlockOrder] = {}

    def __contains__(self, name: BlockName) -> bool:
        return name in self._slot_by_name

    @property
    def num_dirty(self) -> int:
        """Blocks that nobody holds and that are neither in the tier nor being stored."""
        return len(self._dirty) + len(self._behind)

    def let_go(self, blocks: Sequence[NamedBlock], *, are_behind: bool) -> None:
        """Record that nobody holds some blocks any more, given in the order of a chain.

        Its beginning, without which the rest is of no use, is stored first and overwritten last.

        Args:
            are_behind: whether its request goes on without them; they are stored after all others.
        """
        for _, name, _ in reversed(blocks):
            if name in self._slot_by_name:
                self._slot_by_name.move_to_end(name)
        dirty = self._behind if are_behind else self._dirty
        # More would overwrite its beginning.
        for named in blocks[: self._num_slots]:
            if named.name not in self._slot_by_name and named.block not in self._order_by_block:
                dirty[named.block] = named

    def use(self, block: BlockId) -> None:
        """Record that somebody holds a block."""
        self._dirty.pop(block, None)
        self._behind.pop(block, None)

    def overwrite(self, block: BlockId) -> bool:
        """Record that a block is about to be reused; return whether its copy has to be abandoned."""
        self.use(block)
        return self._order_by_block.pop(block, None) is not None

    def try_order(self) -> Ordered | None:
        """Return an order for the next dirty block; None without one, or without a slot to write."""
        evicted = None
        if not self._free:
            if len(self._reading) == len(self._slot_by_name):
                return None
            # What is read is in use: passed over where it is, it would be passed over for every order.
            while (evicted := next(iter(self._slot_by_name))) in self._reading:
                self._slot_by_name.move_to_end(evicted)
        named = self._next_dirty()
        if named is None:
            return None
        if evicted is not None:
            self._free.append(self._slot_by_name.pop(evicted))
        order = BlockOrder(*named, self._number, self._free.pop())
        self._order_by_block[named.block] = order
        self.num_storing += 1
        return Ordered(order, evicted)

    def end_store(self, order: BlockOrder, *, was_written: bool) -> None:
        """Record the end of an order; its slot is free again if it was not written, or if another holds the name."""
        self.num_storing -= 1
        if self._order_by_block.get(order.block) is order:
            del self._order_by_block[order.block]
        if was_written and order.name not in self._slot_by_name:
            self._slot_by_name[order.name] = order.slot
        else:
            self._free.append(order.slot)

    def forget(self, name: BlockName) -> None:
        """Free the slot of a name, which is the next to be written; ignore one that is not held, or being read."""
        if name in self._slot_by_name and name not in self._reading:
            self._free.append(self._slot_by_name.pop(name))

    def open(self, name: BlockName) -> int:
        """Return the slot of a held name and protect it from being overwritten until `close`."""
        self._reading.add(name)
        return self._slot_by_name[name]

    def close(self, name: BlockName, *, is_good: bool) -> None:
        """End an `open`; a name that could not be read is dropped."""
        self._reading.remove(name)
        if not is_good:
            self._free.append(self._slot_by_name.pop(name))

    def check(self, index: PrefixIndex) -> None:
        """Raise AssertionError unless each slot is free, held by one name, or being written, and names agree."""
        held = [*self._slot_by_name.values(), *self._free]
        assert len({*held}) == len(held), "a slot of a tier is counted twice"
        assert len(held) + self.num_storing == self._num_slots, "a slot of a tier is lost"
        assert self._reading <= self._slot_by_name.keys(), "what is read was overwritten"
        for block, name, _ in (*self._dirty.values(), *self._behind.values()):
            assert index.name_of(block) == name, f"block {block} waits to be stored under a wrong name"
        for block, order in self._order_by_block.items():
            assert index.name_of(block) == order.name, f"block {block} is stored under a wrong name"

    def _next_dirty(self) -> NamedBlock | None:
        for dirty in (self._dirty, self._behind):
            while dirty:
                _, named = dirty.popitem(last=False)
                # Another block of this name may have been stored since this one was queued.
                if named.name not in self._slot_by_name:
                    return named
        return None
